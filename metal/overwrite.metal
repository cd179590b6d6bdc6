// The new row takes its slot, and the row that it overwrites joins the remainder
// (python/mlx_h2o/remainder.py, fold). A simdgroup per KV head, each lane its share of the row, so
// that every element is read and written by one lane.

#include "decode_step.h"
#include "remainder.h"

namespace h2o {

// A mean and a variance of `count` elements, the last of them `x`, from those of the others.
inline void join_moments(float x, float count, thread float& mean, thread float& variance) {
  const float part = 1.0f / count, step = x - mean;
  mean += part * step;
  variance += part * ((1.0f - part) * step * step - variance);
}

// Threadgroup (0, KV head, batch) of a launch, one simdgroup.
template <int D, int DV, bool REMEMBERS, bool NORMS, typename T, typename Victims, typename Counts>
inline void overwrite(
    const device int* plan,
    Victims victims,                // [B, H, evict_every]
    Rows<const device T*> new_key,  // [B, H, 1, D]
    Rows<const device T*> new_value,
    device T* keys,    // [B, S, D]
    device T* values,  // [B, S, DV]
    device int* positions,
    device float* norms,        // ||v|| of each slot
    Remainder<Counts> evicted,  // before and ...
    device float* counts_out,   // ... after
    device float* mean_keys_out, device float* var_keys_out, device float* mean_values_out,
    device int* slots_out,  // [B, H]: the slot that was written, counted in its head
    uint3 at, int lane) {
  constexpr int W = D / 32, WV = DV / 32;
  const DecodeStep step = decode_step_of(plan);
  const HeadStep head = head_step_of(plan, int(at.y));
  const int kv_head = int(at.z) * step.kv_heads + int(at.y);
  const bool full = head.victim >= 0;
  // Clamped, so that no state, however damaged, makes a step write elsewhere.
  const int last = head.length - 1;
  const int slot =
      full ? min(max(int(victims[kv_head * step.evict_every + head.victim]), 0), last) : last;
  const int64_t row = int64_t(at.z) * step.buffer_slots + head.start + slot;
  device T* key = keys + row * D + lane * W;
  device T* value = values + row * DV + lane * WV;

  if (REMEMBERS) {
    const int64_t key_at = int64_t(kv_head) * D + lane * W;
    const int64_t value_at = int64_t(kv_head) * DV + lane * WV;
    const float count = evicted.counts[kv_head] + (full ? 1.0f : 0.0f);
    UNROLL
    for (int i = 0; i < W; i++) {
      float mean = evicted.mean_keys[key_at + i], variance = evicted.var_keys[key_at + i];
      if (full) {
        join_moments(float(key[i]), count, mean, variance);
      }
      mean_keys_out[key_at + i] = mean;
      var_keys_out[key_at + i] = variance;
    }
    UNROLL
    for (int i = 0; i < WV; i++) {
      float mean = evicted.mean_values[value_at + i], variance = 0.0f;
      if (full) {
        join_moments(float(value[i]), count, mean, variance);
      }
      mean_values_out[value_at + i] = mean;
    }
    if (lane == 0) {
      counts_out[kv_head] = count;
    }
  }

  T new_share[W];
  load_share<W>(from(new_key, int(at.z), int(at.y), 0), 0, lane, new_share);
  UNROLL
  for (int i = 0; i < W; i++) {
    key[i] = new_share[i];
  }
  T new_value_share[WV];
  load_share<WV>(from(new_value, int(at.z), int(at.y), 0), 0, lane, new_value_share);
  float square = 0.0f;
  UNROLL
  for (int i = 0; i < WV; i++) {
    value[i] = new_value_share[i];
    square += float(new_value_share[i]) * float(new_value_share[i]);
  }
  if (NORMS) {
    square = simd_sum(square);
    if (lane == 0) {
      norms[row] = sqrt(square);
    }
  }
  if (lane == 0) {
    positions[row] = step.offset - 1;
    slots_out[kv_head] = slot;
  }
}

}  // namespace h2o

//! body

  h2o::overwrite<D, DV, REMEMBERS, NORMS>(
      plan, victims, ROWS_OF(new_keys, new_keys_strides), ROWS_OF(new_values, new_values_strides),
      IN_PLACE(T, keys), IN_PLACE(T, values), IN_PLACE(int, positions), IN_PLACE(float, norms),
      h2o::remainder_of(counts, mean_keys, var_keys, mean_values), counts_out, mean_keys_out,
      var_keys_out, mean_values_out, slots_out, threadgroup_position_in_grid,
      int(thread_index_in_threadgroup));
