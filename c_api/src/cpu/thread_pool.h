// A few threads that share out numbered items of one job at a time.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace mlx_h2o {

// Which thread gets which item is left to chance; a job must not depend on it.
//
// A decode step of a small layer takes tens of microseconds, so handing it out must cost less than
// a few: one atomic store wakes the workers, items are claimed by an atomic counter, and a worker
// that comes too late finds the job closed. (docs/results/data/speed.json compares it with OpenMP
// and MLX's own pool.)
class ThreadPool {
 public:
  static ThreadPool& shared();

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Threads a job may run on, the caller's included.
  int size() const {
    return static_cast<int>(workers_.size()) + 1;
  }
  void resize(int threads);

  // Whether a worker would start at once. Waking one that sleeps takes as long as reading a
  // megabyte.
  bool awake() const {
    return awake_.load(std::memory_order_relaxed) > 0;
  }

  // Calls job(i) for each i below items, then returns. Runs on the caller alone while another
  // thread's job has the pool, and within a job.
  template <class Job>
  void run(int items, const Job& job) {
    run_erased(items, [](const void* j, int i) { (*static_cast<const Job*>(j))(i); }, &job);
  }

 private:
  using Call = void (*)(const void*, int);

  void run_erased(int items, Call call, const void* job);
  void claim_items();
  void serve();
  void start(int threads);
  void stop();

  std::mutex busy_;
  std::vector<std::thread> workers_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> open_{false};
  std::atomic<int> inside_{0};
  std::atomic<int> awake_{0};
  std::atomic<int> next_{0};
  int items_ = 0;
  Call call_ = nullptr;
  const void* job_ = nullptr;
};

}  // namespace mlx_h2o
