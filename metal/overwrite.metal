// The new row takes its slot, packed where rows are, and the row that it overwrites joins the
// remainder (python/mlx_h2o/slots/remainder.py, fold). A simdgroup per KV head, which holds rows by
// columns (quantize.h).

#include "decode_step.h"
#include "quantize.h"
#include "remainder.h"

namespace h2o {

// A mean and a variance of `count` elements, the last of them `x`, from those of the others.
inline void join_moments(float x, float count, thread float& mean, thread float& variance) {
  const float part = 1.0f / count, step = x - mean;
  mean += part * step;
  variance += part * ((1.0f - part) * step * step - variance);
}

// The lane's i-th element of a row held by columns.
template <typename Row>
inline float column_of(Row row, int i, int lane) {
  float column[1];
  load_share<1>(columns_from(row, 32 * i), 0, lane, column);
  return column[0];
}

// A key as it is stored where keys lie in a frame (python/mlx_h2o/slots/key_scaling.py), in its own type.
template <int W, typename T>
inline void enter_frame(
    const device float* centre, const device float* scale, int lane, thread float* columns) {
  UNROLL
  for (int i = 0; i < W; i++) {
    columns[i] = float(T((columns[i] - centre[32 * i + lane]) / scale[32 * i + lane]));
  }
}

// Threadgroup (0, KV head, batch) of a launch, one simdgroup.
template <int D, int DV, bool REMEMBERS, bool NORMS, bool LENGTHS, bool FRAME, typename T,
          typename Victims, typename Keys, typename Values, typename Position, typename Counts>
inline void overwrite(
    const device int* plan,
    Victims victims,                // [B, H, evict_every]
    Rows<const device T*> new_key,  // [B, H, 1, D]
    Rows<const device T*> new_value,
    Keys keys,      // [B * S, D], dense or packed
    Values values,  // [B * S, DV], likewise
    device Position* positions,
    device float* norms,               // ||v|| of each slot, as it is stored
    device half* value_lengths,        // log ||v||^2 of each dense slot, as it came
    const device float* frame_centre,  // [H, D], in which ...
    const device float* frame_scale,   // ... keys lie
    Remainder<Counts> evicted,         // before and ...
    device float* counts_out,          // ... after
    device float* mean_keys_out, device float* var_keys_out, device float* mean_values_out,
    device int* slots_out,  // [B, H]: the slot that was written, counted in its head
    uint3 at, int lane) {
  constexpr int W = D / 32, WV = DV / 32;
  const DecodeStep step = decode_step_of(plan);
  const HeadPlan head = head_plan_of(plan, int(at.y));
  const int kv_head = int(at.z) * step.kv_heads + int(at.y);
  const bool full = head.victim >= 0;
  // Clamped, so that no state, however damaged, makes a step write elsewhere.
  const int last = head.length - 1;
  const int slot =
      full ? min(max(int(victims[kv_head * step.evict_every + head.victim]), 0), last) : last;
  const int row = int(at.z) * step.buffer_slots + head.start + slot;
  keys = from(keys, 0, 0, row);
  values = from(values, 0, 0, row);

  if (REMEMBERS) {
    const float count = evicted.counts[kv_head] + (full ? 1.0f : 0.0f);
    UNROLL
    for (int i = 0; i < W; i++) {
      const int64_t column = int64_t(kv_head) * D + 32 * i + lane;
      float mean = evicted.mean_keys[column], variance = evicted.var_keys[column];
      if (full) {
        join_moments(column_of(keys, i, lane), count, mean, variance);
      }
      mean_keys_out[column] = mean;
      var_keys_out[column] = variance;
    }
    UNROLL
    for (int i = 0; i < WV; i++) {
      const int64_t column = int64_t(kv_head) * DV + 32 * i + lane;
      float mean = evicted.mean_values[column], variance = 0.0f;
      if (full) {
        join_moments(column_of(values, i, lane), count, mean, variance);
      }
      mean_values_out[column] = mean;
    }
    if (lane == 0) {
      counts_out[kv_head] = count;
    }
    // Levels of several lanes share a word.
    simdgroup_barrier(mem_flags::mem_device);
  }

  float key[W], value[WV];
  new_key = from(new_key, int(at.z), int(at.y), 0);
  new_value = from(new_value, int(at.z), int(at.y), 0);
  UNROLL
  for (int i = 0; i < W; i++) {
    key[i] = column_of(new_key, i, lane);
  }
  UNROLL
  for (int i = 0; i < WV; i++) {
    value[i] = column_of(new_value, i, lane);
  }
  if (FRAME) {
    const int first = int(at.y) * D;
    enter_frame<W, T>(frame_centre + first, frame_scale + first, lane, key);
  }
  if (LENGTHS) {
    const float square = simd_sum(dot<WV>(value, value));
    if (lane == 0) {
      value_lengths[row] = half(log(max(square, LEAST_SQUARE)));
    }
  }
  store_columns<W>(keys, lane, key);
  store_columns<WV>(values, lane, value);
  if (NORMS) {
    const float square = simd_sum(dot<WV>(value, value));
    if (lane == 0) {
      norms[row] = sqrt(square);
    }
  }
  if (lane == 0) {
    positions[row] = Position(step.offset - 1);
    slots_out[kv_head] = slot;
  }
}

}  // namespace h2o

//! buffers
//! in plan
//! in victims
//! in new_keys
//! in new_values
//! in keys
//! in key_scales optional float strided
//! in key_biases optional float strided
//! in values
//! in value_scales optional float strided
//! in value_biases optional float strided
//! in positions
//! in norms optional float
//! in value_lengths optional half
//! in frame_centre optional float
//! in frame_scale optional float
//! in counts optional float
//! in mean_keys optional float
//! in var_keys optional float
//! in mean_values optional float
//! out counts_out optional float
//! out mean_keys_out optional float
//! out var_keys_out optional float
//! out mean_values_out optional float
//! out slots_out
//! body

  typedef typename h2o::Stored<K_BITS, T>::Element Key;
  typedef typename h2o::Stored<V_BITS, T>::Element Value;
  const h2o::Packing<K_BITS, K_GROUP> of_keys = {};
  const h2o::Packing<V_BITS, V_GROUP> of_values = {};
  constexpr int KEY_GROUPS = GROUPS_OF(D, K_BITS, K_GROUP);
  constexpr int VALUE_GROUPS = GROUPS_OF(DV, V_BITS, V_GROUP);
  h2o::overwrite<D, DV, REMEMBERS, NORMS, LENGTHS, FRAME>(
      plan, victims, ROWS_OF(new_keys, new_keys_strides), ROWS_OF(new_values, new_values_strides),
      h2o::stored_rows(
          of_keys, h2o::dense_rows(IN_PLACE(Key, keys), ELEMENTS_OF(D, K_BITS)),
          h2o::dense_rows(IN_PLACE(T, key_scales), KEY_GROUPS),
          h2o::dense_rows(IN_PLACE(T, key_biases), KEY_GROUPS)),
      h2o::stored_rows(
          of_values, h2o::dense_rows(IN_PLACE(Value, values), ELEMENTS_OF(DV, V_BITS)),
          h2o::dense_rows(IN_PLACE(T, value_scales), VALUE_GROUPS),
          h2o::dense_rows(IN_PLACE(T, value_biases), VALUE_GROUPS)),
      IN_PLACE(POSITION, positions), IN_PLACE(float, norms), IN_PLACE(half, value_lengths),
      frame_centre, frame_scale,
      h2o::remainder_of(counts, mean_keys, var_keys, mean_values), counts_out, mean_keys_out,
      var_keys_out, mean_values_out, slots_out, threadgroup_position_in_grid,
      int(thread_index_in_threadgroup));
