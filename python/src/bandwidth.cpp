#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "thread_pool.h"

namespace mlx_h2o {

namespace {

using Clock = std::chrono::steady_clock;

// A cache line; the compiler loads it with the widest registers that the build allows, and even the
// narrowest outrun memory.
typedef uint64_t Line __attribute__((vector_size(64)));

// What one thread reads at a time: long enough for the hardware to run ahead of it.
constexpr size_t kPiece = size_t(1) << 20;
constexpr int kLines = kPiece / sizeof(Line);

struct Free {
  void operator()(Line* p) const {
    ::operator delete(p, std::align_val_t(4096));
  }
};

uint64_t sum_of_piece(const Line* p) {
  Line sums[4] = {};
  for (int i = 0; i < kLines; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += p[i + j];
  const Line all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return all[0] + all[1] + all[2] + all[3] + all[4] + all[5] + all[6] + all[7];
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Takes `steps` times a multiplication's latency.
uint64_t worked(int steps, uint64_t x) {
  for (int i = 0; i < steps; ++i) x = x * 6364136223846793005u + 1442695040888963407u;
  return x;
}

}  // namespace

double read_bandwidth(size_t bytes) {
  const int pieces = static_cast<int>(std::max<size_t>(1, bytes / kPiece));
  const size_t size = pieces * kPiece;
  const std::unique_ptr<Line[], Free> memory(
      static_cast<Line*>(::operator new(size, std::align_val_t(4096))));
  auto& pool = ThreadPool::shared();
  // Memory that was never written may be one and the same page of zeros.
  pool.run(pieces, [&](int i) { std::memset(memory.get() + size_t(i) * kLines, i + 1, kPiece); });

  std::atomic<uint64_t> total{0};
  const auto start = Clock::now();
  pool.run(pieces, [&](int i) { total += sum_of_piece(memory.get() + size_t(i) * kLines); });
  const double seconds = seconds_since(start);
  // The sum has a use, so that it is computed.
  return total == 1 ? 0 : size / seconds;
}

double seconds_per_job(bool pooled, int jobs, int items, int steps, int gap) {
  std::atomic<uint64_t> sink{0};
  const auto job = [&](int i) {
    if (steps && worked(steps, i) == 1) sink = 1;
  };
  auto& pool = ThreadPool::shared();
  double seconds = 0;
  for (int n = 0; n < jobs; ++n) {
    if (gap && worked(gap, n) == 1) sink = 1;
    const auto start = Clock::now();
    if (pooled) {
      pool.run(items, job);
    } else {
      for (int i = 0; i < items; ++i) job(i);
    }
    seconds += seconds_since(start);
  }
  return seconds / jobs;
}

}  // namespace mlx_h2o
