// A file of all rows of one conversation, as stored, with a fixed place for each
// (python/mlx_h2o/spill/row_file.py).
//
// Rows come in whole blocks. Their arrays are copied into a block's bytes by the thread of the
// model, since only that may evaluate them: when a block's worth of further tokens has come, or, of
// a chunk that brings more than a block, when all layers have them. Another thread computes
// checksums and writes. It knows nothing of MLX. At most one block waits for it.
#pragma once

#include <deque>
#include <map>
#include <memory>

#include "block_writer.h"
#include "packed.h"
#include "row_layout.h"

namespace mlx_h2o {

// Rows of one head by field, row after row, as they are stored.
using RowBytes = std::map<std::string, std::vector<uint8_t>>;

class RowFile {
 public:
  // A new, empty file that only its owner may read. Raises FileError where it cannot be made.
  // `kept` is for those who remove what processes left that were killed. A cipher seals it.
  static std::unique_ptr<RowFile> create(
      const std::string& path, std::vector<LayerForm> forms, bool kept = false,
      std::shared_ptr<const Cipher> cipher = nullptr);
  // A file that exists, for reading; a sealed one needs its cipher. Raises FileError.
  static std::unique_ptr<RowFile> open(
      const std::string& path, std::shared_ptr<const Cipher> cipher = nullptr);
  // The same for more rows; `go_on` has to follow.
  static std::unique_ptr<RowFile> open_to_go_on(
      const std::string& path, std::shared_ptr<const Cipher> cipher = nullptr);
  // Removes a file that was made here, unless it is to be left.
  ~RowFile();
  RowFile(const RowFile&) = delete;

  const std::string& path() const {
    return path_;
  }
  const RowLayout& layout() const {
    return layout_;
  }
  // The cipher of a sealed file, or null.
  const Seal* seal() const {
    return seal_.get();
  }
  // Positions that a layer has delivered, which `rows` has.
  int64_t delivered(int layer) const {
    return delivered_[layer];
  }
  // Positions that all layers have delivered.
  int64_t complete() const;
  // Positions that are in the file in all layers.
  int64_t written() const;
  // Of the record of a block in the file, by which it is known again. Raises FileError.
  uint32_t checksum_of(int64_t block) const;
  // Goes on from a block's first position, of which the next rows are. What the file has from there
  // on is cut off when they come.
  void go_on(int64_t first);
  // Has it stay.
  void leave() {
    removed_ = false;
  }
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
  // Writes all whole blocks that came, and waits until they are on the disk; whether they are.
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

  RowFile(
      std::string path, int descriptor, RowLayout layout, std::unique_ptr<Seal> seal, bool writable,
      bool removed);
  static std::unique_ptr<RowFile> opened(
      const std::string& path, bool writable, std::shared_ptr<const Cipher> cipher);
  void settle(int64_t before);
  void settle(const std::vector<std::pair<int, Part>>& parts);
  void put(int layer, const Part& part, int64_t index);
  void hand_over();
  void write(int64_t index, Block& block);
  std::vector<uint8_t> sealed(std::vector<uint8_t> block, int64_t index, int rows) const;
  void unseal(
      uint8_t* segment, int layer, int head, const BlockRecord& record, int64_t block) const;
  std::shared_ptr<Block> block_in_file(int64_t index) const;
  void forget_written();
  void find_end();
  std::vector<uint8_t> segment_in_file(int64_t block, int layer, int head, int last) const;
  const uint8_t* segment_in_memory(int64_t block, int layer, int head) const;

  const std::string path_;
  const int descriptor_;
  const RowLayout layout_;
  const std::unique_ptr<Seal> seal_;
  const bool writable_;
  bool removed_;      // in the end
  bool cut_ = false;  // whether blocks from `handed_` on are still to be cut off
  std::vector<int64_t> delivered_;
  std::vector<std::deque<Part>> parts_;
  std::map<int64_t, std::shared_ptr<Block>> blocks_;  // that are not in the file yet
  int64_t handed_ = 0;                                // blocks that were given to the writer
  mutable std::mutex mutex_;                          // of what the writer's thread changes
  int64_t written_ = 0;                               // positions
  BlockWriter writer_;  // the last member: its thread ends before the others go
};

}  // namespace mlx_h2o
