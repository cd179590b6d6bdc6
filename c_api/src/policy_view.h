// What a run of heads holds, as attention and policies see it: slots, then the newest tokens
// (python/mlx_h2o/layer/policy_view.py). `fields` are those of the run's slots, [B, heads, N,
// ...]; M is N and the tokens in the recent window.
#pragma once

#include "layer.h"

namespace mlx_h2o {

// Keys [B, heads, M, D] and values [B, heads, M, Dv].
std::pair<Parts, Parts> rows_of(BoundedLayer& layer, const Run& run, const Fields& fields);

// Positions, scores and lengths of values of the same rows, [B, heads, M].
Fields ranked_of(BoundedLayer& layer, const Run& run, const Fields& fields);

// Which of a run's rows, by their stored positions [B, heads, M], are not protected.
mx::array evictable_of(BoundedLayer& layer, const Run& run, const mx::array& positions);

// The same rows as a policy sees them; `evicted` tokens are gone from each head.
Slots slots_of(BoundedLayer& layer, const Run& run, const Fields& fields, int evicted);

// Keys and values of all rows, in order of position and as they were before they were packed,
// [B, H, held, width]; the unused are zeros.
std::pair<mx::array, mx::array> rows_by_position(BoundedLayer& layer);

// "positions" or "scores" of all rows, in order of position: [B, H, held], the unused `unused`.
mx::array by_position(BoundedLayer& layer, const std::string& name, float unused);

}  // namespace mlx_h2o
