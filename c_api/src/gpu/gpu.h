// Attention by the kernels of metal/ (python/mlx_h2o/attention/backends/gpu.py).
#pragma once

#include "../attend.h"

namespace mlx_h2o {

// Whether there are kernels for attention like this, of rows of one kind, and they proved
// themselves on the GPU of the stream of the call.
bool gpu_takes(
    const mx::array& q, const Stored& k, const Stored& v, const Masking& mask,
    const std::optional<mx::array>& sinks, Export wanted);

// Attention that `gpu_takes`, its work shared out as on a GPU of this name.
AttentionResult gpu_attend(
    const mx::array& q, const Stored& k, const Stored& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted,
    const std::string& architecture);

}  // namespace mlx_h2o
