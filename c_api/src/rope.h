// Rolling positions: queries see the kept tokens at neighbouring positions, without gaps
// (python/mlx_h2o/slots/rope.py). Stored keys stay as they came; those that a query attends to
// are turned.
#pragma once

#include "json.h"
#include "ops.h"

namespace mlx_h2o {

// A plain RoPE: channels are turned in pairs, by base^(-2i / dims).
struct Rope {
  int dims;          // channels that are turned, the first ones of a row
  float base;        // of the frequencies
  float scale;       // the factor on positions
  bool traditional;  // whether a pair's channels are neighbours; else dims / 2 apart

  // Raises for what turns no keys.
  void check_all() const;
  // Keys [B, H, N, D] turned forward by some positions each, [B, H, N], of either sign.
  mx::array turned(const mx::array& keys, const mx::array& by) const;

  Json config() const;
  static Rope of_config(const Json& config);
};

// The number of tokens after each row that its head has forgotten, [B, H, N] int32, of the
// positions of all rows held, each once in a head, in any order. `offset` is the next position.
mx::array forgotten_after(const mx::array& positions, int offset);

// Keys [B, H, N, D] at these positions, turned for queries at the newest ones.
mx::array without_gaps(
    const mx::array& keys, const mx::array& positions, int offset, const Rope& rope);

}  // namespace mlx_h2o
