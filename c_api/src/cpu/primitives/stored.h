// Keys or values as operations get them.
#pragma once

#include <vector>

#include "../../kernel_operands.h"

namespace mlx_h2o {

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
