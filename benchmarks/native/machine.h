// The probe of `python -m benchmarks`: the speed of reading memory and of handing out work.
#pragma once

#include <cstddef>
#include <vector>

namespace mlx_h2o {

// Bytes per second at which a pool of `threads` threads reads a buffer of `bytes` once, in order
// (the median of its parts). For a buffer larger than the caches it is the memory's bandwidth.
double read_bandwidth(size_t bytes, int threads);

// Seconds that each of `jobs` jobs takes, of `items` items each of `steps` dependent
// multiplications (0: empty), with `gap` such multiplications before each job. A pool of `threads`
// threads runs them, or the caller alone.
std::vector<double> job_seconds(bool pooled, int threads, int jobs, int items, int steps, int gap);

}  // namespace mlx_h2o
