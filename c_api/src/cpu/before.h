// What a step changes, copied before it does (python/mlx_h2o/slots/journal.py).
#pragma once

#include "decode_step.h"

namespace mlx_h2o {

// Where the copies go; null is left out.
struct Before {
  int32_t* slots = nullptr;           // [B, Hk]: which slot of each head takes the new row
  SlotRows keys{}, values{};          // [B, Hk] rows of those slots, stored as the slots' are
  Positions positions{};              // [B, Hk]
  uint16_t* value_lengths = nullptr;  // [B, Hk]
  float* scores = nullptr;            // [B, S]
  float *count = nullptr, *mean_key = nullptr, *var_key = nullptr, *mean_value = nullptr;
  int32_t* victims = nullptr;                // [B, Hk, evict_every]
  SlotRows recent_keys{}, recent_values{};   // [B, Hk] rows of the ring's slot
  uint16_t* recent_value_lengths = nullptr;  // [B, Hk]
  float* recent_scores = nullptr;            // [B, Hk, size]
};

void keep(const Layer& layer, const LayerState& state, const Step& step, const Before& before);

}  // namespace mlx_h2o
