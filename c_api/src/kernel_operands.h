// The arrays that kernels are given, and what attention is asked for.
#pragma once

#include <utility>
#include <vector>

#include "mx.h"

namespace mlx_h2o {

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

// What packed keys are stored relative to: centre and scale [Hk, D] float32 (key_scaling.h).
struct Frame {
  mx::array centre, scale;
};

// Slots of each KV head in flat keys and values [B, S, width]: its first slot and how many.
using Ranges = std::vector<std::pair<int64_t, int>>;

// What attention hands out beside its output and lse.
enum class Export { none, logits, mass };

// A column of the softmax that has no slot: logits [B, Hq, L] and values [B, Hk, Dv].
using Seed = std::pair<mx::array, mx::array>;

}  // namespace mlx_h2o
