#include "journal.h"

#include <algorithm>

namespace mlx_h2o {

std::vector<mx::array> StepBefore::arrays() const {
  std::vector<mx::array> all;
  for (const auto& held : {slots, scores, victims})
    if (held) all.push_back(*held);
  for (const auto& [name, row] : rows) all.push_back(row);
  if (remainder) {
    const std::vector<mx::array> of_remainder = remainder->arrays();
    all.insert(all.end(), of_remainder.begin(), of_remainder.end());
  }
  if (recent) {
    for (const auto& [name, row] : recent->oldest) all.push_back(row);
    if (recent->scores) all.push_back(*recent->scores);
  }
  return all;
}

bool StepBefore::evicted() const {
  const int in_slots = offset - (recent ? recent->length : 0);
  return std::any_of(
      runs.begin(), runs.end(), [&](const Run& run) { return run.length < in_slots; });
}

void StepBefore::put_back(SlotStore& store, RecentWindow* window, Evictions& evictions) const {
  store.return_to(runs);
  if (window) window->restore(*recent);
  if (!rows.empty()) {
    std::vector<mx::array> of_runs;
    for (const Run& run : store.runs()) of_runs.push_back(part(*slots, 1, run.first, run.last));
    store.put(store.flat_index_of_heads(of_runs), rows);
  }
  if (scores) {
    std::vector<mx::array> parts;
    for (const Run& run : runs) parts.push_back(store.view(run, *scores));
    store.write("scores", parts);
  }
  if (remainder) evictions.remainder = *remainder;
  evictions.victims = victims;
}

size_t Journal::nbytes() const {
  size_t bytes = 0;
  for (const StepBefore& step : steps_)
    for (const mx::array& a : step.arrays()) bytes += a.nbytes();
  return bytes;
}

std::vector<mx::array> Journal::newest() const {
  return steps_.empty() ? std::vector<mx::array>{} : steps_.back().arrays();
}

int Journal::trimmable(int offset, bool evicted) const {
  if (!steps_.empty()) {
    offset = steps_.front().offset;
    evicted = steps_.front().evicted();
  }
  return count() + (evicted ? 0 : offset);
}

void Journal::begin(StepBefore before) {
  if (count() == most_) steps_.pop_front();
  steps_.push_back(std::move(before));
  since_settled_ = std::min(since_settled_, most_) + 1;
}

std::vector<mx::array> Journal::note_overwritten(
    const mx::array& slots, const Fields& rows, const std::optional<Remainder>& remainder) {
  StepBefore& step = steps_.back();
  step.slots = slots;
  step.remainder = remainder;
  std::vector<mx::array> reads;
  for (const auto& [name, row] : rows) {
    if (name == "scores") continue;
    step.rows.emplace(name, row);
    reads.push_back(row);
  }
  return reads;
}

StepBefore Journal::pop() {
  StepBefore newest = std::move(steps_.back());
  steps_.pop_back();
  return newest;
}

}  // namespace mlx_h2o
