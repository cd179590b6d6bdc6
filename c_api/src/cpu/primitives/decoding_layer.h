// A layer that decodes by fused steps.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "decode_step.h"
#include "stored.h"

namespace mlx_h2o {

struct LayerSteps;
struct SlotMemory;
class UndoRecord;

// The newest tokens where they are stored apart (recent.py).
struct Recent {
  Stored keys, values;                                    // [B, Hk, size, D] and [B, Hk, size, Dv]
  mx::array scores;                                       // [B, Hk, size], or of size 0
  std::optional<mx::array> value_lengths = std::nullopt;  // [B, Hk, size] float16
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
  // keys [B, S, D], values [B, S, Dv], and the other fields: positions [B, S] int16 or int32,
  // scores [B, S] (or size 0), count [B, Hk], mean_key, var_key [B, Hk, D], mean_value [B, Hk, Dv],
  // victims [B, Hk, evict_every] int32, and, where the policy wants those of dense values,
  // value_lengths [B, S] float16. `close` gives all arrays back in this order, those of the newest
  // tokens (keys, values, scores, value_lengths) last. `saturation` is t of the remainder's term
  // for each KV head; `undo` says how many of the last steps can be taken back.
  DecodingLayer(
      const Stored& keys, const Stored& values, std::vector<mx::array> fields, KernelPolicy policy,
      bool remembers, bool answers, std::vector<float> saturation,
      const std::optional<Recent>& recent, mx::StreamOrDevice s,
      const std::optional<Frame>& frame = std::nullopt, int undo = 0);

  // Out [B, Hq, L, Dv] of L tokens in each of several layers, which differ in their memory and its
  // plan alone: q [B, Hq, L, D], k [B, Hk, L, D] and v [B, Hk, L, Dv], the sequences of the layers
  // one after the other. A layer's tokens are one step each, in order.
  static mx::array step(
      const std::vector<DecodingLayer*>& layers, const mx::array& q, const mx::array& k,
      const mx::array& v, float scale, const std::optional<mx::array>& sinks,
      std::vector<std::vector<TokenPlan>> tokens, mx::StreamOrDevice s);

  // The last steps that can be taken back, the oldest first.
  const std::deque<std::shared_ptr<UndoRecord>>& journal() const {
    return journal_;
  }
  // Takes the last `count` of them back, in place; it waits for steps that have not run yet.
  void take_back(int count);

  // The fields as arrays again; no step may follow.
  std::vector<mx::array> close(mx::StreamOrDevice s);

  // Something to evaluate: it is ready when the last step has run.
  const mx::array& last_step() const {
    return last_step_;
  }

 private:
  // Raise unless the fields, the newest tokens or the operands of a step fit together.
  void check_fields(
      const Stored& keys, const Stored& values, const std::vector<mx::array>& fields) const;
  void check_recent(const Stored& keys, const Stored& values, const Recent& recent) const;
  void take_frame(const Frame& frame, mx::StreamOrDevice s);
  void check_tokens(int B, int L, const mx::array& q, const mx::array& k, const mx::array& v) const;
  void check_plan(const TokenPlan& plan) const;

  LayerSteps planned(const mx::array& q, float scale, std::vector<TokenPlan> tokens) const;
  std::shared_ptr<UndoRecord> before(const TokenPlan& plan) const;
  void note(std::shared_ptr<UndoRecord> step);

  Layer layer_;
  SlotLayout layout_;
  std::optional<SlotLayout> recent_layout_;
  int recent_size_ = 0, undo_ = 0;
  bool measured_ = false;  // value lengths are kept
  mx::Dtype row_dtype_;
  std::vector<mx::Shape> shapes_;
  std::vector<mx::Dtype> dtypes_;
  std::shared_ptr<SlotMemory> memory_;
  mx::array last_step_;
  std::deque<std::shared_ptr<UndoRecord>> journal_;
};

}  // namespace mlx_h2o
