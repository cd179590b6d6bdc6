// The cost of handing out a small job: alone, our thread pool, OpenMP, and MLX's ThreadPool header.
//
// Not part of the package; docs/results/data/speed.json has its numbers. To build and run:
//
//   g++ -std=c++20 -O2 -fopenmp -I c_api/src/cpu
//       -I "$(python -c 'import mlx, os; print(os.path.join(list(mlx.__path__)[0], "include"))')"
//       benchmarks/thread_pools.cpp c_api/src/cpu/thread_pool.cpp -o build/thread_pools
//   build/thread_pools; OMP_WAIT_POLICY=active build/thread_pools; OMP_WAIT_POLICY=passive ...
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <future>
#include <string>
#include <vector>

#include "mlx/threadpool.h"
#include "thread_pool.h"

using Clock = std::chrono::steady_clock;

// Rounds of turns, and jobs of one turn.
constexpr int kRounds = 9;
constexpr int kJobs = 51;
constexpr int kItemsPerThread = 2;

std::atomic<uint64_t> sink{0};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Takes `steps` times a multiplication's latency.
void work(int steps) {
  uint64_t x = steps;
  for (int i = 0; i < steps; ++i) x = x * 6364136223846793005u + 1442695040888963407u;
  if (x == 1) sink = 1;
}

double median(std::vector<double> all) {
  std::nth_element(all.begin(), all.begin() + all.size() / 2, all.end());
  return all[all.size() / 2];
}

// Runs items 0 to items - 1 of a job and returns when all are done.
using Runner = std::function<void(int items, int steps)>;

double microseconds_per_job(const Runner& run, int items, int steps, int gap) {
  std::vector<double> seconds;
  for (int n = 0; n < kJobs; ++n) {
    work(gap);
    const auto start = Clock::now();
    run(items, steps);
    seconds.push_back(seconds_since(start));
  }
  return 1e6 * median(seconds);
}

int main() {
  auto& ours = mlx_h2o::ThreadPool::shared();
  const int threads = ours.size();
  ::ThreadPool mlx_pool(threads - 1);
  omp_set_num_threads(threads);

  const std::vector<std::pair<std::string, Runner>> runners = {
      {"alone",
       [](int items, int steps) {
         for (int i = 0; i < items; ++i) work(steps);
       }},
      {"our pool", [&](int items, int steps) { ours.run(items, [&](int) { work(steps); }); }},
      {"OpenMP",
       [](int items, int steps) {
#pragma omp parallel for schedule(dynamic, 1)
         for (int i = 0; i < items; ++i) work(steps);
       }},
      {"MLX ThreadPool",
       // As many tasks as other threads; the caller works too, and items are claimed by a counter.
       [&](int items, int steps) {
         std::atomic<int> next{0};
         const auto claim = [&] {
           while (next.fetch_add(1) < items) work(steps);
         };
         std::vector<std::future<void>> others;
         for (int t = 1; t < threads; ++t) others.push_back(mlx_pool.enqueue(claim));
         claim();
         for (auto& other : others) other.get();
       }},
  };

  double step = 1;
  for (int i = 0; i < 20; ++i)
    step = std::min(step, microseconds_per_job(runners[0].second, 1, 10'000, 0) / 10'000);
  const char* policy = std::getenv("OMP_WAIT_POLICY");
  std::printf(
      "%d threads, OMP_WAIT_POLICY %s; microseconds per job, median\n", threads,
      policy ? policy : "unset");
  std::printf("%8s %8s", "gap", "work");
  for (const auto& [name, run] : runners) std::printf(" %15s", name.c_str());
  std::printf("\n");
  const int items = kItemsPerThread * threads;
  for (int gap : {0, 50, 200, 1000}) {
    for (int microseconds : {0, 5, 20, 50, 100, 400}) {
      std::vector<std::vector<double>> found(runners.size());
      for (int round = 0; round < kRounds; ++round)
        for (size_t r = 0; r < runners.size(); ++r)
          found[r].push_back(microseconds_per_job(
              runners[r].second, items, int(microseconds / step / items), int(gap / step)));
      std::printf("%8d %8d", gap, microseconds);
      for (const auto& samples : found) std::printf(" %15.1f", median(samples));
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}
