// Decoding in one fused step on a GPU: overwrite, attend, update; nothing is read back
// (python/mlx_h2o/attention/backends/gpu_decoder.py).
#pragma once

#include "../decoder.h"

namespace mlx_h2o {

// Whether there are kernels for rows [..., D] and [..., Dv], and they write in place here.
bool gpu_can_decode(const mx::array& keys, const mx::array& values);

std::unique_ptr<Decoder> gpu_decoder_for(const Lent& lent, const CacheSettings& settings);

}  // namespace mlx_h2o
