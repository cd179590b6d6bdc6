// Launches of the kernels that score prompts: two passes over the keys, and no logits in memory
// (python/mlx_h2o/attention/backends/prompt_launches.py).
#pragma once

#include "attention_launches.h"

namespace mlx_h2o {

// Whether the kernels are written for these operands.
bool prompt_kernels_take(const mx::array& q, const Stored& k);

// Log-sum-exp [B, Hq, L] of each query's logits, for q [B, Hq, L, D] and k [B, Hk, N, D].
mx::array prompt_lse(const mx::array& q, const Stored& k, float scale, const Masking& mask);

// The mass [B, Hk, N] that the queries give each slot; lse [B, Hq, L] is over all columns that
// answered.
mx::array prompt_mass(
    const mx::array& q, const Stored& k, const mx::array& lse, float scale, const Masking& mask);

}  // namespace mlx_h2o
