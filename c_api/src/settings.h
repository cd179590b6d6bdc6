// What a layer's cache is to be (python/mlx_h2o/budgets/settings.py).
#pragma once

#include "key_scaling.h"
#include "packed.h"
#include "pins.h"
#include "remainder.h"
#include "rope.h"

namespace mlx_h2o {

// Slots of a layer's heads from some length of the conversation on
// (python/mlx_h2o/budgets/settings.py).
struct Stage {
  int beyond;  // tokens that have come when it begins to serve
  std::vector<int> budgets;
};

// Drops the stages that have begun after so many tokens, the last of which gives the budgets.
// Returns whether there were any.
bool pass_stages(std::vector<Stage>& stages, int tokens, std::vector<int>& budgets);

struct CacheSettings {
  Policy policy = {};
  std::vector<int> budgets;  // slots of each KV head
  bool remainder = true;     // whether the evicted go on answering
  bool attending = true;     // whether attention is ours
  Packing packing = {};
  int undo = 0;                  // single-token steps that can be taken back after evictions
  Saturations saturations = {};  // of the remainder's term, for each KV head

  std::optional<Frame> frame = {};  // in which packed keys are stored
  std::optional<Rope> rope = {};    // the keys', if queries see them without gaps
  Spans pins = {};                  // positions that are never evicted, in order
  std::vector<Stage> filling = {};  // budgets that follow as the conversation grows, in order
  std::optional<int> reserved = {};
  bool kernels = true;  // whether kernels compute where there are some

  // Raises for what makes no cache.
  void check_all() const;

  int heads() const {
    return static_cast<int>(budgets.size());
  }
  // Whether statistics of the evicted are kept up.
  bool remembers() const {
    return remainder || policy.uses_evicted_mean();
  }
  // Slots of a head's budget that the evicted take as plain rows; `reserved`, if that is said.
  int plain_rows() const;
  // Tokens of the recent window, which each head's budget counts; 0: there is none.
  int recent_size() const;
  // Slots of each head, less those of the recent window and of plain rows.
  std::vector<int> own_slots() const;

 private:
  void check_budgets(const std::vector<int>& slots) const;
  void check_filling() const;
  void check_rolling() const;
};

}  // namespace mlx_h2o
