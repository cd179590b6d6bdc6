// A layer whose arrays are with kernels, which change them in place step after step
// (python/mlx_h2o/decoding.py).
#pragma once

#include <memory>

#include "primitives.h"

namespace mlx_h2o {

class Decoding {
 public:
  virtual ~Decoding() = default;

  // As DecodingLayer has it: out [B, Hq, 1, Dv] of one token.
  virtual mx::array step(
      const mx::array& q, const mx::array& k, const mx::array& v, float scale,
      const std::optional<mx::array>& sinks, int offset, std::vector<StepHead> heads,
      const std::optional<RecentStep>& recent) = 0;

  // Keys, values, positions, scores (or size 0), count, mean_key, var_key, mean_value, victims, and
  // keys, values and scores of the newest tokens; no step may follow.
  virtual std::vector<mx::array> close() = 0;
};

// The arguments are those of DecodingLayer. `policy` multiplies scores by ||v|| if
// `value_weighted`.
struct DecodingArguments {
  Stored keys, values;
  std::vector<mx::array> fields;
  PolicyForm policy;
  bool value_weighted, remembers, answers;
  std::optional<Recent> recent;
};

// Whether there is a fused step on the stream of the call for such rows [..., D] and [..., Dv].
bool can_decode(const mx::array& keys, const mx::array& values, bool value_weighted, bool mixed);
std::unique_ptr<Decoding> start_decoding(DecodingArguments arguments);

}  // namespace mlx_h2o
