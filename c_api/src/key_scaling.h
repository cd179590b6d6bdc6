// A frame for packed keys: each channel's centre and greatest distance, taken off before packing
// (python/mlx_h2o/slots/key_scaling.py). A layer with one works in it throughout.
#pragma once

#include "kernel_operands.h"
#include "ops.h"

namespace mlx_h2o {

// The frame of H KV heads, in memory of its own. Raises unless centre and scale [H, D] float32 are
// finite and the scale is above 0.
Frame checked_frame(const mx::array& centre, const mx::array& scale);

// Whether it has a centre, by which it moves all of a query's logits alike.
bool moves(const Frame& frame);

// Keys [B, H, L, D] as they are packed, in their dtype.
mx::array enter(const Frame& frame, const mx::array& keys);

// Queries [B, Hq, L, D] as they meet such keys, in their dtype.
mx::array enter_queries(const Frame& frame, const mx::array& queries);

}  // namespace mlx_h2o
