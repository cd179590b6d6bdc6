// How long values are: what a policy may weigh tokens by, kept beside their rows
// (python/mlx_h2o/value_lengths.py).
#pragma once

#include "ops.h"

namespace mlx_h2o {

// log ||v||^2 of values [..., Dv] as they came: [...] float16.
inline mx::array value_lengths(const mx::array& values) {
  const mx::array square = mx::sum(mx::square(f32(values)), -1);
  // Keeps the logarithm of a zero vector from stretching the scale of all.
  return mx::astype(mx::log(mx::maximum(square, number(1e-12))), mx::float16);
}

}  // namespace mlx_h2o
