// Priorities -> slots: which may go, which go next, which stay
// (python/mlx_h2o/policies/selection.py).
#pragma once

#include "ops.h"

namespace mlx_h2o {

// True where a slot is neither among the first `sink` positions nor the last `recent`.
mx::array evictable_slots(const mx::array& positions, int offset, int sink, int recent);

// The `count` slots to free [B, H, count] int32, worst first, ties to the oldest position.
mx::array select_victims(
    const mx::array& priority, const mx::array& positions, const mx::array& evictable, int count,
    bool per_layer);

// The `count` slots to keep [B, H, count] int32, in order of position.
mx::array select_kept(
    const mx::array& priority, const mx::array& positions, const mx::array& evictable, int count,
    bool per_layer);

}  // namespace mlx_h2o
