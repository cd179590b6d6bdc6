#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "thread_pool.h"

namespace mlx_h2o {

namespace {

using Clock = std::chrono::steady_clock;

// A cache line; the compiler loads it with the widest registers that the build allows, and even the
// narrowest outrun memory.
typedef uint64_t Line __attribute__((vector_size(64)));

// Bytes that one thread reads at a time: enough for the hardware to prefetch.
constexpr size_t kPiece = size_t(1) << 20;
constexpr int kLines = kPiece / sizeof(Line);

// Bytes of one timing: about as long as an attention, so that both are interrupted equally often.
constexpr int kPiecesTimed = 32;

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

// This module's thread pool, of the same class as the kernels'.
ThreadPool& pool_of(int threads) {
  auto& pool = ThreadPool::shared();
  if (pool.size() != threads) pool.resize(threads);
  return pool;
}

}  // namespace

double read_bandwidth(size_t bytes, int threads) {
  // Kept for the next call, since getting memory takes longer than reading it.
  static std::mutex one_at_a_time;
  static std::vector<Line> memory;
  std::lock_guard lock(one_at_a_time);
  auto& pool = pool_of(threads);
  const int pieces = static_cast<int>(std::max<size_t>(1, bytes / kPiece));
  if (memory.size() != size_t(pieces) * kLines) {
    // (Vectors are filled; memory never written may be a single page of zeros.)
    memory = std::vector<Line>(size_t(pieces) * kLines, Line{1});
  }

  std::atomic<uint64_t> total{0};
  std::vector<double> rates;
  for (int first = 0; first < pieces; first += kPiecesTimed) {
    const int count = std::min(kPiecesTimed, pieces - first);
    const auto start = Clock::now();
    pool.run(
        count, [&](int i) { total += sum_of_piece(memory.data() + size_t(first + i) * kLines); });
    rates.push_back(count * double(kPiece) / seconds_since(start));
  }
  // The sum has a use, so that it is computed.
  if (total == 1) return 0;
  const auto median = rates.begin() + rates.size() / 2;
  std::nth_element(rates.begin(), median, rates.end());
  return *median;
}

}  // namespace mlx_h2o
