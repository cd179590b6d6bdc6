// Shorthand for MLX operations on the stream of the call (bridge.h sets it).
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "mx.h"
#include "text.h"

namespace mlx_h2o {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows start to stop - 1 of an axis.
inline mx::array part(const mx::array& a, int axis, int start, int stop) {
  if (axis < 0) axis += static_cast<int>(a.ndim());
  mx::Shape first(a.ndim(), 0), last = a.shape();
  first[axis] = start;
  last[axis] = stop;
  return mx::slice(a, first, last);
}

inline mx::array join_along(std::vector<mx::array> parts, int axis) {
  return parts.size() == 1 ? parts[0] : mx::concatenate(std::move(parts), axis);
}

inline mx::array f32(const mx::array& a) {
  return mx::astype(a, mx::float32);
}

inline mx::array number(double x) {
  return mx::array(static_cast<float>(x));
}

// Positions first to last - 1, int32.
inline mx::array range(int first, int last) {
  return mx::arange(first, last, 1);
}

// Whether an array of one shape can be broadcast to another.
inline bool broadcasts_to(const mx::Shape& shape, const mx::Shape& whole) {
  if (shape.size() > whole.size()) return false;
  for (size_t axis = 1; axis <= shape.size(); ++axis) {
    const int length = shape[shape.size() - axis];
    if (length != 1 && length != whole[whole.size() - axis]) return false;
  }
  return true;
}

// Raises unless it holds.
inline void check(bool fits, const std::string& what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace mlx_h2o
