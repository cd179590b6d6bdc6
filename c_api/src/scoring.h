// Attention -> scores: a call's queries attend, and the policy learns what they looked at
// (python/mlx_h2o/layer/scoring.py).
#pragma once

#include "layer.h"

namespace mlx_h2o {

// What attention over one run of heads gave.
struct RunResult {
  mx::array out;                           // [B, Hq of the run, L, Dv]
  Fields fields;                           // of its slots, scores brought up to date
  std::optional<mx::array> newest_scores;  // of the recent window's tokens, [B, heads, M]
  // What the last queries of a prompt gave each row, [B, heads, N + M], if the policy wants that.
  std::optional<mx::array> window_mass;
};

// Attends with a run's queries to its slots, whose fields are [B, heads, N, ...], the newest tokens
// and the remainder. The call is of all heads; its rows are in the layer.
RunResult observe(
    BoundedLayer& layer, const Run& run, const AttentionCall& call, const Fields& fields);

}  // namespace mlx_h2o
