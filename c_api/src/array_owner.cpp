#include "array_owner.h"

#include "value_lengths.h"

namespace mlx_h2o {

Memory::Memory(const CacheSettings& settings, const mx::array& keys, const mx::array& values)
    : settings_(settings),
      store_(settings.own_slots(), settings.plain_rows()),
      evictions_(
          Evictions{
              Remainder::empty(keys.shape(0), keys.shape(1), keys.shape(3), values.shape(3)),
              std::nullopt}) {
  const int recent = settings.recent_size();
  if (!recent) return;
  window_.emplace(recent, settings.packing, settings.policy);
  // So that there are fields to look at while all tokens are recent.
  store_.reserve(1, fields_of(settings, part(keys, 2, 0, 1), part(values, 2, 0, 1), 0));
}

Memory::Memory(Memory& other, const CacheSettings& settings)
    : settings_(settings),
      store_(other.store()),
      window_(other.window_),
      evictions_(other.evictions_) {}

Memory::Memory(const Memory& other, const CacheSettings& settings, Lent seen)
    : settings_(settings),
      store_(other.store_),
      window_(other.window_),
      evictions_(Evictions{seen.remainder, seen.victims}) {
  store_.get_back(std::move(seen.fields));
  if (window_) window_->get_back(std::move(*seen.window));
}

SlotStore& Memory::store() {
  take_back();
  return store_;
}

RecentWindow* Memory::window() {
  take_back();
  return window_ ? &*window_ : nullptr;
}

Evictions& Memory::evictions() {
  take_back();
  return *evictions_;
}

std::vector<mx::array> Memory::arrays() const {
  std::vector<mx::array> all;
  if (decoder_) return all;
  for (const auto& [name, field] : store_.fields()) all.push_back(field);
  if (window_)
    for (const auto& [name, field] : window_->fields()) all.push_back(field);
  if (settings_.remembers())
    for (const mx::array& a : evictions_->remainder.arrays()) all.push_back(a);
  if (evictions_->victims) all.push_back(*evictions_->victims);
  return all;
}

size_t Memory::nbytes() const {
  if (decoder_) return lent_bytes_;
  size_t bytes = 0;
  for (const mx::array& a : arrays()) bytes += a.nbytes();
  return bytes;
}

std::vector<Fields> Memory::attended(const std::optional<Fields>& beyond) {
  take_back();
  std::vector<Fields> of_runs;
  for (const Run& run : store_.runs()) {
    if (!beyond) {
      of_runs.push_back(store_.views(run));
      continue;
    }
    Fields all = heads_of(*beyond, run.first, run.last);
    if (run.length)
      for (auto& [name, rows] : all) rows = mx::concatenate({store_.view(run, name), rows}, 2);
    of_runs.push_back(std::move(all));
  }
  return of_runs;
}

Decoder& Memory::lent(const mx::array& keys, const mx::array& values) {
  if (decoder_ && lent_to_ == backend() && !store_.needs_room()) return *decoder_;
  take_back();
  if (store_.needs_room()) store_.reserve(1, fields_of(settings_, keys, values, 0));
  if (!evictions_->victims) {
    const int heads = store_.heads(), every = settings_.policy.evict_every;
    evictions_->victims = mx::zeros({keys.shape(0), heads, every}, mx::int32);
  }
  const size_t bytes = nbytes();
  std::optional<Fields> newest;
  if (window_) newest = window_->lend();
  Lent lent{store_.lend(), evictions_->remainder, *evictions_->victims, std::move(newest)};
  // The kernels may write in place only what has no other reference.
  evictions_.reset();
  decoder_ = decoder_for(std::move(lent), settings_);
  lent_to_ = backend();
  lent_bytes_ = bytes;
  return *decoder_;
}

std::optional<RecentStep> Memory::advance_window() {
  return window_ ? std::optional(window_->advance()) : std::nullopt;
}

void Memory::fit_positions(int tokens) {
  if (!store_.positions_fit(tokens)) store().fit_positions(tokens);
}

void Memory::take_back() {
  if (!decoder_) return;
  Lent back = decoder_->end();
  decoder_.reset();
  store_.get_back(std::move(back.fields));
  if (window_) window_->get_back(std::move(*back.window));
  evictions_ = Evictions{back.remainder, back.victims};
}

Fields fields_of(
    const CacheSettings& settings, const mx::array& keys, const mx::array& values, int first) {
  const int B = keys.shape(0), H = keys.shape(1), L = keys.shape(2);
  Fields rows;
  settings.packing.put(rows, "keys", {{keys}});
  settings.packing.put(rows, "values", {{values}});
  rows.emplace("positions", mx::broadcast_to(range(first, first + L), {B, H, L}));
  if (settings.policy.needs_attention()) rows.emplace("scores", mx::zeros({B, H, L}));
  if (settings.policy.keeps_value_lengths(settings.packing))
    rows.emplace("value_lengths", value_lengths(values));
  return rows;
}

}  // namespace mlx_h2o
