// The layout of a file of rows: which byte belongs to which layer, head, field and position
// (python/mlx_h2o/spill/layout.py). The file consists of blocks of `kBlockPositions`. A block has a
// segment for every layer and KV head: the rows of each field, field after field.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "mx.h"

namespace mlx_h2o {

// Positions of a block.
constexpr int kBlockPositions = 8;

// One field of a layer's rows: "keys", "keys.scales" ...
struct RowField {
  std::string name;
  mx::Dtype dtype;
  int width;  // elements

  size_t row_bytes() const {
    return width * mx::size_of(dtype);
  }
};

// What a layer's rows are like, for one sequence.
struct LayerForm {
  int heads;
  std::vector<RowField> fields;  // in the file's order

  size_t segment_bytes() const {
    size_t bytes = 0;
    for (const RowField& field : fields) bytes += kBlockPositions * field.row_bytes();
    return bytes;
  }
};

class RowLayout {
 public:
  explicit RowLayout(std::vector<LayerForm> layers) : layers_(std::move(layers)) {
    layer_starts_.push_back(0);
    for (const LayerForm& form : layers_)
      layer_starts_.push_back(layer_starts_.back() + form.heads * form.segment_bytes());
  }

  const std::vector<LayerForm>& layers() const {
    return layers_;
  }
  size_t block_bytes() const {
    return layer_starts_.back();
  }
  // The first byte in its block of a head's part of a layer.
  size_t segment_start(int layer, int head) const {
    return layer_starts_[layer] + head * layers_[layer].segment_bytes();
  }

 private:
  std::vector<LayerForm> layers_;
  std::vector<size_t> layer_starts_;  // bytes of a block, and its end
};

}  // namespace mlx_h2o
