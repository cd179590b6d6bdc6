// The work of an attention launch as integers, in the layout of metal/work.h
// (python/mlx_h2o/attention/backends/work.py).
#pragma once

#include "../kernel_operands.h"
#include "../ops.h"

namespace mlx_h2o {

// The KV heads of a launch, and the blocks that they are cut into.
class Work {
 public:
  // Equal heads, or those in ranges; `block` slots each, or whole heads.
  Work(std::vector<int> lengths, const std::optional<Ranges>& ranges, std::optional<int> block);

  int slots = 0;  // of all heads
  int items = 0;  // blocks of all heads

  // The launch's integers, its table and the heads' first lines, int32.
  mx::array params(int queries, int mask_columns) const;

 private:
  int heads_;
  std::vector<int> lines_, firsts_;
};

}  // namespace mlx_h2o
