// What `mlx_h2o bench` measures of the machine itself: how fast it reads, how fast it hands out
// work.
#pragma once

#include <cstddef>

namespace mlx_h2o {

// Bytes per second at which the shared pool's threads read a buffer of `bytes` once, front to back.
// Larger than the caches, it is what memory gives.
double read_bandwidth(size_t bytes);

// Mean seconds that a job of `items` takes, each of `steps` dependent multiplications (0: empty),
// over `jobs` of them, when `gap` such multiplications go by between one job and the next. Run by
// the shared pool, or by the caller alone.
double seconds_per_job(bool pooled, int jobs, int items, int steps, int gap);

}  // namespace mlx_h2o
