// How long values are: what a policy may weigh tokens by (python/mlx_h2o/slots/packed.py).
#pragma once

#include "packed.h"

namespace mlx_h2o {

// Log of the sum of squares of [..., n] float32: [...].
inline mx::array log_square(const mx::array& elements) {
  // Keeps the logarithm of a zero vector from stretching the scale of all.
  return mx::log(mx::maximum(mx::sum(mx::square(elements), -1), number(1e-12)));
}

// log ||v||^2 of dense values [..., Dv] as they came: [...] float16.
inline mx::array value_lengths(const mx::array& values) {
  return mx::astype(log_square(f32(values)), mx::float16);
}

// The same of values of several kinds, one after the other: [...] float32. Of packed ones the
// ranges of their groups stand for the elements.
inline mx::array value_lengths(const Parts& values) {
  std::vector<mx::array> lengths;
  for (const Stored& part : values) {
    const mx::array& rows = part.arrays[part.bits ? 1 : 0];
    lengths.push_back(
        part.bits ? log_square(f32(rows) * number((1 << part.bits) - 1))
                  : f32(value_lengths(rows)));
  }
  return join_along(std::move(lengths), -1);
}

}  // namespace mlx_h2o
