// A layer whose arrays are with kernels, which change them in place step after step
// (python/mlx_h2o/backends/decoder.py).
#pragma once

#include <memory>

#include "primitives/decoding_layer.h"
#include "remainder.h"

namespace mlx_h2o {

// A layer's arrays, by name: what the kernels get, and what they hand back.
struct DecodingArrays {
  Stored keys, values;              // flat, [B, S, ...]
  mx::array positions;              // [B, S] int32
  std::optional<mx::array> scores;  // [B, S]
  Remainder remainder;
  mx::array victims;             // [B, H, evict_every] int32
  std::optional<Recent> recent;  // its scores of size 0 where there are none
};

class Decoding {
 public:
  virtual ~Decoding() = default;

  // As DecodingLayer has it: out [B, Hq, 1, Dv] of one token.
  virtual mx::array step(
      const mx::array& q, const mx::array& k, const mx::array& v, float scale,
      const std::optional<mx::array>& sinks, int offset, std::vector<StepHead> heads,
      const std::optional<RecentStep>& recent) = 0;

  // The arrays as the last step left them; no step may follow.
  virtual DecodingArrays close() = 0;
};

// What else a fused step needs to know. `policy` multiplies scores by ||v|| if `value_weighted`.
struct DecodingRules {
  KernelPolicy policy;
  bool value_weighted, remembers, answers;
};

// Whether there is a fused step on the stream of the call for such rows [..., D] and [..., Dv].
bool can_decode(const mx::array& keys, const mx::array& values, bool value_weighted, bool mixed);
std::unique_ptr<Decoding> start_decoding(DecodingArrays arrays, const DecodingRules& rules);

}  // namespace mlx_h2o
