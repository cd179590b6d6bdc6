// Kept values, fitted so that attention to the kept rows gives what attention to all rows gave
// (python/mlx_h2o/compression/value_fit.py has the formula).
//
// Source: the values' least squares of "Fast KV Compaction via Attention Matching" (arXiv
// 2602.16284, section 3), here for rows as they are packed and with the remainder beside them.
#pragma once

#include "layer.h"

namespace mlx_h2o {

// The most queries by which a KV head is fitted, those of its query heads together. All layers'
// wait in memory until rows were chosen; three times as many diverge hardly less.
constexpr int kMostQueries = 1024;

// The rows of a layer before some are evicted, as they are stored, and the remainder then.
struct AllRows {
  std::vector<Fields> heads;           // of each KV head, [B, 1, N, ...]
  std::optional<Remainder> remainder;  // none: no row was evicted before, or it does not answer

  static AllRows of(BoundedLayer& layer);
};

// Fits the values that a layer has kept of the rows `before`, by the queries of a second reading.
// Of each KV head the kept rows' anchors, [B, S]: further weights of their values as they were.
void fit_values(
    BoundedLayer& layer, const AllRows& before, AttentionCall call,
    const std::vector<std::vector<double>>& anchors);

}  // namespace mlx_h2o
