// A fused decode step as it is planned, and what computes it
// (python/mlx_h2o/attention/backends/decoder.py, choice.py).
#pragma once

#include <memory>

#include "attend.h"
#include "attention_call.h"
#include "kernel_terms.h"
#include "remainder.h"
#include "settings.h"

namespace mlx_h2o {

// One token of a layer.
struct DecodeStep {
  const AttentionCall& call;       // q [B, Hq, 1, D]
  const mx::array &keys, &values;  // [B, H, 1, D] and [B, H, 1, Dv]
  TokenPlan plan;
};

// The arrays that a layer lends to a decoder, and gets back.
struct Lent {
  Fields fields;  // of the slots, [B, S, ...] by name
  Remainder remainder;
  mx::array victims;             // [B, H, evict_every] int32
  std::optional<Fields> window;  // of the recent window, [B, H, size, ...] by name
};

// A layer whose arrays are with kernels, which change them in place step after step.
class Decoder {
 public:
  virtual ~Decoder() = default;

  // Folds, writes, attends, accumulates, chooses. Out [B, Hq, 1, Dv].
  virtual mx::array step(DecodeStep step) = 0;

  // The arrays as the last step left them; no step may follow.
  virtual Lent end() = 0;

  // The same to look at before the next step; what is made of them must be evaluated before it.
  // None: `end` is all that there is.
  virtual std::optional<Lent> look() const {
    return std::nullopt;
  }

  // Arrays that the last step writes: evaluating them waits for it.
  virtual std::vector<mx::array> last() const = 0;
};

// Whether a GPU's fused step for a call like this proved itself there (fused_case.h).
using FusedProof = bool (*)(
    const CacheSettings& settings, const AttentionCall& call, const mx::array& keys,
    const mx::array& values);

// Whether there is a fused step on the stream of the call; else it goes op by op.
bool accepts(
    const CacheSettings& settings, const AttentionCall& call, const mx::array& keys,
    const mx::array& values, FusedProof proven);

// Gives a layer's arrays to the kernels of the stream of the call, which `accepts` it.
std::unique_ptr<Decoder> decoder_for(Lent lent, const CacheSettings& settings);

}  // namespace mlx_h2o
