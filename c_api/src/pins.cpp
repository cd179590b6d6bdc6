#include "pins.h"

#include <algorithm>
#include <numeric>

namespace mlx_h2o {

namespace {

void refuse_too_many(int pinned, int least, int mean, const Policy& policy) {
  int most = 0;
  for (int n = 0; n < pinned; ++n)
    if (policy.least_budget(n) <= mean) most = n;
  check(
      false,
      std::to_string(pinned) + " pinned tokens are too many: with " + std::to_string(policy.sink) +
          " sinks, " + std::to_string(policy.recent_slots(least)) + " recent tokens and " +
          std::to_string(policy.evict_every) + " to evict they need " + std::to_string(least) +
          " slots in every KV head, and this layer has " + std::to_string(mean) +
          " a head. Pin at most " + std::to_string(most) + " tokens, or give it larger budgets.");
}

}  // namespace

Spans joined(Spans spans) {
  std::sort(spans.begin(), spans.end());
  Spans out;
  for (const auto& [first, end] : spans) {
    if (!out.empty() && first <= out.back().second)
      out.back().second = std::max(out.back().second, end);
    else
      out.emplace_back(first, end);
  }
  return out;
}

Spans without(const Spans& spans, const Spans& others) {
  Spans out;
  for (auto [first, end] : spans) {
    for (const auto& [start, stop] : others) {
      if (stop <= first || start >= end) continue;
      if (first < start) out.emplace_back(first, start);
      first = stop;
    }
    if (first < end) out.emplace_back(first, end);
  }
  return out;
}

int pinned_from(const Spans& spans, int sink) {
  int count = 0;
  for (const auto& [first, end] : spans) count += std::max(end - std::max(first, sink), 0);
  return count;
}

bool is_pinned(const Spans& spans, int position) {
  for (const auto& [first, end] : spans)
    if (first <= position && position < end) return true;
  return false;
}

mx::array stored_positions(const mx::array& positions, const Spans& spans) {
  mx::array stored = true_positions(positions);
  for (const auto& [first, end] : spans) {
    const mx::array inside = mx::logical_and(
        mx::greater_equal(stored, mx::array(first)), mx::less(stored, mx::array(end)));
    stored = mx::where(inside, mx::array(-1) - stored, stored);
  }
  return stored;
}

mx::array true_positions(const mx::array& stored) {
  return mx::maximum(stored, mx::array(-1) - stored);
}

std::vector<int> room_for_pins(
    const std::vector<int>& budgets, const Policy& policy, const Spans& pins) {
  const int pinned = pinned_from(pins, policy.sink), least = policy.least_budget(pinned);
  int64_t lacking = 0, spare = 0;
  std::vector<int> spares;
  for (int budget : budgets) {
    lacking += std::max(least - budget, 0);
    spares.push_back(std::max(budget - least, 0));
    spare += spares.back();
  }
  if (!lacking) return budgets;
  if (spare < lacking) {
    const int64_t all = std::accumulate(budgets.begin(), budgets.end(), int64_t(0));
    refuse_too_many(pinned, least, int(all / int64_t(budgets.size())), policy);
  }
  std::vector<int64_t> given;
  for (int part : spares) given.push_back(part * lacking / spare);
  // What rounding down left over comes of the largest.
  int64_t left = lacking - std::accumulate(given.begin(), given.end(), int64_t(0));
  std::vector<size_t> largest(spares.size());
  std::iota(largest.begin(), largest.end(), 0);
  std::stable_sort(
      largest.begin(), largest.end(), [&](size_t a, size_t b) { return spares[a] > spares[b]; });
  for (size_t i = 0; left > 0; ++i, --left) ++given[largest[i]];
  std::vector<int> roomy;
  for (size_t i = 0; i < budgets.size(); ++i)
    roomy.push_back(std::max(budgets[i], least) - int(given[i]));
  return roomy;
}

}  // namespace mlx_h2o
