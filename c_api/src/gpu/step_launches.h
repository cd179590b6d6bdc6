// Launches of the kernels around attention in a decode step
// (python/mlx_h2o/attention/backends/step_launches.py).
#pragma once

#include "../kernel_terms.h"
#include "attention_launches.h"

namespace mlx_h2o {

// A token's plan as the kernels of its step take it; `slots` is S of the flat buffers.
struct StepPlan {
  StepPlan(TokenPlan token, int slots, int sink, int evict_every);

  const TokenPlan token;
  Ranges ranges;
  int attended = 0;  // slots that all heads attend to
  // In the layout of metal/decode_step.h: made once, for all launches of the step.
  mx::array integers;
};

// A layer's slots in flat buffers, which the kernels change in place.
struct SlotArrays {
  Stored keys, values;                             // [B, S, width]
  mx::array positions;                             // [B, S] int16 or int32
  std::optional<mx::array> scores = std::nullopt;  // [B, S]
  // ||v|| [B, S] of the values as they are stored, where the policy weighs by it.
  std::optional<mx::array> norms = std::nullopt;
  // log ||v||^2 [B, S] float16 of dense values as they came, where the policy ranks by it.
  std::optional<mx::array> value_lengths = std::nullopt;
};

// Writes each head's new row [B, H, 1, width] as the model made it, in place, and folds the row
// that was there into the remainder, if there is one. What it returns [B, H] int32 are the slots
// that were written; any kernel that reads the slots afterwards must take that array, or nothing
// says that it comes later.
mx::array overwrite(
    const StepPlan& plan, const SlotArrays& slots, const mx::array& victims,
    const mx::array& new_keys, const mx::array& new_values, std::optional<Remainder>& remainder,
    const std::optional<Frame>& frame);

// The mean of each head's keys [B, H, D].
mx::array mean_kept_keys(const StepPlan& plan, const Stored& keys, const mx::array& written);

// 1 - cos(key, mean direction of its head's keys) [B, attended slots].
mx::array unlike_directions(const StepPlan& plan, const Stored& keys, const mx::array& written);

// Brings the scores up to date, in place, and names the next victims [B, H, evict_every] int32.
// `means` are those from which distances were measured, `worth` is for Priority::direction.
mx::array update(
    const StepPlan& plan, const SlotArrays& slots, const KernelPolicy& policy,
    const VectorResult& attended, const mx::array& victims, const mx::array& written,
    const std::optional<mx::array>& means, const std::optional<mx::array>& worth);

}  // namespace mlx_h2o
