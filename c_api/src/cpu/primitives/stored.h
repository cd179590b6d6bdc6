// Keys or values as operations get them.
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace mlx_h2o {

namespace mx = mlx::core;

// Keys or values: one array, or packed rows in the format of mx.quantize (words, scales, biases).
struct Stored {
  std::vector<mx::array> arrays;
  int bits = 0;  // 0: dense
  int group_size = 0;

  // Elements of a row.
  int width() const {
    return bits ? arrays[0].shape(-1) * 32 / bits : arrays[0].shape(-1);
  }
};

// How the arrays of an operation are keys and values.
struct SlotLayout {
  int k_bits = 0, k_group_size = 0, v_bits = 0, v_group_size = 0;

  int keys() const {
    return k_bits ? 3 : 1;
  }
  int values() const {
    return v_bits ? 3 : 1;
  }
};

SlotLayout layout_of(const Stored& k, const Stored& v);

// Raises std::invalid_argument unless rows can be packed so.
void check_packing(int bits, int group_size);

// Raises std::invalid_argument unless the arrays are rows [..., rows, width].
void check_stored(const Stored& x);

}  // namespace mlx_h2o
