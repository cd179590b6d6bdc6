// The attention kernels on a small case, beside the definition
// (python/mlx_h2o/attention/backends/self_check_variants.py).
#pragma once

#include "../attend.h"

namespace mlx_h2o {

// Whether the kernels for calls like this proved themselves on the GPU of the stream of the call;
// at their first use they are checked.
bool attention_proven(
    const mx::array& q, const Stored& k, const Stored& v, const Masking& mask,
    const std::optional<mx::array>& sinks, Export wanted);

}  // namespace mlx_h2o
