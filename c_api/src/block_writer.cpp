#include "block_writer.h"

#include <algorithm>
#include <exception>

namespace mlx_h2o {

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
  if (waiting_ > most_)
    return stop(
        "the disk is too slow: " + std::to_string(waiting_ / 1000000) + " MB waited to be written");
  try {
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  } catch (const std::exception& error) {
    return stop(std::string("there is no thread to write it: ") + error.what());
  }
  waiting_ += job.nbytes;
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

void BlockWriter::take_back(int64_t first) {
  std::unique_lock lock(mutex_);
  std::erase_if(jobs_, [&](const BlockJob& job) {
    if (job.block < first) return false;
    waiting_ -= job.nbytes;
    return true;
  });
  changed_.wait(lock, [&] { return !busy_; });
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
  waiting_ = 0;
  changed_.notify_all();
}

void BlockWriter::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    busy_ = false;
    changed_.notify_all();
    changed_.wait(lock, [&] { return ending_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const BlockJob job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    std::string why;
    try {
      job.write();
    } catch (const std::exception& error) {  // whatever it is, the conversation goes on without
      why = std::string("it could not be written: ") + error.what();
    }
    lock.lock();
    waiting_ -= std::min(waiting_, job.nbytes);
    if (!why.empty()) stop(why);
  }
}

}  // namespace mlx_h2o
