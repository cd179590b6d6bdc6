// What single-token steps changed, so that the last of them can be taken back
// (python/mlx_h2o/undo.py; "Taking steps back" in docs/design.md).
#pragma once

#include <deque>

#include "recent.h"
#include "remainder.h"
#include "store.h"

namespace mlx_h2o {

// A layer as it was before a step, as far as the step changes it.
struct StepBefore {
  std::vector<Run> runs;               // with the layout that `scores` has
  std::optional<mx::array> slots;      // [B, H] that the step overwrites, within their heads
  Fields rows;                         // what was in them, as stored, [B, H, ...]; none: nothing
  std::optional<mx::array> scores;     // of all slots, flat
  std::optional<Remainder> remainder;  // if the step folds a row into it
  std::optional<mx::array> victims;
  std::optional<RecentZone::Before> recent;

  std::vector<mx::array> arrays() const;
};

// The last `most` steps, the oldest first. Empty at 0.
class Undo {
 public:
  explicit Undo(int most) : most(most) {}

  const int most;
  std::deque<StepBefore> steps;

  int count() const {
    return static_cast<int>(steps.size());
  }
  void note(StepBefore step);
  size_t nbytes() const;
};

}  // namespace mlx_h2o
