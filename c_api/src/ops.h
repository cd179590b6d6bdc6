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

// What is to blame for an error, in the numbers of mlx_h2o_error.
enum class Blame { argument = 1, settings, state, saved, program, internal, file };

struct Refusal : std::invalid_argument {
  Refusal(Blame blame, const std::string& what) : std::invalid_argument(what), blame(blame) {}
  Blame blame;
};

// Raises unless it holds.
inline void check(bool fits, const std::string& what, Blame blame = Blame::argument) {
  if (!fits) throw Refusal(blame, what);
}

// Runs it; what it refuses as an argument is something else's fault.
template <class F>
decltype(auto) blaming(Blame blame, F&& run) {
  try {
    return run();
  } catch (const Refusal& refusal) {
    throw Refusal(refusal.blame == Blame::argument ? blame : refusal.blame, refusal.what());
  }
}

}  // namespace mlx_h2o
