// How the attention kernels share out their work (python/mlx_h2o/attention/backends/tiling.py,
// where the reasons are).
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace mlx_h2o {

// Queries of one call.
constexpr int kMostQueries = 8;

// Whether the kernels are written for rows of this width.
bool is_kernel_width(int width);

// The template arguments that follow from the sizes of a call.
struct Tiling {
  int queries, rows, row_groups, row_blocks, simdgroups, keys;

  // Simdgroups of a threadgroup that have different keys.
  int splits() const {
    return simdgroups / row_groups;
  }
};

// Shares out the query rows of a KV head: `group` query heads, `queries` of each; itemsize are
// bytes of an element.
Tiling tiling(int key_width, int value_width, int group, int queries, int itemsize, bool packed);

// The slots of a block where two passes pay, or nothing for one pass. `stored` are a slot's bytes
// if it is packed.
std::optional<int> slots_per_block(
    const std::vector<int>& lengths, int group, int queries, int key_width, int value_width,
    int itemsize, const std::string& architecture, std::optional<int> stored);

}  // namespace mlx_h2o
