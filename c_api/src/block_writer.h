// The thread that writes blocks to a file of rows (python/mlx_h2o/spill/block_writer.py).
#pragma once

#include <stdint.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace mlx_h2o {

// One block to write.
struct BlockJob {
  int64_t block;
  std::function<void()> write;  // raises if it cannot
};

// A queue of blocks and the thread that writes them in order.
class BlockWriter {
 public:
  BlockWriter() = default;
  BlockWriter(const BlockWriter&) = delete;
  // Forgets what waits, and waits for the block that is being written.
  ~BlockWriter();

  void hand(BlockJob job);
  // Forgets blocks from an index on, and waits for one that is being written.
  void take_back(int64_t first);
  // Waits until what was handed over for the blocks before this one is written; if that takes too
  // long, writing stops.
  void wait_before(int64_t block);
  // Waits until nothing is left to write; whether all was written.
  bool wait();
  // Stops for good; what waits is forgotten.
  void fail(const std::string& why);
  // Why writing stopped, or "".
  std::string failure() const;

 private:
  void stop(const std::string& why);  // the mutex is locked
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<BlockJob> jobs_;
  std::optional<int64_t> busy_;  // the block that is being written
  bool ending_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace mlx_h2o
