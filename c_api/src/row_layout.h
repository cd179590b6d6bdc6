// The layout of a file of rows: which byte belongs to which layer, head, field and position
// (python/mlx_h2o/spill/layout.py, which says more). The processor's bytes must be in little-endian
// order, as those of all that MLX runs on are.
#pragma once

#include <stdint.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "mx.h"
#include "seal.h"

namespace mlx_h2o {

// Positions of a block in files that are made here.
constexpr int kBlockPositions = 8;
constexpr int64_t kMostTokensOfFile = int64_t(1) << 31;

// A file, or a part of it, cannot be read or does not hold what was written.
struct FileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One field of a layer's rows: "keys", "keys.scales" ...
struct RowField {
  std::string name;
  mx::Dtype dtype;
  int width;  // elements

  size_t row_bytes() const {
    return width * mx::size_of(dtype);
  }
  bool operator==(const RowField&) const = default;
};

// What a layer's rows are like, for one sequence.
struct LayerForm {
  int heads;
  std::vector<RowField> fields;  // in the file's order

  size_t row_bytes() const;
};

// What a block says of itself.
struct BlockRecord {
  int rows;                         // in use
  Nonce nonce;                      // of sealed blocks
  std::vector<uint32_t> checksums;  // of each segment
  std::vector<uint8_t> tags;        // of each segment, one after the other; none if not sealed

  const uint8_t* tag(int segment) const {
    return tags.data() + kTagBytes * size_t(segment);
  }
};

class RowLayout {
 public:
  // Raises for numbers out of their limits. `notes` is JSON that the layout does not read.
  RowLayout(std::vector<LayerForm> layers, int positions, std::string notes, bool sealed = false);
  // The layout that a header describes, of which `start` has `header_length` bytes or more. Raises
  // FileError for what is none, is damaged, or of another version.
  static RowLayout read(const std::string& start);
  // Bytes of a header, from its first 20.
  static size_t header_length(const std::string& start);

  const std::vector<LayerForm>& layers() const {
    return layers_;
  }
  int positions() const {
    return positions_;
  }
  bool sealed() const {
    return sealed_;
  }
  const std::string& notes() const {
    return notes_;
  }
  const std::string& header() const {
    return header_;
  }
  // Of the header: those of blocks and records start from it, so that no other file's fit.
  uint32_t checksum() const {
    return checksum_;
  }
  size_t block_bytes() const;
  size_t block_start(int64_t block) const {
    return header_.size() + size_t(block) * block_bytes();
  }
  // The first byte in its block of a head's part of a layer, its segment, and its bytes.
  size_t segment_start(int layer, int head) const;
  size_t segment_bytes(int layer) const {
    return layers_[layer].row_bytes() * positions_;
  }
  // Its index among all segments of a block.
  int segment_index(int layer, int head) const {
    return first_segments_[layer] + head;
  }
  int segments() const {
    return first_segments_.back();
  }
  size_t record_start() const {
    return layer_starts_.back();
  }
  size_t record_bytes() const;

  // Writes the record into a block's bytes, whose segments are as they are to be stored.
  void put_record(
      std::vector<uint8_t>& block, int64_t index, int rows, const Nonce& nonce = {},
      const std::vector<uint8_t>& tags = {}) const;
  // Raises FileError for a record that is torn, damaged, or another block's.
  BlockRecord checked_record(int64_t index, const uint8_t* record) const;
  bool is_intact(const BlockRecord& record, int segment, const uint8_t* data, size_t size) const;

 private:
  void make_header();

  std::vector<LayerForm> layers_;
  int positions_;
  std::string notes_;
  bool sealed_;
  std::vector<int> first_segments_;   // and the number of all
  std::vector<size_t> layer_starts_;  // bytes of a block, and the end of the last
  std::string header_;
  uint32_t checksum_ = 0;  // of the header, from which those of blocks start
};

}  // namespace mlx_h2o
