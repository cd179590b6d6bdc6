// Decoding in one fused step on a GPU: overwrite, attend, update; nothing is read back
// (python/mlx_h2o/attention/backends/gpu_decoder.py).
#pragma once

#include "../decoder.h"

namespace mlx_h2o {

// Whether there are kernels for rows [..., D] and [..., Dv].
bool gpu_has_step(const mx::array& keys, const mx::array& values);

// Whether a row that a kernel writes into its input is there for the next reader.
bool gpu_writes_in_place();

std::unique_ptr<Decoder> gpu_decoder_for(const Lent& lent, const CacheSettings& settings);

}  // namespace mlx_h2o
