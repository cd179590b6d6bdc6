// The largest value of every number that comes from outside, as in python/mlx_h2o/_checks.py.
#pragma once

#include "ops.h"

namespace mlx_h2o {

// Tokens, slots and positions, which are int32; conversations go on.
constexpr int kMostTokens = 1 << 30;
// Victims of one choice: each head keeps their slots, and larger choices would stall a step.
constexpr int kMostVictims = 1 << 16;
// Neighbours that smooth a window's mass: more would make all masses alike.
constexpr int kWidestPool = 1 << 12;
// Steps to undo; each is held whole.
constexpr int kMostSteps = 1 << 16;
// Weights: kernels count in float32, where squares of these are finite.
constexpr double kMostNumber = double(int64_t(1) << 60);

inline void check_within(const std::string& name, int64_t value, int64_t least, int64_t most) {
  check(
      least <= value && value <= most,
      name + " must be from " + std::to_string(least) + " to " + std::to_string(most) + "; got " +
          std::to_string(value) + ".");
}

}  // namespace mlx_h2o
