#include "thread_pool.h"

#include <algorithm>
#include <cstdlib>

namespace mlx_h2o {

namespace {

// Reading memory saturates long before a large machine's cores are used up.
constexpr int kMostThreads = 16;

// How often an idle thread looks again before it goes to sleep: about as long as the gap between
// two layers of a small model.
constexpr int kSpins = 2000;

// Whether this thread works on an item: what the item hands out runs on this thread alone.
thread_local bool within_item = false;

int default_threads() {
  if (const char* wanted = std::getenv("MLX_H2O_THREADS")) {
    if (const int threads = std::atoi(wanted); threads > 0) return threads;
  }
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMostThreads);
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  // Never destroyed: MLX's stream threads may still run jobs while the process exits.
  static ThreadPool* pool = new ThreadPool(default_threads());
  return *pool;
}

ThreadPool::ThreadPool(int threads) {
  start(threads);
}

ThreadPool::~ThreadPool() {
  stop();
}

void ThreadPool::resize(int threads) {
  std::lock_guard lock(busy_);
  stop();
  start(threads);
}

void ThreadPool::start(int threads) {
  stopping_ = false;
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { serve(); });
}

void ThreadPool::stop() {
  stopping_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPool::run_erased(int items, Call call, const void* job) {
  std::unique_lock lock(busy_, std::defer_lock);
  if (items == 1 || within_item || !lock.try_lock() || workers_.empty()) {
    for (int i = 0; i < items; ++i) call(job, i);
    return;
  }
  call_ = call;
  job_ = job;
  items_ = items;
  next_ = 0;
  open_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  claim_items();
  // Threads that enter from now on find the job closed; those inside are waited for.
  open_ = false;
  while (inside_ != 0) pause();
}

void ThreadPool::claim_items() {
  within_item = true;
  for (int i = next_.fetch_add(1); i < items_; i = next_.fetch_add(1)) call_(job_, i);
  within_item = false;
}

void ThreadPool::serve() {
  uint32_t seen = generation_;
  awake_.fetch_add(1);
  while (!stopping_) {
    inside_.fetch_add(1);
    if (open_) claim_items();
    inside_.fetch_sub(1);
    for (int spin = 0; spin < kSpins && generation_ == seen; ++spin) pause();
    awake_.fetch_sub(1);
    generation_.wait(seen);
    awake_.fetch_add(1);
    seen = generation_;
  }
  awake_.fetch_sub(1);
}

}  // namespace mlx_h2o
