// A token's key and queries in a layer's frame (python/mlx_h2o/slots/key_scaling.py).
#pragma once

#include <vector>

#include "decode_step.h"

namespace mlx_h2o {

// The step with them in the place of its own, in the same dtypes; they lie in `room`.
Step in_frame(const Layer& layer, const LayerState& state, Step step, std::vector<char>& room);

}  // namespace mlx_h2o
