#include "twice.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <unordered_map>

#include "evaluation.h"
#include "value_fit.h"

namespace mlx_h2o {

namespace {

// The part of its slots, beyond the fewest, that a head keeps whatever the others' rows are worth.
// The profile knows what the head loses on any text, the weights what this text wants of it. With
// half of the slots SmolLM2 diverges by half as much as with none or all
// (docs/results/experiments.md).
constexpr double kOwnPart = 0.5;
// The greatest anchor's root: values of rows from before the prompt stay as they are.
constexpr float kStays = 1e4f;
// Tokens among which a head chooses, beyond those that its policy needs
// (python/mlx_h2o/budgets/plan.py).
constexpr int kFewestChoices = 4;

// Numbers of one head's rows, [B, N].
template <class Number>
struct HeadRows {
  int sequences, count;
  std::vector<Number> numbers;

  Number* operator[](int sequence) {
    return numbers.data() + size_t(sequence) * count;
  }
  const Number* operator[](int sequence) const {
    return numbers.data() + size_t(sequence) * count;
  }
};
using Worths = HeadRows<float>;

// Of each KV head, of arrays [B, heads, N], one for each run.
template <class Number>
std::vector<HeadRows<Number>> by_head(std::vector<mx::array> of_runs) {
  for (mx::array& run : of_runs) run = mx::contiguous(run);
  evaluate(of_runs);
  std::vector<HeadRows<Number>> all;
  for (const mx::array& run : of_runs) {
    const int B = run.shape(0), heads = run.shape(1), N = run.shape(2);
    for (int head = 0; head < heads; ++head) {
      HeadRows<Number> rows{B, N, {}};
      for (int b = 0; b < B; ++b) {
        const Number* const first = run.data<Number>() + (size_t(b) * heads + head) * N;
        rows.numbers.insert(rows.numbers.end(), first, first + N);
      }
      all.push_back(std::move(rows));
    }
  }
  return all;
}

// Positions of each head's rows, in the order of its slots.
std::vector<HeadRows<int>> positions_of(BoundedLayer& layer) {
  std::vector<mx::array> of_runs;
  for (const Run& run : layer.runs())
    of_runs.push_back(true_positions(layer.store().view(run, "positions")));
  return by_head<int>(std::move(of_runs));
}

// The rows that each head holds; none before the first.
std::vector<int> lengths_of(Core& cache) {
  if (!cache.row_types()) return std::vector<int>(cache.heads());
  std::vector<int> lengths;
  for (const Run& run : cache.layer_with_tokens().runs())
    lengths.insert(lengths.end(), run.heads(), run.length);
  return lengths;
}

// The slots that each head keeps whatever its rows are worth.
std::vector<int> own_slots(const std::vector<int>& planned, int64_t whole, int least) {
  std::vector<int> own;
  int64_t beyond = 0;
  for (int slots : planned) beyond += std::max(slots - least, 0);
  const double free =
      kOwnPart * std::max<int64_t>(whole - int64_t(least) * int64_t(planned.size()), 0);
  for (int slots : planned)
    own.push_back(least + int(free * std::max(slots - least, 0) / std::max<int64_t>(beyond, 1)));
  return own;
}

// NaN ranks below every number: compared as it is, it would leave the rows without an order.
float sortable(float worth) {
  return std::isnan(worth) ? -kInfinity : worth;
}

// The worths of a head's rows of the prompt, which begin behind `older` ones, best first; with
// several sequences means of equal ranks.
std::vector<float> ordered(const Worths& rows, int older) {
  std::vector<float> means(rows.count - older);
  for (int b = 0; b < rows.sequences; ++b) {
    std::vector<float> own(rows[b] + older, rows[b] + rows.count);
    for (float& worth : own) worth = sortable(worth);
    std::sort(own.begin(), own.end(), std::greater<>());
    for (size_t i = 0; i < own.size(); ++i) means[i] += own[i];
  }
  for (float& worth : means) worth /= float(rows.sequences);
  return means;
}

// How much the values of kept rows are drawn to what they were, [B, S]: by the square of the
// greatest weight that any query gave the row, as if one more gave it that.
std::vector<double> anchors_of(
    const Worths& worths, const HeadRows<int>& before, const HeadRows<int>& after) {
  std::vector<double> anchors;
  for (int b = 0; b < after.sequences; ++b) {
    std::unordered_map<int, float> of_position;
    for (int i = 0; i < before.count; ++i) of_position[before[b][i]] = worths[b][i];
    for (int i = 0; i < after.count; ++i) {
      const float root = std::min(of_position[after[b][i]], kStays);
      anchors.push_back(double(root * root));
    }
  }
  return anchors;
}

// Keeps the rows worth most in a layer, and fits their values.
void cut(
    Core& cache, const SecondReading& look, const std::vector<Worths>& worths,
    std::vector<int> budgets, int room) {
  BoundedLayer& layer = cache.layer_with_tokens();
  const AllRows before = AllRows::of(layer);
  const std::vector<HeadRows<int>> places = positions_of(layer);
  std::vector<mx::array> of_heads;
  for (const Worths& head : worths)
    of_heads.push_back(mx::array(head.numbers.begin(), {head.sequences, head.count}, mx::float32));
  cache.keep_best(of_heads, std::move(budgets), room);
  if (look.fits()) {
    const std::vector<HeadRows<int>> kept = positions_of(layer);
    std::vector<std::vector<double>> anchors;
    for (size_t head = 0; head < kept.size(); ++head)
      anchors.push_back(anchors_of(worths[head], places[head], kept[head]));
    fit_values(layer, before, look.call(), anchors);
  }
  evaluate(layer.side_state());  // or all of the prompt's rows stayed
}

// Raises unless a cache can read a prompt twice beside others that are at a position.
void check_readable(Core& cache, int offset) {
  const CacheSettings& settings = cache.settings();
  check(
      settings.attending, "A model that attends by itself does not show what rows are worth.",
      Blame::settings);
  check(
      !settings.rope, "Rows that are read twice keep the positions where they were read: no rope.",
      Blame::settings);
  check(
      !settings.packing.recent_bits, "The newest tokens have a width of their own: no recent_bits.",
      Blame::settings);
  check(
      !settings.policy.per_layer, "Rows of each head compete: the policy's unit is the layer.",
      Blame::settings);
  check(
      cache.offset() == offset,
      "The caches of one conversation have read as many tokens; one has read " +
          std::to_string(cache.offset()) + " and another " + std::to_string(offset) + ".",
      Blame::state);
  check(
      !offset || !cache.layer_with_tokens().spill,
      "Evicted rows come back from the file of rows meanwhile: of a conversation with one only the "
      "first prompt can be read twice.",
      Blame::settings);
}

}  // namespace

std::vector<int> shared_out(
    const std::vector<std::vector<float>>& worths, int64_t whole, std::vector<int> own) {
  const int T = int(worths[0].size());
  int64_t free = std::min<int64_t>(whole, int64_t(T) * int64_t(worths.size()));
  std::vector<std::pair<float, int>> others;  // of a head
  for (size_t head = 0; head < worths.size(); ++head) {
    own[head] = std::min(own[head], T);
    free -= own[head];
    for (int i = own[head]; i < T; ++i) others.emplace_back(sortable(worths[head][i]), int(head));
  }
  std::stable_sort(
      others.begin(), others.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (int64_t i = 0; i < free; ++i) ++own[others[size_t(i)].second];
  return own;
}

TwoReadings::Slots TwoReadings::Slots::grown(int tokens) const {
  Slots later = *this;
  pass_stages(later.filling, tokens, later.budgets);
  return later;
}

TwoReadings::TwoReadings(const std::vector<Core*>& caches, int length, int room)
    : length_(length), room_(room), end_(caches[0]->offset() + length) {
  const int offset = caches[0]->offset();
  int pinned = 0, smallest = 0;
  std::vector<int> planned;
  std::vector<std::vector<int>> parts;
  size_t heads = 0;
  for (Core* cache : caches) {
    const CacheSettings& settings = cache->settings();
    check_readable(*cache, offset);
    pinned = std::max(pinned, pinned_from(settings.pins, settings.policy.sink));
    smallest = std::max(smallest, settings.policy.least_budget(pinned) + kFewestChoices);
    heads += cache->heads();
    before_.push_back({settings.budgets, settings.filling});
    for (int slots : before_.back().grown(end_).budgets) planned.push_back(slots);
    for (int slots : settings.budgets) whole_ += slots;
  }
  const int64_t all = whole_;
  whole_ -= int64_t(room) * int64_t(heads);
  const int sink = caches[0]->settings().policy.sink;
  int least = std::max(smallest - room, sink + pinned + 1);
  if (offset) {
    const double older = double(offset) / end_;
    for (Core* cache : caches) {
      parts.emplace_back();
      for (int slots : cache->settings().budgets)
        parts.back().push_back(std::max(int(slots * older), smallest));
      const std::vector<int> held = lengths_of(*cache);
      for (size_t i = 0; i < held.size(); ++i) whole_ -= std::min(held[i], parts.back()[i]);
    }
    least = 0;  // sinks are among the older rows
  }
  check(
      whole_ >= int64_t(std::min(least, length)) * int64_t(heads),
      std::to_string(all) + " slots of " + std::to_string(heads) +
          " KV heads are too few to keep " + std::to_string(least) +
          " rows of each, beside room for " + std::to_string(room) + ": give more slots.",
      Blame::settings);
  check_within("The rows of a head", int64_t(end_) + length + room, 1, kMostTokens);
  own_ = own_slots(planned, whole_, least);
  looks_.resize(caches.size());
  make_room(caches, parts);
}

void TwoReadings::make_room(
    const std::vector<Core*>& caches, const std::vector<std::vector<int>>& parts) {
  try {
    for (size_t i = 0; i < caches.size(); ++i) {
      if (!parts.empty()) caches[i]->resize(parts[i]);
      older_.push_back(lengths_of(*caches[i]));
      std::vector<int> roomy = older_.back();
      for (int& slots : roomy) slots += length_ + room_;
      caches[i]->resize(std::move(roomy));
    }
  } catch (...) {
    return_to_bound(caches);
    throw;
  }
}

void TwoReadings::check_open() const {
  check(!over_, "These two readings are over.", Blame::state);
}

// Raises unless a cache has read the prompt, and no more.
void TwoReadings::check_read(const Core& cache) const {
  check(
      cache.offset() == end_,
      "The prompt ends at position " + std::to_string(end_) + ", and this cache is at " +
          std::to_string(cache.offset()) + ": it has not read it once.",
      Blame::state);
}

mx::array TwoReadings::look(
    size_t layer, Core& cache, const AttentionCall& call, const mx::array& keys,
    const mx::array& values) {
  check_open();
  check_read(cache);
  cache.check_step(call, keys, values);
  BoundedLayer& rows = cache.layer_with_tokens();
  std::optional<SecondReading>& look = looks_[layer];
  if (!look) look.emplace(rows, length_);
  return look->look(rows, call, keys, values);
}

std::vector<mx::array> TwoReadings::state() const {
  std::vector<mx::array> all;
  for (const std::optional<SecondReading>& look : looks_) {
    if (!look) continue;
    const std::vector<mx::array> of_layer = look->state();
    all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  return all;
}

const std::vector<mx::array>& TwoReadings::worths(size_t layer) const {
  check(looks_[layer].has_value(), "This layer was not read a second time.", Blame::state);
  return looks_[layer]->worths();
}

void TwoReadings::finish(const std::vector<Core*>& caches) {
  check_open();
  for (size_t i = 0; i < caches.size(); ++i) {
    check_read(*caches[i]);
    worths(i);
    std::vector<int> all = older_[i];
    for (int& rows : all) rows += length_;
    check(
        lengths_of(*caches[i]) == all, "This cache does not hold all of the prompt any more.",
        Blame::state);
  }
  try {
    keep(caches);
  } catch (...) {
    const std::exception_ptr why = std::current_exception();
    try {
      return_to_bound(caches);
    } catch (const Refusal&) {  // what is broken stays so
    }
    std::rethrow_exception(why);
  }
  over_ = true;
  looks_.clear();
}

void TwoReadings::keep(const std::vector<Core*>& caches) {
  std::vector<std::vector<Worths>> worths;
  std::vector<std::vector<float>> best_first;
  for (size_t i = 0; i < caches.size(); ++i) {
    worths.push_back(by_head<float>(this->worths(i)));
    for (size_t head = 0; head < worths[i].size(); ++head) {
      Worths& rows = worths[i][head];
      best_first.push_back(ordered(rows, older_[i][head]));
      for (int b = 0; b < rows.sequences; ++b)
        std::fill(rows[b], rows[b] + older_[i][head], kInfinity);  // they stay
    }
  }
  const std::vector<int> counts = shared_out(best_first, whole_, own_);
  for (size_t i = 0, head = 0; i < caches.size(); ++i) {
    std::vector<int> budgets = older_[i];
    for (int& slots : budgets) slots += counts[head++] + room_;
    cut(*caches[i], *looks_[i], worths[i], std::move(budgets), room_);
  }
}

void TwoReadings::abandon(const std::vector<Core*>& caches) {
  check_open();
  return_to_bound(caches);
}

void TwoReadings::return_to_bound(const std::vector<Core*>& caches) {
  over_ = true;
  looks_.clear();
  std::exception_ptr first;
  for (size_t i = 0; i < caches.size(); ++i) {
    try {
      caches[i]->check_whole();
      Slots slots = before_[i].grown(caches[i]->offset());
      caches[i]->resize(std::move(slots.budgets), std::move(slots.filling));
    } catch (const Refusal&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace mlx_h2o
