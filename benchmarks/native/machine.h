// What `python -m benchmarks` measures of the machine: how fast it reads memory and hands out work.
#pragma once

#include <cstddef>
#include <vector>

namespace mlx_h2o {

// Bytes per second at which a pool of so many threads reads a buffer of `bytes` once, front to back
// (the median of its parts). Larger than the caches, it is what memory gives.
double read_bandwidth(size_t bytes, int threads);

// Seconds that each of `jobs` jobs takes, of `items` items each of `steps` dependent
// multiplications (0: empty), when `gap` such multiplications go by before it. Run by a pool of so
// many threads, or by the caller alone.
std::vector<double> job_seconds(bool pooled, int threads, int jobs, int items, int steps, int gap);

}  // namespace mlx_h2o
