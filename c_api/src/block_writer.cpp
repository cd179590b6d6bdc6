#include "block_writer.h"

#include <chrono>
#include <exception>

namespace mlx_h2o {

namespace {

// For which a step waits for the disk before it counts as too slow. A disk that starts to turn
// takes ten seconds.
constexpr std::chrono::seconds kLongestWait(30);

}  // namespace

BlockWriter::~BlockWriter() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    jobs_.clear();
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void BlockWriter::hand(BlockJob job) {
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) return;
  try {
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  } catch (const std::exception& error) {
    return stop(std::string("there is no thread to write it: ") + error.what());
  }
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

void BlockWriter::take_back(int64_t first) {
  std::unique_lock lock(mutex_);
  std::erase_if(jobs_, [&](const BlockJob& job) { return job.block >= first; });
  changed_.wait(lock, [&] { return !busy_; });
}

void BlockWriter::wait_before(int64_t block) {
  std::unique_lock lock(mutex_);
  // They are written in their order.
  const auto written = [&] {
    const bool waits = !jobs_.empty() && jobs_.front().block < block;
    return !failure_.empty() || (!waits && (!busy_ || *busy_ >= block));
  };
  if (changed_.wait_for(lock, kLongestWait, written)) return;
  stop("the disk is too slow: a step waited " + std::to_string(kLongestWait.count()) + " s for it");
}

bool BlockWriter::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return (jobs_.empty() && !busy_) || !failure_.empty(); });
  return failure_.empty();
}

void BlockWriter::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  stop(why);
}

std::string BlockWriter::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void BlockWriter::stop(const std::string& why) {
  if (failure_.empty()) failure_ = why;
  jobs_.clear();
  changed_.notify_all();
}

void BlockWriter::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    busy_.reset();
    changed_.notify_all();
    changed_.wait(lock, [&] { return ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const BlockJob job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = job.block;
    lock.unlock();
    std::string why;
    try {
      job.write();
    } catch (const std::exception& error) {  // whatever it is, the conversation goes on without
      why = std::string("it could not be written: ") + error.what();
    }
    lock.lock();
    if (!why.empty()) stop(why);
  }
}

}  // namespace mlx_h2o
