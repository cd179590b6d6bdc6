// A file of all rows of one conversation, as stored, with a fixed place for each
// (python/mlx_h2o/spill/row_file.py).
//
// Rows come in whole blocks. Their arrays are copied into a block's bytes by the thread of the
// model, since only that may evaluate them: when a block's worth of further tokens has come, or, of
// a chunk that brings more than a block, when all layers have them. Another thread writes. It
// knows nothing of MLX. At most one block waits for it.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>

#include "block_writer.h"
#include "packed.h"
#include "row_layout.h"
#include "scratch_file.h"

namespace mlx_h2o {

// Rows of one head by field, row after row, as they are stored.
using RowBytes = std::map<std::string, std::vector<uint8_t>>;

class RowFile {
 public:
  // A new, empty file in a folder that is there. Raises FileError where it cannot be made.
  RowFile(const std::string& folder, std::vector<LayerForm> forms);
  // Forgets what waits.
  ~RowFile();
  RowFile(const RowFile&) = delete;

  const RowLayout& layout() const {
    return layout_;
  }
  // Positions that a layer has delivered, which `rows` has.
  int64_t delivered(int layer) const {
    return delivered_[layer];
  }
  // Positions that all layers have delivered.
  int64_t complete() const;
  // Bytes of a layer's rows that are in memory: of those not in the file yet, and of those whose
  // block was written since the last rows came. Waits for no writing.
  size_t nbytes(int layer) const;
  // Why nothing more is written, or "".
  std::string failure() const {
    return writer_.failure();
  }
  // Forgets all that waits; nothing more is written.
  void fail(const std::string& why);

  // Takes the rows [1, H, L, width] of whole blocks, the next ones of a layer. This may wait for
  // the disk. Nothing that fails here stops the caller.
  void append(int layer, int64_t first, const Fields& rows);
  // Rows of one head at positions below `delivered`, in any order. Raises FileError.
  RowBytes rows(int layer, int head, const std::vector<int64_t>& positions);
  // Forgets a layer's rows from a block's first position on, in all layers those of later blocks,
  // and `kept` says whether others have rows in this block to read before they forget them too.
  void truncate(int layer, int64_t first, bool kept);
  // Writes all whole blocks that came, and waits for it; whether they are written.
  bool flush();

 private:
  struct Block {
    std::vector<uint8_t> bytes;
    std::vector<bool> has;  // which layers are in it
  };
  // Rows of a layer that are in no block yet.
  struct Part {
    int64_t first, count;
    Fields bytes;  // [1, H, count, bytes of a row]

    int64_t end() const {
      return first + count;
    }
  };

  void settle(int64_t before);
  void settle(const std::vector<std::pair<int, Part>>& parts);
  void put(int layer, const Part& part, int64_t index);
  void hand_over();
  void write(int64_t index, const Block& block);
  std::shared_ptr<Block> block_in_file(int64_t index) const;
  void forget_written();
  std::vector<uint8_t> segment_in_file(int64_t block, int layer, int head) const;
  const uint8_t* segment_in_memory(int64_t block, int layer, int head) const;

  ScratchFile file_;
  const RowLayout layout_;
  std::vector<int64_t> delivered_;
  std::vector<std::deque<Part>> parts_;
  std::map<int64_t, std::shared_ptr<Block>> blocks_;  // that are not in the file yet
  int64_t handed_ = 0;                                // blocks that were given to the writer
  std::atomic<int64_t> written_ = 0;                  // blocks in the file; the writer counts them
  BlockWriter writer_;  // the last member: its thread ends before the others go
};

}  // namespace mlx_h2o
