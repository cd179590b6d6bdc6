// The remainder: statistics of the evicted, and how they answer
// (python/mlx_h2o/slots/remainder.py).
#pragma once

#include "ops.h"

namespace mlx_h2o {

// Where the second-order term of the column turns from x to sqrt(t x), unless a head has its own t.
constexpr float kSaturation = 4;
// t of each KV head; 0: first order, the term is left out.
using Saturations = std::vector<float>;

struct Remainder {
  mx::array count;       // [B, H]
  mx::array mean_key;    // [B, H, D]
  mx::array var_key;     // [B, H, D]
  mx::array mean_value;  // [B, H, Dv]

  static Remainder empty(int batch, int heads, int key_width, int value_width);
  std::vector<mx::array> arrays() const {
    return {count, mean_key, var_key, mean_value};
  }
  Remainder heads(int first, int last) const;
  Remainder with_heads(int first, const Remainder& part) const;
  // After rows [B, H, M, width] were added; weights broadcast to [B, H, M].
  Remainder fold(
      const mx::array& keys, const mx::array& values,
      const std::optional<mx::array>& weights) const;
  // As if these rows [B, H, M, width], which were added before, had not been.
  Remainder without(const mx::array& keys, const mx::array& values) const;
  // The column's logit [B, Hq, L] for q [B, Hq, L, D].
  mx::array column(const mx::array& q, float scale, const Saturations& saturations) const;
  // Keys and values of R plain rows, float32.
  std::pair<mx::array, mx::array> plain_rows(int rows) const;
};

// Attention `out` and `lse` with one more column of these logits [B, Hq, L] and values [B, Hk, Dv].
std::pair<mx::array, mx::array> join(
    const mx::array& out, const mx::array& lse, const mx::array& logits, const mx::array& values);

}  // namespace mlx_h2o
