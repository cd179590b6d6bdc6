// The second reading of a prompt: the attention that rows receive when their text is repeated
// (python/mlx_h2o/compression/second_reading.py).
//
// Source: KVzip (Kim et al. 2025, arXiv 2505.23416). The model is asked to repeat a text, and reads
// it again, with the rows of the first reading before it. Nothing of the second reading is stored.
#pragma once

#include "layer.h"

namespace mlx_h2o {

// One layer in a second reading.
class SecondReading {
 public:
  // The layer has read a prompt of `length` tokens, and stays as it is until this is over.
  SecondReading(BoundedLayer& layer, int length);

  // Attends to the layer's rows, the remainder and, causally, the chunk itself. Rows of the chunk
  // are [B, Hk, L, width]; the call's mask is not looked at. Raises if the layer has other rows.
  mx::array look(
      BoundedLayer& layer, const AttentionCall& call, const mx::array& keys,
      const mx::array& values);

  // The greatest weight that each row received from any query: of each run [B, heads, N].
  const std::vector<mx::array>& worths() const {
    return worths_;
  }
  // Whether queries were kept, to fit values by.
  bool fits() const {
    return !queries_.empty();
  }
  // A call with the queries that were kept, as the model gives them.
  AttentionCall call() const {
    return {join_along(queries_, 2), scale_};
  }
  std::vector<mx::array> state() const;

 private:
  const int length_;
  std::vector<mx::array> worths_, queries_;
  float scale_ = 1;
};

}  // namespace mlx_h2o
