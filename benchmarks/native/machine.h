// The probe of `python -m benchmarks`: the speed of reading memory.
#pragma once

#include <cstddef>

namespace mlx_h2o {

// Bytes per second at which a pool of `threads` threads reads a buffer of `bytes` once, in order
// (the median of its parts). For a buffer larger than the caches it is the memory's bandwidth.
double read_bandwidth(size_t bytes, int threads);

}  // namespace mlx_h2o
