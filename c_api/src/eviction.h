// Scores -> slots: what a chunk keeps, and which slots are overwritten next
// (python/mlx_h2o/layer/eviction.py).
#pragma once

#include "scoring.h"

namespace mlx_h2o {

// For every full run without victims left, chooses the next `evict_every`.
void choose_victims(BoundedLayer& layer);

// After attention: reduces a chunk that is over the budget, then chooses the next victims. Per run
// the fields of all slots attended to and, of a prompt, its window's mass.
void settle(
    BoundedLayer& layer, const std::vector<Fields>& attended,
    const std::vector<std::optional<mx::array>>& window_masses);

// Has the heads of a layer that has tokens hold what the budgets of its settings allow, which are
// others than before: what no longer fits is evicted.
void resize(BoundedLayer& layer);

// The same by another measure than the policy's, of each head's rows [B, N]: those worth most are
// kept, and `room` of each head's slots stay free for later tokens. Recent rows may go.
void keep_best(BoundedLayer& layer, const std::vector<mx::array>& worths, int room);

}  // namespace mlx_h2o
