// Attention with scores as an MLX operation.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "stored.h"

namespace mlx_h2o {

// Attention over [B, Hk, N, D], or over [B, S, D] with a range per head.
//
// Returns out [B, Hq, L, Dv] in q's dtype, lse [B, Hq, L], and, if asked for, logits
// ([B, Hq, L, N], flat [B, G, L, S]) or mass ([B, Hk, N], flat [B, S]), both float32.
// `mask` is an array, or "causal" in `causal`. Raises std::invalid_argument for shapes that do not
// fit together.
std::vector<mx::array> attention(
    const mx::array& q, const Stored& k, const Stored& v, float scale, bool causal,
    const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    const std::optional<Seed>& seed, const std::optional<Ranges>& ranges, Export wanted,
    mx::StreamOrDevice s);

}  // namespace mlx_h2o
