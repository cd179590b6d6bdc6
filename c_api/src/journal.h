// What single-token steps changed, so that the last of them can be taken back
// (python/mlx_h2o/slots/journal.py; "Steps taken back" in docs/how-it-works/index.md).
#pragma once

#include <deque>

#include "array_owner.h"

namespace mlx_h2o {

// A layer as it was before a step, as far as the step changes it.
struct StepBefore {
  int offset;
  std::vector<Run> runs;            // with the layout that `scores` has
  std::optional<mx::array> scores;  // of all slots, flat
  std::optional<mx::array> victims;
  std::optional<RecentWindow::Before> recent;
  std::optional<mx::array> slots;      // [B, H] that the step overwrites, within their heads
  Fields rows;                         // what was in them, as stored, [B, H, ...]; none: nothing
  std::optional<Remainder> remainder;  // if the step folds a row into it

  std::vector<mx::array> arrays() const;
  // Whether anything had been evicted.
  bool evicted() const;
  void put_back(SlotStore& store, RecentWindow* window, Evictions& evictions) const;
};

// The last steps of a layer, the oldest first.
class Journal {
 public:
  explicit Journal(int most) : most_(most) {}

  int count() const {
    return static_cast<int>(steps_.size());
  }
  size_t nbytes() const;
  // The newest step's arrays.
  std::vector<mx::array> newest() const;
  // How many tokens can be taken back of a layer at this offset, which has evicted some or not.
  int trimmable(int offset, bool evicted) const;

  // Whether no drafted tokens are under way: just after steps were taken back, and after more than
  // `most` steps that were not, since a caller that drafts takes rejected tokens back within them.
  bool settled() const {
    return since_settled_ == 0 || since_settled_ > most_;
  }
  // Notes that no drafted tokens are under way.
  void settle() {
    since_settled_ = 0;
  }
  // Forgets all steps: what is to come cannot be undone past.
  void clear() {
    steps_.clear();
    settle();
  }
  // A step begins.
  void begin(StepBefore before);
  // It overwrites these rows [B, H, ...] of slots [B, H], and folds them into a remainder. What
  // must be read before the rows are written.
  std::vector<mx::array> note_overwritten(
      const mx::array& slots, const Fields& rows, const std::optional<Remainder>& remainder);
  // The newest step, which is taken back.
  StepBefore pop();

 private:
  const int most_;  // 0: it holds none
  std::deque<StepBefore> steps_;
  int since_settled_ = 0;  // steps that came one by one; counted to most_ + 1
};

}  // namespace mlx_h2o
