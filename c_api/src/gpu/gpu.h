// Attention by the kernels of metal/ (python/mlx_h2o/attention/backends/gpu.py).
#pragma once

#include "../attend.h"

namespace mlx_h2o {

// Over rows of one kind; nothing where the kernels are not written for the operands.
std::optional<Attended> gpu_attend(
    const mx::array& q, const Stored& k, const Stored& v, float scale, const Masking& mask,
    const std::optional<mx::array>& sinks, const std::optional<Seed>& seed, Export wanted);

}  // namespace mlx_h2o
