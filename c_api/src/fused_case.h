// A fused step of a GPU on a small case, beside the definition
// (python/mlx_h2o/layer/fused_case.py).
//
// A short conversation: a prompt, read by the definition, then single tokens, by the kernels in one
// cache and by the definition in another. One head is full from the start and the other fills on
// the way, so that every kind of launch comes: a row into an unused slot, a row over a victim,
// attention with and without a remainder.
#pragma once

#include "attention_call.h"
#include "settings.h"

namespace mlx_h2o {

// Whether fused steps like this, of a layer with these settings, proved themselves on the GPU of
// the stream of the call; at their first use they are checked.
bool fused_step_proven(
    const CacheSettings& settings, const AttentionCall& call, const mx::array& keys,
    const mx::array& values);

}  // namespace mlx_h2o
