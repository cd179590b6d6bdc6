// Keys or values, dense or packed in the format of mx.quantize, of one kind or several
// (python/mlx_h2o/slots/packed.py).
#pragma once

#include <map>

#include "kernel_operands.h"
#include "ops.h"

namespace mlx_h2o {

// What a store keeps of its rows, by name (python/mlx_h2o/slots/packed.py has the same names).
using Fields = std::map<std::string, mx::array>;

// Those of heads first to last - 1, of fields [B, H, ...].
Fields heads_of(const Fields& fields, int first, int last);

// Rows [B, H, N, width] in parts of different kinds, one after the other.
using Parts = std::vector<Stored>;

mx::array dense(const Stored& rows);
mx::array dense(const Parts& parts);
int count(const Stored& rows);
int count(const Parts& parts);
Parts first_rows(const Parts& parts, int count);

// Rows [..., width], packed: each group from its least to its greatest element.
Stored packed(const mx::array& rows, int bits, int group_size);

// The same rows in another width, from their levels and without a second quantization.
Stored with_bits(const Stored& rows, int bits);

// How a cache stores its keys and values; 0 bits: in their own dtype.
struct Packing {
  int k_bits = 0, v_bits = 0, group_size = 64;
  int recent_bits = 0;  // of the newest tokens where they differ; 16: in their own dtype

  void check_widths() const;
  int bits(const std::string& name) const {
    return name == "keys" ? k_bits : v_bits;
  }
  bool packs() const {
    return k_bits || v_bits;
  }
  std::optional<Packing> recent() const;
  // Adds what a store keeps of rows of the field "keys" or "values".
  void put(Fields& fields, const std::string& name, const Stored& rows) const;
  Stored rows(const std::string& name, const Fields& fields) const;
};

}  // namespace mlx_h2o
