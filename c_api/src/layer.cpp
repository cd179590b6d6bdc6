#include "layer.h"

#include <algorithm>

#include "layer_rows.h"
#include "returning.h"

namespace mlx_h2o {

RowTypes RowTypes::of(const mx::array& keys, const mx::array& values) {
  return {keys.shape(0), keys.shape(3), values.shape(3), keys.dtype(), values.dtype()};
}

BoundedLayer::BoundedLayer(
    const CacheSettings& settings, const mx::array& keys, const mx::array& values)
    : settings(settings),
      types(RowTypes::of(keys, values)),
      memory_(settings, keys, values),
      journal_(settings.undo) {}

int BoundedLayer::held() const {
  int longest = 0;
  for (const Run& run : runs()) longest = std::max(longest, run.length);
  return longest + memory_.recently_held();
}

std::vector<mx::array> BoundedLayer::side_state() const {
  std::vector<mx::array> all = memory_.arrays();
  const std::vector<mx::array> noted = journal_.newest();
  all.insert(all.end(), noted.begin(), noted.end());
  const std::vector<mx::array> beside = of_file();
  all.insert(all.end(), beside.begin(), beside.end());
  return all;
}

std::vector<mx::array> BoundedLayer::of_file() const {
  std::vector<mx::array> all;
  if (spill) all = spill->fresh();
  if (back && !back->queries.empty()) all.push_back(back->queries.back());
  return all;
}

// -- a step ---------------------------------------------------------------------------------------

std::vector<Fields> BoundedLayer::take_in(const mx::array& keys, const mx::array& values) {
  const int L = keys.shape(2), first = offset_;
  memory_.fit_positions(first + L);
  note(L);
  std::optional<Fields> rows;
  if (RecentWindow* window = memory_.window())
    rows = window->push(keys, values, first);
  else
    rows = fields_of(settings, keys, values, first);
  if (rows) rows = marked(std::move(*rows));
  if (spill && memory_.window_plan())
    spill->take_chunk(first, keys, values, memory_.window_plan()->size());
  else if (spill)
    spill->take(first, RowKind::stored, *rows);
  offset_ += L;
  if (!rows) return memory_.attended(std::nullopt);
  if (L == 1) {  // for which victims are named already
    write_one(*rows);
    return memory_.attended(std::nullopt);
  }
  const int count = rows->at("positions").shape(2);
  for (const Run& run : runs())
    if (run.length + count > run.budget) return memory_.attended(rows);
  memory_.store().append(*rows);
  return memory_.attended(std::nullopt);
}

// Keeps what L new tokens will change, if they can be taken back.
void BoundedLayer::note(int L) {
  if (L > 1) return journal_.clear();
  if (!settings.undo) return;
  const SlotStore& store = memory_.store();
  StepBefore before{offset_, store.runs(), {}, memory_.evictions().victims, {}, {}, {}, {}};
  const auto scores = store.fields().find("scores");
  if (scores != store.fields().end()) before.scores = scores->second;
  if (const RecentWindow* window = memory_.window()) before.recent = window->before();
  journal_.begin(std::move(before));
}

// Stores one row per head: into the next unused slot, or over a victim, which is folded.
void BoundedLayer::write_one(const Fields& rows) {
  SlotStore& store = memory_.store();
  Evictions& evictions = memory_.evictions();
  store.reserve(1, rows);
  const SlotStore::NextSlots next = store.take_slots(evictions.victims, types.batch);
  mx::array flat = store.flat_index_of_heads(next.slots);
  const std::vector<float>& overwritten = next.overwritten;
  const bool any = std::find(overwritten.begin(), overwritten.end(), 1.0f) != overwritten.end();
  if (any && (settings.undo || settings.remembers())) {
    Fields old;
    for (const auto& [name, row] : rows) old.emplace(name, store.take(flat, name));
    std::vector<mx::array> reads;
    if (settings.undo) {
      std::optional<Remainder> folded_into;
      if (settings.remembers()) folded_into = evictions.remainder;
      reads = journal_.note_overwritten(join_along(next.slots, 1), old, folded_into);
    }
    if (settings.remembers()) {
      const int heads = static_cast<int>(overwritten.size());
      for (auto& [name, row] : old) row = mx::expand_dims(row, 2);
      fold(old, mx::array(overwritten.begin(), {1, heads, 1}, mx::float32), 0);
      const std::vector<mx::array> folded = evictions.remainder.arrays();
      reads.insert(reads.end(), folded.begin(), folded.end());
    }
    // Read before written: a row still to be read would make the write copy everything.
    flat = mx::depends({flat}, reads)[0];
  }
  Fields one;
  for (const auto& [name, row] : rows) one.emplace(name, mx::squeeze(row, 2));
  store.put(flat, one);
}

void BoundedLayer::fold(const Fields& rows, const mx::array& weights, int first) {
  const mx::array keys = dense(settings.packing.rows("keys", rows));
  const mx::array values = dense(settings.packing.rows("values", rows));
  Remainder& remainder = memory_.evictions().remainder;
  const Remainder of_heads = remainder.heads(first, first + keys.shape(1));
  remainder = remainder.with_heads(first, of_heads.fold(keys, values, weights));
}

void BoundedLayer::unfold(const Fields& rows, int first) {
  if (!settings.remembers()) return;
  const mx::array keys = dense(settings.packing.rows("keys", rows));
  const mx::array values = dense(settings.packing.rows("values", rows));
  Remainder& remainder = memory_.evictions().remainder;
  const Remainder of_heads = remainder.heads(first, first + keys.shape(1));
  remainder = remainder.with_heads(first, of_heads.without(keys, values));
}

void BoundedLayer::write_values(const std::vector<mx::array>& parts) {
  std::vector<Fields> stored(parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    settings.packing.put(stored[i], "values", {{mx::astype(parts[i], types.value_dtype)}});
  for (const auto& [name, of_first] : stored[0]) {
    std::vector<mx::array> of_runs;
    for (const Fields& fields : stored) of_runs.push_back(fields.at(name));
    memory_.store().write(name, of_runs);
  }
}

std::pair<mx::array, mx::array> BoundedLayer::with_plain_rows() {
  SlotStore& store = memory_.store();
  const auto [keys, values] = evictions().remainder.plain_rows(settings.plain_rows());
  store.put_reserved({{"keys", keys}, {"values", values}});
  const Run& run = runs()[0];
  return {store.with_reserved(run, "keys"), store.with_reserved(run, "values")};
}

void BoundedLayer::keep(const std::vector<Fields>& kept) {
  memory_.store().replace(kept);
  forget_victims();
}

void BoundedLayer::name_victims(const std::vector<bool>& due, const mx::array& victims) {
  SlotStore& store = memory_.store();
  for (size_t i = 0; i < due.size(); ++i)
    if (due[i]) store.name_victims(i, victims.shape(2));
  memory_.evictions().victims = victims;
}

void BoundedLayer::forget_victims() {
  memory_.evictions().victims.reset();
  memory_.store().forget_victims();
}

mx::array BoundedLayer::decode(
    const AttentionCall& call, const mx::array& keys, const mx::array& values) {
  memory_.fit_positions(offset_ + 1);
  Decoder& decoder = memory_.lent(keys, values);
  if (spill) spill->take(offset_, RowKind::plain, {{"keys", keys}, {"values", values}});
  ++offset_;
  const std::optional<RecentStep> recent = memory_.advance_window();
  std::vector<HeadPlan> heads = advanced(recent && !recent->leaving);
  return decoder.step({call, keys, values, {offset_, std::move(heads), recent, aged_from_}});
}

// What each head does in a fused step; no row comes into slots where the new one `stays` recent.
std::vector<HeadPlan> BoundedLayer::advanced(bool stays) {
  const int every = settings.policy.evict_every;
  SlotStore& plan = memory_.followed_plan();
  std::vector<HeadPlan> heads;
  for (size_t i = 0; i < plan.runs().size(); ++i) {
    const int victim = stays ? -1 : plan.advance(i, every);
    const Run& run = plan.runs()[i];
    const bool choose = slots_are_next() && run.is_full() && !run.victims;
    if (choose) plan.name_victims(i, every);
    for (int head = 0; head < run.heads(); ++head)
      heads.push_back(
          {run.start + int64_t(head) * run.allocated, run.length, victim, protected_recent(run),
           lost(run), choose});
  }
  return heads;
}

// -- between steps --------------------------------------------------------------------------------

// Rows with the positions that slots store, which tell of pins.
Fields BoundedLayer::marked(Fields rows) const {
  if (!settings.pins.empty())
    rows.insert_or_assign("positions", stored_positions(rows.at("positions"), settings.pins));
  return rows;
}

std::optional<Fields> BoundedLayer::resize_window() {
  RecentWindow* window = memory_.window();
  if (!window) return std::nullopt;
  std::optional<Fields> gone = window->resize(settings.recent_size(), offset_);
  if (gone) gone = marked(std::move(*gone));
  return gone;
}

void BoundedLayer::regroup() {
  journal_.clear();
  memory_.store().regroup(settings.own_slots(), settings.plain_rows());
  forget_victims();
}

void BoundedLayer::mark_pins() {
  SlotStore& store = memory_.store();
  journal_.clear();
  if (!store.fields().empty()) {
    std::vector<mx::array> stored;
    for (const Run& run : runs())
      stored.push_back(stored_positions(store.view(run, "positions"), settings.pins));
    store.write("positions", stored);
  }
  forget_victims();
}

void BoundedLayer::new_turn(double carry) {
  if (carry == 1 || !offset_) return;
  journal_.clear();
  const int before = aged_from_, after = offset_ - int(carry * (offset_ - before));
  // Some step is always spoken of, or masses per step would be none.
  aged_from_ = std::min(after, offset_ - 1);
  if (!settings.policy.needs_attention()) return;
  const auto carried = [&](const mx::array& scores, const mx::array& positions) {
    const auto ages = [&](int begun) {
      return f32(mx::array(offset_) - mx::maximum(positions, mx::array(begun)));
    };
    return settings.policy.carried(scores, ages(before), ages(after), carry);
  };
  SlotStore& store = memory_.store();
  std::vector<mx::array> scores;
  for (const Run& run : runs()) {
    const mx::array positions = true_positions(store.view(run, "positions"));
    scores.push_back(carried(store.view(run, "scores"), positions));
  }
  write_scores(scores);
  const RecentWindow* window = memory_.window();
  if (!window || !window->length()) return;
  const Fields newest = window->views(0, store.heads(), offset_);
  write_newest_scores(carried(newest.at("scores"), newest.at("positions")));
}

// -- taking tokens back ---------------------------------------------------------------------------

int BoundedLayer::trimmable() const {
  const bool evicted =
      std::any_of(runs().begin(), runs().end(), [&](const Run& run) { return lost(run) > 0; });
  return journal_.trimmable(offset_, evicted);
}

void BoundedLayer::trim(int n) {
  journal_.settle();
  aged_from_ = std::min(aged_from_, std::max(offset_ - n - 1, 0));
  SlotStore& store = memory_.store();
  for (; n && journal_.count(); --n) {
    const StepBefore step = journal_.pop();
    offset_ = step.offset;
    step.put_back(store, memory_.window(), memory_.evictions());
  }
  if (n) {  // nothing was evicted before these: they are the last of each head
    offset_ -= n;
    if (RecentWindow* window = memory_.window()) n -= window->trim(n);
    store.shorten(n);
    forget_victims();
  }
  memory_.fit_positions(offset_);
}

}  // namespace mlx_h2o
