#include "undo.h"

namespace mlx_h2o {

std::vector<mx::array> StepBefore::arrays() const {
  std::vector<mx::array> all;
  for (const auto& held : {slots, scores, victims})
    if (held) all.push_back(*held);
  for (const auto& [name, row] : rows) all.push_back(row);
  if (remainder) {
    const Remainder& r = *remainder;
    all.insert(all.end(), {r.count, r.mean_key, r.var_key, r.mean_value});
  }
  if (recent) {
    for (const auto& [name, row] : recent->oldest) all.push_back(row);
    if (recent->scores) all.push_back(*recent->scores);
  }
  return all;
}

void Undo::note(StepBefore step) {
  if (!most) return;
  if (count() == most) steps.pop_front();
  steps.push_back(std::move(step));
}

size_t Undo::nbytes() const {
  size_t bytes = 0;
  for (const StepBefore& step : steps)
    for (const mx::array& a : step.arrays()) bytes += a.nbytes();
  return bytes;
}

}  // namespace mlx_h2o
