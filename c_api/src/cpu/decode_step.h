// One token of one layer: fold, write, attend, accumulate, choose victims; in place.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace mlx_h2o {

// What is the same at every step of a layer.
struct Layer {
  int B, Hq, Hk, D, Dv;
  int64_t S;  // slots of all heads
  Dtype out_dtype;
  float scale;
  bool remembers;                 // statistics of the evicted are kept
  bool answers;                   // and go on answering
  std::vector<float> saturation;  // of the remainder's term, [Hk]; 0: first order
  KernelPolicy policy;
  // [Hk, D] each, or nullptr: what keys are stored relative to (frame.h).
  const float* frame_centre = nullptr;
  const float* frame_scale = nullptr;
};

// Keys or values of all slots [B, S, width], dense or packed.
struct SlotRows {
  void* data;
  Dtype dtype;  // of the rows, or of their scales and biases
  int width;
  int bits = 0;  // 0: dense
  int group_size = 0;
  void* scales = nullptr;
  void* biases = nullptr;

  Rows rows() const;
  int groups() const {
    return width / group_size;
  }
  // Of packed rows: from a group's least to its greatest element, [count, groups()].
  void ranges(int64_t slot, int count, float* out) const;
  const void* row(int64_t slot) const;
  // A new row, dense and in `dtype`; packed here from full precision, once.
  void write(int64_t slot, const void* row) const;
  // A row out of others of the same width and dtype (recent.py says what becomes of it).
  void take_over(int64_t slot, const SlotRows& others, int64_t other) const;
};

// The newest tokens where they are stored apart (recent.py): [B, Hk, size] rows.
struct RecentState {
  SlotRows keys;
  SlotRows values;
  float* scores;            // [B, Hk, size], or nullptr
  uint16_t* value_lengths;  // [B, Hk, size] float16, or nullptr
  int size = 0;             // 0: they are stored with all others
};

// The layer's memory (slots/slot_store.py and slots/remainder.py name the fields).
struct LayerState {
  SlotRows keys;
  SlotRows values;
  Positions positions;  // [B, S]
  float* scores;        // [B, S], or nullptr where the policy accumulates nothing
  // [B, S] float16, log ||v||^2 of dense values as they came; or nullptr where no policy asks
  uint16_t* value_lengths;
  float* count;       // [B, Hk]
  float* mean_key;    // [B, Hk, D]
  float* var_key;     // [B, Hk, D]
  float* mean_value;  // [B, Hk, Dv]
  int32_t* victims;   // [B, Hk, evict_every]
  RecentState recent;
};

// What changes from step to step.
struct Step {
  TokenPlan plan;
  const void* q;  // [B, Hq, 1, D], by strides
  int64_t q_batch, q_head;
  Dtype q_dtype;
  const void* k;  // [B, Hk, 1, D], by strides, in the slots' dtype
  int64_t k_batch, k_head;
  const void* v;  // [B, Hk, 1, Dv], by strides, in the slots' dtype
  int64_t v_batch, v_head;
  const float* sinks;  // [Hq] or nullptr
  void* out;           // [B, Hq, 1, Dv]

  // Of the newest tokens where they are stored apart; else every new one comes into the slots.
  RecentStep recent() const {
    return plan.recent.value_or(RecentStep{0, 0, true});
  }
};

// Which slot of a head takes a row: the victim's, or the next unused one.
int free_slot(const Layer& layer, const LayerState& state, const TokenPlan& plan, int b, int h);

void decode_step(const Layer& layer, const LayerState& state, const Step& step);

}  // namespace mlx_h2o
