// Attention of a few queries over many slots, reading every key and value once.
//
// A threadgroup works on slots of one KV head, for all its query heads and all queries: its rows.
// Each simdgroup takes its share of the keys, KEYS at a step, and holds ROWS rows in registers.
// Rows that do not fit are spread over ROW_GROUPS simdgroups with the same keys; then keys and
// values pass through threadgroup memory, so that the device still gives each only once. In the end
// the simdgroups merge what they have. The slots of a whole head give its result; those of a part
// of a head give a partial one, which attention_merge.metal merges with others by their lse.

#include "attention_step.h"
#include "packed_rows.h"
#include "remainder.h"
#include "simdgroup_merge.h"

namespace h2o {

// Floats of threadgroup memory through which queries come in and results go out.
#define SCRATCH 2112

// Columns that are no slots: attention sinks and the remainder.
template <int G, int QUERIES, bool SINKS, bool REMAINDER, typename T, int W, int WV, int ROWS,
          typename Sinks, typename Counts, typename Saturations>
inline void join_other_columns(
    thread QueryRows<T, W, WV, ROWS>& rows,
    Sinks sinks,  // of this KV head's group
    Remainder<Counts> remainder,
    Saturations saturation,  // of this KV head
    int kv_head,             // counted over the batch
    float scale,
    int lane) {
  if (SINKS) {
    float nothing[WV] = {0.0f};
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const QueryRow row = query_row<G, QUERIES>(rows.first + r, QUERIES);
      join(rows.sums[r], row.live ? float(sinks[row.head]) : -INFINITY, nothing, lane);
    }
  }
  if (REMAINDER) {
    float mean_key[W], var_key[W], mean_value[WV];
    load_share<W>(dense_rows(remainder.mean_keys, 32 * W), kv_head, lane, mean_key);
    load_share<W>(dense_rows(remainder.var_keys, 32 * W), kv_head, lane, var_key);
    load_share<WV>(dense_rows(remainder.mean_values, 32 * WV), kv_head, lane, mean_value);
    const float count = remainder.counts[kv_head];
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const float logit =
          remainder_logit<W>(rows.queries[r], scale, count, mean_key, var_key, saturation[0]);
      join(rows.sums[r], logit, mean_value, lane);
    }
  }
}

// Threadgroup (0, item, batch and block of rows) of a launch.
template <typename T, int D, int DV, int G, int QUERIES, int ROWS, int ROW_GROUPS, int SIMDS,
          int KEYS, int MASK, bool SINKS, bool REMAINDER, bool DISTANCES, bool FRAME, int EXPORT,
          typename Factors, typename Keys, typename Values, typename Mask, typename Sinks,
          typename Counts, typename Saturations, typename Out, typename StagedKeys,
          typename StagedValues>
inline void attention_vector(
    const device int* params,
    Factors factors,  // scale
    Rows<const device T*> queries,
    Keys keys,      // dense or packed, each
    Values values,  // of the two
    Rows<Mask> mask,
    Sinks sinks,  // [Hq]
    Remainder<Counts> remainder,
    Saturations saturation,           // [Hk], of the remainder's term
    const device float* means,        // [B, Hk, D], from which distances are measured
    const device float* frame_scale,  // [Hk, D], by which queries meet keys that lie in a frame
    device Out* out,                  // [B, items, G, L, DV]
    device float* lse,                // [B, items, G, L]
    device float* logits,             // [B, slots * G * L]: head after head [G, L, length]
    device float* distances,          // [B, slots]
    threadgroup float* scratch,
    threadgroup float* tops,
    threadgroup float* totals,
    StagedKeys staged_keys,
    StagedValues staged_values,
    uint3 at,
    int thread_index) {
  constexpr int W = D / 32, WV = DV / 32;
  constexpr int THREADS = 32 * SIMDS;
  constexpr int STEP = SIMDS / ROW_GROUPS * KEYS;
  constexpr int BLOCK_ROWS = ROWS * ROW_GROUPS;
  constexpr int ROW_BLOCKS = (G * QUERIES + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int simd = thread_index / 32, lane = thread_index % 32;
  const int batch = int(at.z) / ROW_BLOCKS;
  const int block_first = int(at.z) % ROW_BLOCKS * BLOCK_ROWS;
  const int first_of_simd = simd / ROW_GROUPS * KEYS;
  const Launch launch = launch_of(params);
  const Work work = work_of(params, int(at.y));
  const int kv_head = batch * launch.kv_heads + work.head;

  queries = from(queries, batch, work.head * G, 0);
  keys = from(keys, batch, work.memory_head, work.start + work.offset);
  values = from(values, batch, work.memory_head, work.start + work.offset);
  mask = from(mask, batch, work.head * G, 0);
  const int64_t items_before = int64_t(batch) * launch.items + at.y;
  const int64_t slots_before = int64_t(batch) * launch.slots + work.prefix;
  out += items_before * G * launch.queries * DV;
  lse += items_before * G * launch.queries;
  logits += slots_before * G * launch.queries;
  distances += slots_before;

  QueryRows<T, W, WV, ROWS> rows;
  rows.first = block_first + simd % ROW_GROUPS * ROWS;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    start(rows.sums[r]);
  }
  load_queries<G, QUERIES, BLOCK_ROWS, SCRATCH>(
      queries, launch.queries, block_first, scratch, thread_index, THREADS, rows);
  if (FRAME) {
    enter_frame<D>(frame_scale + work.head * D, scratch, thread_index, THREADS, rows);
  }
  float mean[W];
  if (DISTANCES) {
    copy_rows<D>(
        dense_rows(means + kv_head * D, D), 1, dense_rows(scratch, D), thread_index, THREADS);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    load_share<W>(dense_rows(scratch, D), 0, lane, mean);
  }
  // They count once for a head.
  if ((SINKS || REMAINDER) && work.offset == 0 && simd < ROW_GROUPS) {
    join_other_columns<G, QUERIES, SINKS, REMAINDER>(
        rows, sinks + work.head * G, remainder, saturation + work.head, kv_head, factors[0], lane);
  }

  for (int done = 0; done < work.count; done += STEP) {
    const int first = work.offset + done + first_of_simd;
    const int count = min(KEYS, work.count - done - first_of_simd);
    const Keys keys_here = from(keys, 0, 0, done);
    const Values values_here = from(values, 0, 0, done);
    if (ROW_GROUPS == 1) {
      if (count > 0) {
        attend<G, QUERIES, MASK, DISTANCES, EXPORT>(
            from(keys_here, 0, 0, first_of_simd), from(values_here, 0, 0, first_of_simd), first,
            count, launch, work, mask, mean, lane, factors[0], rows, logits, distances);
      }
    } else {
      const int staged = min(STEP, work.count - done);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage<D>(keys_here, staged, staged_keys, thread_index, THREADS);
      stage<DV>(values_here, staged, staged_values, thread_index, THREADS);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (count > 0) {
        attend<G, QUERIES, MASK, DISTANCES, EXPORT>(
            from(staged_keys, 0, 0, first_of_simd), from(staged_values, 0, 0, first_of_simd), first,
            count, launch, work, mask, mean, lane, factors[0], rows, logits, distances);
      }
    }
  }

  rescale<G, QUERIES, ROW_GROUPS, SIMDS, EXPORT>(
      rows, launch.queries, simd, lane, tops, totals, lse);
  write_output<G, QUERIES, ROW_GROUPS, SIMDS, SCRATCH>(
      rows, block_first, launch.queries, simd, lane, scratch, out);
}

}  // namespace h2o

//! buffers
//! in params
//! in factors
//! in queries
//! in keys
//! in key_scales optional float strided
//! in key_biases optional float strided
//! in values
//! in value_scales optional float strided
//! in value_biases optional float strided
//! in mask optional bool strided
//! in sinks optional float
//! in counts optional float
//! in mean_keys optional float
//! in var_keys optional float
//! in mean_values optional float
//! in saturation optional float
//! in means optional float
//! in frame_scale optional float
//! in after optional
//! out out
//! out lse optional float
//! out logits optional float
//! out distances optional float
//! body

  typedef typename h2o::Stored<K_BITS, T>::Element Key;
  typedef typename h2o::Stored<V_BITS, T>::Element Value;
  const h2o::Packing<K_BITS, K_GROUP> of_keys = {};
  const h2o::Packing<V_BITS, V_GROUP> of_values = {};
  constexpr int STAGED_ROWS = ROW_GROUPS > 1 ? SIMDS / ROW_GROUPS * KEYS : 0;
  constexpr int KEY_ELEMENTS = ELEMENTS_OF(D, K_BITS), KEY_GROUPS = GROUPS_OF(D, K_BITS, K_GROUP);
  constexpr int VALUE_ELEMENTS = ELEMENTS_OF(DV, V_BITS);
  constexpr int VALUE_GROUPS = GROUPS_OF(DV, V_BITS, V_GROUP);
  THREADGROUP_ARRAY(float, scratch, SCRATCH);
  THREADGROUP_ARRAY(float, tops, SIMDS * ROWS);
  THREADGROUP_ARRAY(float, totals, SIMDS * ROWS);
  THREADGROUP_ARRAY(Key, staged_keys, STAGED_ROWS * KEY_ELEMENTS + 1);
  THREADGROUP_ARRAY(T, staged_key_scales, STAGED_ROWS * KEY_GROUPS + 1);
  THREADGROUP_ARRAY(T, staged_key_biases, STAGED_ROWS * KEY_GROUPS + 1);
  THREADGROUP_ARRAY(Value, staged_values, STAGED_ROWS * VALUE_ELEMENTS + 1);
  THREADGROUP_ARRAY(T, staged_value_scales, STAGED_ROWS * VALUE_GROUPS + 1);
  THREADGROUP_ARRAY(T, staged_value_biases, STAGED_ROWS * VALUE_GROUPS + 1);
  h2o::attention_vector<
      T, D, DV, G, QUERIES, ROWS, ROW_GROUPS, SIMDS, KEYS, MASK, SINKS, REMAINDER, DISTANCES,
      FRAME, EXPORT>(
      params, factors, ROWS_OF(queries, queries_strides),
      h2o::stored_rows(
          of_keys, ROWS_OF(keys, keys_strides), ROWS_OF(key_scales, key_scales_strides),
          ROWS_OF(key_biases, key_biases_strides)),
      h2o::stored_rows(
          of_values, ROWS_OF(values, values_strides), ROWS_OF(value_scales, value_scales_strides),
          ROWS_OF(value_biases, value_biases_strides)),
      ROWS_OF(mask, mask_strides), sinks,
      h2o::remainder_of(counts, mean_keys, var_keys, mean_values), saturation, means, frame_scale,
      out, lse, logits, distances, scratch, tops, totals,
      h2o::stored_rows(
          of_keys, h2o::dense_rows(staged_keys, KEY_ELEMENTS),
          h2o::dense_rows(staged_key_scales, KEY_GROUPS),
          h2o::dense_rows(staged_key_biases, KEY_GROUPS)),
      h2o::stored_rows(
          of_values, h2o::dense_rows(staged_values, VALUE_ELEMENTS),
          h2o::dense_rows(staged_value_scales, VALUE_GROUPS),
          h2o::dense_rows(staged_value_biases, VALUE_GROUPS)),
      threadgroup_position_in_grid, int(thread_index_in_threadgroup));
