// The thread that writes blocks to a file of rows, for which no step waits
// (python/mlx_h2o/spill/block_writer.py).
#pragma once

#include <stdint.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace mlx_h2o {

// One block to write.
struct BlockJob {
  int64_t block;
  size_t nbytes;                // that it holds until it is written
  std::function<void()> write;  // raises if it cannot
};

// A queue of blocks and the thread that writes them in order. More bytes that wait than `most` mean
// that the disk is too slow, and writing stops.
class BlockWriter {
 public:
  explicit BlockWriter(size_t most) : most_(most) {}
  BlockWriter(const BlockWriter&) = delete;
  // Forgets what waits, and waits for the block that is being written.
  ~BlockWriter();

  void hand(BlockJob job);
  // Forgets blocks from an index on, and waits for one that is being written.
  void take_back(int64_t first);
  // Waits until nothing is left to write; whether all was written.
  bool wait();
  // Stops for good; what waits is forgotten.
  void fail(const std::string& why);
  // Why writing stopped, or "".
  std::string failure() const;

 private:
  void stop(const std::string& why);  // the mutex is locked
  void run();

  const size_t most_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<BlockJob> jobs_;
  size_t waiting_ = 0;  // bytes
  bool busy_ = false, ending_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace mlx_h2o
