// The kernels as MLX operations.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "decode_step.h"
#include "mlx/mlx.h"

namespace mlx_h2o {

namespace mx = mlx::core;

// What attention hands out beside its output and lse.
enum class Export { none, logits, mass };

// A column of the softmax that has no slot: logits [B, Hq, L] and values [B, Hk, Dv].
using Seed = std::pair<mx::array, mx::array>;

// Slots of each KV head in flat keys and values: its first slot and how many.
using Ranges = std::vector<std::pair<int64_t, int>>;

// Keys or values: one array, or packed rows as mx.quantize makes them (words, scales, biases).
struct Stored {
  std::vector<mx::array> arrays;
  int bits = 0;  // 0: dense
  int group_size = 0;

  // Elements of a row.
  int width() const {
    return bits ? arrays[0].shape(-1) * 32 / bits : arrays[0].shape(-1);
  }
};

// Attention over [B, Hk, N, D], or over [B, S, D] with a range per head.
//
// Returns out [B, Hq, L, Dv] in q's dtype, lse [B, Hq, L], and, if asked for, logits
// ([B, Hq, L, N], flat [B, G, L, S]) or mass ([B, Hk, N], flat [B, S]), both float32.
// `mask` is an array, or "causal" in `causal`. Raises std::invalid_argument for shapes that do not
// fit together.
std::vector<mx::array> attention(
    const mx::array& q, const Stored& k, const Stored& v, float scale, bool causal,
    const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks,
    const std::optional<Seed>& seed, const std::optional<Ranges>& ranges, Export wanted,
    mx::StreamOrDevice s);

// Arrays that one layer's steps overwrite in place.
struct SlotMemory {
  std::vector<mx::array> fields;
};

// How the arrays are keys and values.
struct SlotLayout {
  int k_bits = 0, k_group_size = 0, v_bits = 0, v_group_size = 0;

  int keys() const {
    return k_bits ? 3 : 1;
  }
  int values() const {
    return v_bits ? 3 : 1;
  }
};

// The newest tokens where they are stored apart (recent.py).
struct Recent {
  Stored keys, values;  // [B, Hk, size, D] and [B, Hk, size, Dv]
  mx::array scores;     // [B, Hk, size], or of size 0
};

// What a step does with them: the new token's slot, the tokens held after it, and whether one
// leaves.
struct RecentStep {
  int slot, length;
  bool leaving;
};

// A layer's slots, remainder and victims while it decodes.
//
// MLX reuses an input's buffer only if nothing else refers to it, and a task that is still queued
// does: with the usual one token of look-ahead every step would copy all keys and values. Here the
// arrays are taken out of the graph when decoding starts (copied if anyone else holds them), steps
// change them in the order in which they run, and `close` hands them back. A step depends on the
// one before it, so the order is MLX's own, whichever streams they run on: streams belong to
// threads, and a conversation may go on in another thread.
class DecodingLayer {
 public:
  // keys [B, S, D], values [B, S, Dv], and the other fields: positions [B, S] int32, scores [B, S]
  // (or size 0), count [B, Hk], mean_key, var_key [B, Hk, D], mean_value [B, Hk, Dv], victims
  // [B, Hk, evict_every] int32. `close` gives all arrays back in this order, those of the newest
  // tokens (keys, values, scores) last.
  DecodingLayer(
      const Stored& keys, const Stored& values, std::vector<mx::array> fields, PolicyForm policy,
      bool remembers, bool answers, float saturation, const std::optional<Recent>& recent,
      mx::StreamOrDevice s);

  // Out [B, Hq, 1, Dv] of one token's q [B, Hq, 1, D], k [B, Hk, 1, D] and v [B, Hk, 1, Dv].
  mx::array step(
      const mx::array& q, const mx::array& k, const mx::array& v, float scale,
      const std::optional<mx::array>& sinks, int offset, std::vector<StepHead> heads,
      const std::optional<RecentStep>& recent, mx::StreamOrDevice s);

  // The fields as arrays again; no step may follow.
  std::vector<mx::array> close(mx::StreamOrDevice s);

  // Something to evaluate: it is ready when the last step has run.
  const mx::array& last_step() const {
    return last_step_;
  }

 private:
  Layer layer_;
  SlotLayout layout_;
  std::optional<SlotLayout> recent_layout_;
  int recent_size_ = 0;
  mx::Dtype row_dtype_;
  std::vector<mx::Shape> shapes_;
  std::vector<mx::Dtype> dtypes_;
  std::shared_ptr<SlotMemory> memory_;
  mx::array last_step_;
};

}  // namespace mlx_h2o
