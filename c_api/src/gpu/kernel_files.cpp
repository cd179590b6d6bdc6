// Written by tools/embed_metal.py from metal/; change that and run the tool.
// clang-format off
#include <map>

#include "kernel_text.h"

namespace mlx_h2o {

const char* kernel_file(const std::string& name) {
  static const auto& files = *new std::map<std::string, const char*>{
{"attention_merge.metal", R"metal(// The second pass of attention over long caches: merges the results of a head's blocks, one row of
// the output per threadgroup. A partial result is a mean over its block's slots, so it counts by
// the exponential of its block's lse.

#include "online_softmax.h"
#include "work.h"

namespace h2o {

template <int DV, int SIMDS, typename Partial, typename Lse, typename Out>
inline void attention_merge(
    const device int* params,
    const device Partial* partials,  // [B, items, rows, DV]
    Lse partial_lses,                // [B, items, rows]
    device Out* out,                 // [B, Hk, rows, DV]
    device float* lse,               // [B, Hk, rows]
    threadgroup float* scratch,
    uint3 at,
    uint3 threadgroups,
    int thread_index) {
  constexpr int WV = DV / 32;
  const int simd = thread_index / 32, lane = thread_index % 32;
  const int row = int(at.x), rows = int(threadgroups.x);
  const BlockRange blocks = block_range(params, int(at.y));
  const int64_t first = int64_t(at.z) * launch_of(params).items + blocks.first;
  partials += (first * rows + row) * DV + lane * WV;
  partial_lses += first * rows + row;

  float top = LOWEST_LOGIT, total = 0.0f;
  for (int i = lane; i < blocks.count; i += 32) {
    top = max(top, partial_lses[i * rows]);
  }
  top = simd_max(top);
  for (int i = lane; i < blocks.count; i += 32) {
    total += weight_of(partial_lses[i * rows], top);
  }
  total = simd_sum(total);

  float sums[WV] = {0.0f};
  for (int i = simd; i < blocks.count; i += SIMDS) {
    const float weight = weight_of(partial_lses[i * rows], top);
    UNROLL
    for (int j = 0; j < WV; j++) {
      sums[j] += weight * float(partials[int64_t(i) * rows * DV + j]);
    }
  }
  UNROLL
  for (int j = 0; j < WV; j++) {
    scratch[simd * DV + lane * WV + j] = sums[j];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  const int64_t written = (int64_t(at.z) * threadgroups.y + at.y) * rows + row;
  for (int e = thread_index; e < DV; e += SIMDS * 32) {
    float sum = 0.0f;
    UNROLL
    for (int s = 0; s < SIMDS; s++) {
      sum += scratch[s * DV + e];
    }
    out[written * DV + e] = Out(total == 0.0f ? 0.0f : sum / total);
  }
  if (thread_index == 0) {
    lse[written] = total == 0.0f ? -INFINITY : top + log(total);
  }
}

}  // namespace h2o

//! buffers
//! in params
//! in partials
//! in partial_lses
//! out out
//! out lse
//! body

  THREADGROUP_ARRAY(float, scratch, SIMDS * DV);
  h2o::attention_merge<DV, SIMDS>(
      params, partials, partial_lses, out, lse, scratch, threadgroup_position_in_grid,
      threadgroups_per_grid, int(thread_index_in_threadgroup));
)metal"},
{"attention_step.h", R"metal(// One step of attention: a few keys and values, for all rows of a simdgroup.
//
// Lane j speaks for key j: it masks its logits, takes their exponentials and writes them out, which
// so cost an instruction a step, not a key.

#include "masks.h"
#include "query_rows.h"

namespace h2o {

// What is written besides the output.
#define EXPORT_NOTHING 0
#define EXPORT_LSE 1
#define EXPORT_LOGITS 2

// Unscaled logits of the keys for each row, and distances from the mean: lane j gets key j's. Keys
// hidden from every row are not read.
template <bool MASKED, bool DISTANCES, typename T, int W, int WV, int ROWS, typename Keys>
inline void score(
    Keys keys,
    int count,
    bool seen,
    thread QueryRows<T, W, WV, ROWS>& rows,
    const thread float* mean,
    int lane,
    thread float* logits,
    thread float& distance) {
  for (int j = 0; j < count; j++) {
    if (MASKED && !simd_shuffle(uint(seen), ushort(j))) {
      continue;
    }
    float key[W];
    load_share<W>(keys, j, lane, key);
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const float logit = simd_sum(dot<W>(rows.queries[r], key));
      logits[r] = lane == j ? logit : logits[r];
    }
    if (DISTANCES) {
      const float apart = simd_sum(square_distance<W>(mean, key));
      distance = lane == j ? apart : distance;
    }
  }
}

// Adds the values to each row's sum, with the weights that lane j holds for value j.
template <bool MASKED, typename T, int W, int WV, int ROWS, typename Values>
inline void add_values(
    Values values,
    int count,
    bool seen,
    const thread float* weights,
    int lane,
    thread QueryRows<T, W, WV, ROWS>& rows) {
  for (int j = 0; j < count; j++) {
    if (MASKED && !simd_shuffle(uint(seen), ushort(j))) {
      continue;
    }
    float value[WV];
    load_share<WV>(values, j, lane, value);
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const float weight = simd_shuffle(weights[r], ushort(j));
      UNROLL
      for (int i = 0; i < WV; i++) {
        rows.sums[r].values[i] += weight * value[i];
      }
    }
  }
}

// The keys and values of `count` slots from `first` (counted in the head) on.
template <int G, int QUERIES, int MASK, bool DISTANCES, int EXPORT, typename T, int W,
          int WV, int ROWS, typename Keys, typename Values, typename Mask>
inline void attend(
    Keys keys,
    Values values,
    int first,
    int count,
    Launch launch,
    Work work,
    Rows<Mask> mask,
    const thread float* mean,
    int lane,
    float scale,
    thread QueryRows<T, W, WV, ROWS>& rows,
    device float* logits_out,
    device float* distances_out) {
  constexpr bool MASKED = MASK != NO_MASK;
  const int slot = first + lane;
  QueryRow row[ROWS];
  float bias[ROWS];
  bool seen = DISTANCES;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    row[r] = query_row<G, QUERIES>(rows.first + r, launch.queries);
    const bool asked = row[r].live && lane < count;
    if (MASKED) {
      const Rows<Mask> of_row = from(mask, 0, row[r].head, row[r].query);
      bias[r] = asked ? bias_of<MASK>(slot, row[r].query, launch, work, of_row.data, of_row.column)
                      : -INFINITY;
      seen = seen || bias[r] != -INFINITY;
    }
  }

  float logits[ROWS], distance = 0.0f;
  score<MASKED, DISTANCES>(keys, count, seen, rows, mean, lane, logits, distance);

  float weights[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const bool hidden = lane >= count || (MASKED && bias[r] == -INFINITY);
    const float logit =
        hidden ? -INFINITY : MASKED ? scale * logits[r] + bias[r] : scale * logits[r];
    if (EXPORT == EXPORT_LOGITS) {
      if (row[r].live && lane < count) {
        const int64_t before = int64_t(row[r].head * launch.queries + row[r].query) * work.length;
        logits_out[before + slot] = logit;
      }
    }
    weights[r] = join_lanes(rows.sums[r], logit);
  }
  // One simdgroup of those with these keys is enough to write what is no row's own.
  if (DISTANCES && rows.first == 0 && lane < count) {
    distances_out[slot] = distance;
  }
  add_values<MASKED>(values, count, seen, weights, lane, rows);
}

}  // namespace h2o
)metal"},
{"attention_vector.metal", R"metal(// Attention of a few queries over many slots, reading every key and value once.
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
)metal"},
{"decode_step.h", R"metal(// A decode step as the host plans it: integers of the layer, then a line per KV head. The slots of
// all heads lie in one flat buffer [B, S, ...].
//
// What a step changes per slot (a row, its position, its scores) it writes in place, into inputs,
// since MLX gives kernels fresh outputs only. README.md says what keeps that in order.

namespace h2o {

#define IN_PLACE(type, buffer) ((device type*)(buffer))

// Of a squared length: keeps the logarithm of a zero vector finite (python/mlx_h2o/slots/packed.py).
#define LEAST_SQUARE 1e-12f

struct DecodeStep {
  int offset;          // the next logical position; the new token's is one less
  int buffer_slots;    // S
  int attended_slots;  // of all heads, at this step
  int kv_heads, evict_every, sink;
  int aged_from;  // the position from which ages count
};

struct HeadPlan {
  int start, length, prefix;  // slots in the buffer; attended slots of the heads before
  int recent;                 // last positions that are protected
  int victim;                 // which of its victims makes room, or -1: the next unused slot does
  bool choose;                // name the next victims
};

#define STEP_INTS 8

inline DecodeStep decode_step_of(const device int* plan) {
  return {plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plan[6]};
}

inline HeadPlan head_plan_of(const device int* plan, int head) {
  const device int* line = plan + STEP_INTS * (1 + head);
  return {line[0], line[1], line[2], line[3], line[4], line[5] != 0};
}

}  // namespace h2o
)metal"},
{"kept_keys.metal", R"metal(// What a policy asks of the kept keys themselves: their mean, while too few were evicted to have
// one (python/mlx_h2o/policies/distinct.py), or 1 less the cosine between each key and the mean
// direction (keydiff.py). A threadgroup per KV head.

#include "decode_step.h"
#include "packed_rows.h"

namespace h2o {

// 1 / ||x|| of a row that a simdgroup holds.
template <int W>
inline float inverse_norm(const thread float* share) {
  return rsqrt(simd_sum(dot<W>(share, share)) + 1e-12f);
}

// Threadgroup (0, KV head, batch) of a launch.
template <int D, bool DIRECTIONS, int SIMDS, typename Keys>
inline void kept_keys(
    const device int* plan,
    Keys keys,             // [B * S, D], dense or packed
    device float* means,   // [B, H, D]
    device float* worth,   // [B, attended slots]
    threadgroup float* scratch, uint3 at, int thread_index) {
  constexpr int W = D / 32;
  const int simd = thread_index / 32, lane = thread_index % 32;
  const DecodeStep step = decode_step_of(plan);
  const HeadPlan head = head_plan_of(plan, int(at.y));
  const Keys rows = from(keys, 0, 0, int(at.z) * step.buffer_slots + head.start);

  float mean[W] = {0.0f}, key[W];
  for (int n = simd; n < head.length; n += SIMDS) {
    load_share<W>(rows, n, lane, key);
    const float factor = DIRECTIONS ? inverse_norm<W>(key) : 1.0f;
    UNROLL
    for (int i = 0; i < W; i++) {
      mean[i] += key[i] * factor;
    }
  }
  UNROLL
  for (int i = 0; i < W; i++) {
    scratch[simd * D + lane * W + i] = mean[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int i = 0; i < W; i++) {
    float sum = 0.0f;
    UNROLL
    for (int s = 0; s < SIMDS; s++) {
      sum += scratch[s * D + lane * W + i];
    }
    mean[i] = sum / float(head.length);
  }
  if (!DIRECTIONS) {
    const int64_t written = (int64_t(at.z) * step.kv_heads + at.y) * D + lane * W;
    UNROLL
    for (int i = 0; i < W; i++) {
      if (simd == 0) {
        means[written + i] = mean[i];
      }
    }
    return;
  }
  const float size = inverse_norm<W>(mean);
  for (int n = simd; n < head.length; n += SIMDS) {
    load_share<W>(rows, n, lane, key);
    const float cosine = simd_sum(dot<W>(key, mean)) * size * inverse_norm<W>(key);
    if (lane == 0) {
      worth[int64_t(at.z) * step.attended_slots + head.prefix + n] = 1.0f - cosine;
    }
  }
}

}  // namespace h2o

//! buffers
//! in plan
//! in keys
//! in key_scales optional float strided
//! in key_biases optional float strided
//! in slots
//! out means optional float
//! out worth optional float
//! body

  THREADGROUP_ARRAY(float, scratch, SIMDS * D);
  h2o::kept_keys<D, DIRECTIONS, SIMDS>(
      plan,
      h2o::stored_rows(
          h2o::Packing<K_BITS, K_GROUP>(), h2o::dense_rows(keys, ELEMENTS_OF(D, K_BITS)),
          h2o::dense_rows(key_scales, GROUPS_OF(D, K_BITS, K_GROUP)),
          h2o::dense_rows(key_biases, GROUPS_OF(D, K_BITS, K_GROUP))),
      means, worth, scratch, threadgroup_position_in_grid, int(thread_index_in_threadgroup));
)metal"},
{"logit_tile.h", R"metal(// Logits of many queries and keys at a time, for prompts: a threadgroup computes TILE query rows by
// TILE keys from chunks of both that pass through threadgroup memory, each thread a square of
// SQUARE x SQUARE. Row i of a KV head is query i % L of query head i / L of its group.

#include "masks.h"
#include "packed_rows.h"

namespace h2o {

#define TILE 64
#define SQUARE 4
#define SIDE (TILE / SQUARE)  // threads along each side
#define TILE_THREADS (SIDE * SIDE)
#define CHUNK 32
#define PADDED_CHUNK (CHUNK + 1)  // so that lanes of a simdgroup read different banks

// A KV head's operands.
template <typename T, typename Keys, typename Mask>
struct Prompt {
  Rows<const device T*> queries;
  Keys keys;  // dense or packed
  Rows<Mask> mask;
  Launch launch;
  Work work;
  int rows;  // G * L
  float scale;
};

template <int G, typename T, typename Keys, typename Mask>
inline Prompt<T, Keys, Mask> prompt_of(
    const device int* params, Rows<const device T*> queries, Keys keys, Rows<Mask> mask,
    float scale, uint3 at) {
  const Launch launch = launch_of(params);
  const Work work = work_of(params, int(at.y));
  const int batch = int(at.z), first = work.head * G;
  return {
      from(queries, batch, first, 0),
      from(keys, batch, work.memory_head, work.start),
      from(mask, batch, first, 0),
      launch,
      work,
      G * launch.queries,
      scale};
}

// The thread's k-th row of a tile, or its k-th key.
inline int row_of_square(int thread_index, int k) {
  return thread_index / SIDE * SQUARE + k;
}
inline int key_of_square(int thread_index, int k) {
  return thread_index % SIDE + k * SIDE;
}

// Whether a causal mask hides all keys from `first_key` on from all rows of a tile.
template <int MASK, typename T, typename Keys, typename Mask>
inline bool all_hidden(Prompt<T, Keys, Mask> prompt, int first_row, int first_key) {
  if (MASK != CAUSAL) {
    return false;
  }
  const int L = prompt.launch.queries, last_row = min(first_row + TILE, prompt.rows) - 1;
  const int last_query = first_row / L == last_row / L ? last_row % L : L - 1;
  return first_key > prompt.work.length - L + last_query;
}

// The thread's square of logits, minus infinity where masked or outside.
template <int D, int MASK, typename T, typename Keys, typename Mask>
inline void logit_tile(
    Prompt<T, Keys, Mask> prompt, int first_row, int first_key, threadgroup float* query_chunk,
    threadgroup float* key_chunk, int thread_index, thread float* logits) {
  const int L = prompt.launch.queries, length = prompt.work.length;
  const int lane = thread_index % CHUNK;
  UNROLL
  for (int i = 0; i < SQUARE * SQUARE; i++) {
    logits[i] = 0.0f;
  }
  for (int done = 0; done < D; done += CHUNK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // A chunk is a simdgroup's width, so a simdgroup reads one row.
    const Rows<const device T*> query_columns = columns_from(prompt.queries, done);
    const Keys key_columns = columns_from(prompt.keys, done);
    for (int i = thread_index / CHUNK; i < TILE; i += TILE_THREADS / CHUNK) {
      const int row = first_row + i, key = first_key + i;
      float query[1] = {0.0f}, held[1] = {0.0f};
      if (row < prompt.rows) {
        load_share<1>(from(query_columns, 0, row / L, row % L), 0, lane, query);
      }
      if (key < length) {
        load_share<1>(key_columns, key, lane, held);
      }
      query_chunk[i * PADDED_CHUNK + lane] = query[0];
      key_chunk[i * PADDED_CHUNK + lane] = held[0];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int d = 0; d < CHUNK; d++) {
      float keys[SQUARE];
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        keys[k] = key_chunk[key_of_square(thread_index, k) * PADDED_CHUNK + d];
      }
      UNROLL
      for (int r = 0; r < SQUARE; r++) {
        const float query = query_chunk[row_of_square(thread_index, r) * PADDED_CHUNK + d];
        UNROLL
        for (int k = 0; k < SQUARE; k++) {
          logits[r * SQUARE + k] += query * keys[k];
        }
      }
    }
  }
  UNROLL
  for (int r = 0; r < SQUARE; r++) {
    const int row = first_row + row_of_square(thread_index, r);
    const Rows<Mask> mask = from(prompt.mask, 0, row / L, row % L);
    UNROLL
    for (int k = 0; k < SQUARE; k++) {
      const int key = first_key + key_of_square(thread_index, k);
      float bias = -INFINITY;
      if (row < prompt.rows && key < length) {
        bias = bias_of<MASK>(key, row % L, prompt.launch, prompt.work, mask.data, mask.column);
      }
      const float logit = prompt.scale * logits[r * SQUARE + k] + bias;
      logits[r * SQUARE + k] = bias == -INFINITY ? -INFINITY : logit;
    }
  }
}

}  // namespace h2o
)metal"},
{"masks.h", R"metal(// Masks: none, causal (aligned at the end), or an array of booleans (true is visible) or of numbers
// to add, where the lowest number of the type stands for "masked" as minus infinity does.

#include "work.h"

namespace h2o {

#define NO_MASK 0
#define CAUSAL 1
#define ARRAY_MASK 2

inline bool hides(bool visible) {
  return !visible;
}
inline bool hides(half x) {
  return float(x) <= -65504.0f;
}
inline bool hides(bfloat x) {
  return float(x) <= -3.38953139e38f;
}
inline bool hides(float x) {
  return x <= -3.40282347e38f;
}

inline float addend(bool) {
  return 0.0f;
}
inline float addend(half x) {
  return float(x);
}
inline float addend(bfloat x) {
  return float(x);
}
inline float addend(float x) {
  return x;
}

// What the mask adds to a query's logit of a slot: minus infinity hides it. An array's last column
// is the last slot's; slots before its first were there before the queries, and are visible.
template <int MASK, typename Elements>
inline float bias_of(int slot, int query, Launch launch, Work work, Elements row, int64_t step) {
  if (MASK == CAUSAL) {
    return slot <= work.length - launch.queries + query ? 0.0f : -INFINITY;
  }
  const int column = slot - (work.length - launch.mask_columns);
  if (MASK == NO_MASK || column < 0) {
    return 0.0f;
  }
  const auto x = row[column * step];
  return hides(x) ? -INFINITY : addend(x);
}

}  // namespace h2o
)metal"},
{"online_softmax.h", R"metal(// A softmax that grows column by column: the largest logit so far, the sum of exponentials relative
// to it, and what the values add up to with these weights. Each lane holds a share of the values
// and a part of the sum, so that only the end has to add up lanes.

namespace h2o {

// Lower than any logit that counts, and finite, so that differences stay numbers.
#define LOWEST_LOGIT -3.40282347e38f

template <int WV>
struct OnlineSoftmax {
  float top, sum;
  float values[WV];
};

template <int WV>
inline void start(thread OnlineSoftmax<WV>& row) {
  row.top = LOWEST_LOGIT;
  row.sum = 0.0f;
  UNROLL
  for (int i = 0; i < WV; i++) {
    row.values[i] = 0.0f;
  }
}

// exp(logit - top), 0 for a masked logit whatever the top is.
inline float weight_of(float logit, float top) {
  return logit == -INFINITY ? 0.0f : fast::exp(logit - top);
}

// Makes everything so far relative to a new largest logit.
template <int WV>
inline void raise(thread OnlineSoftmax<WV>& row, float top) {
  const float fade = fast::exp(row.top - top);
  row.top = top;
  row.sum *= fade;
  UNROLL
  for (int i = 0; i < WV; i++) {
    row.values[i] *= fade;
  }
}

// One column whose logit every lane knows; `value` is its lane's share.
template <int WV>
inline void join(thread OnlineSoftmax<WV>& row, float logit, const thread float* value, int lane) {
  raise(row, max(row.top, logit));
  const float weight = weight_of(logit, row.top);
  row.sum += lane == 0 ? weight : 0.0f;
  UNROLL
  for (int i = 0; i < WV; i++) {
    row.values[i] += weight * value[i];
  }
}

// Up to 32 columns, one a lane; returns this lane's weight, with which its value is to be added.
template <int WV>
inline float join_lanes(thread OnlineSoftmax<WV>& row, float logit) {
  raise(row, max(row.top, simd_max(logit)));
  const float weight = weight_of(logit, row.top);
  row.sum += weight;
  return weight;
}

}  // namespace h2o
)metal"},
{"overwrite.metal", R"metal(// The new row takes its slot, packed where rows are, and the row that it overwrites joins the
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
)metal"},
{"packed_rows.h", R"metal(// Rows in the format of mx.quantize (python/mlx_h2o/slots/packed.py): levels of BITS bits each, and a
// scale and a bias for every GROUP of a row's elements. The levels of a row are a stream of bits,
// lowest first, so 32 of them are BITS words. They become numbers in registers.

#include "rows.h"

namespace h2o {

// How rows are stored: packed, or dense where BITS is 0.
template <int BITS, int GROUP>
struct Packing {};

// The type of a stored row's elements, and how many it has, of those and of groups.
template <int BITS, typename T>
struct Stored {
  typedef uint Element;
};
template <typename T>
struct Stored<0, T> {
  typedef T Element;
};
#define ELEMENTS_OF(width, bits) ((bits) == 0 ? (width) : (width) / 32 * (bits))
#define GROUPS_OF(width, bits, group) ((bits) == 0 ? 0 : (width) / (group))

template <int BITS, int GROUP, typename Words, typename Scales>
struct PackedRows {
  Rows<Words> words;
  Rows<Scales> scales, biases;
};

// Rows of either kind, as what they are.
template <int GROUP, typename Elements, typename Scales>
inline Rows<Elements> stored_rows(
    Packing<0, GROUP>, Rows<Elements> rows, Rows<Scales>, Rows<Scales>) {
  return rows;
}

template <int BITS, int GROUP, typename Words, typename Scales>
inline PackedRows<BITS, GROUP, Words, Scales> stored_rows(
    Packing<BITS, GROUP>, Rows<Words> words, Rows<Scales> scales, Rows<Scales> biases) {
  return {words, scales, biases};
}

template <int BITS, int GROUP, typename Words, typename Scales>
inline PackedRows<BITS, GROUP, Words, Scales> from(
    PackedRows<BITS, GROUP, Words, Scales> rows, int batch, int head, int row) {
  move(rows.words, batch, head, row);
  move(rows.scales, batch, head, row);
  move(rows.biases, batch, head, row);
  return rows;
}

// Of a row, the 32 columns from `first`, a multiple of 32; they lie in one group.
template <int BITS, int GROUP, typename Words, typename Scales>
inline PackedRows<BITS, GROUP, Words, Scales> columns_from(
    PackedRows<BITS, GROUP, Words, Scales> rows, int first) {
  rows.words.data += first / 32 * BITS * rows.words.column;
  rows.scales.data += first / GROUP * rows.scales.column;
  rows.biases.data += first / GROUP * rows.biases.column;
  return rows;
}

// 32 bits of a stream, from bit `shift` (below 32) of one word on to the next word.
inline uint window(uint low, uint high, uint shift) {
  return low >> shift | high << 1 << (31 - shift);
}

// This lane's share of a row, in windows of 32 bits. The device gives each word once: a lane reads
// those that begin in its share and the one that its share begins in, and its share's end is what
// the next lane's begins with.
template <int W, int BITS, typename Words>
inline void load_windows(Rows<Words> rows, int row, int lane, thread uint* windows) {
  constexpr int SHARE = W * BITS, WHOLE = SHARE / 32;
  const int first = lane * SHARE / 32, owned = (lane + 1) * SHARE / 32 - first;
  const Words at = rows.data + row * rows.row + first * rows.column;
  uint words[WHOLE + 2];
  UNROLL
  for (int i = 0; i < WHOLE; i++) {
    words[i] = at[i * rows.column];
  }
  if (SHARE % 32 != 0) {
    if (WHOLE == 0) {
      words[0] = at[0];
    }
    if (32 % SHARE != 0) {
      const uint next = simd_shuffle(words[0], ushort((lane + 1) % 32));
      words[WHOLE + 1] = next;
      if (WHOLE > 0) {
        words[WHOLE] = owned > WHOLE ? uint(at[WHOLE * rows.column]) : next;
      }
    } else {
      words[1] = 0;
    }
  }
  UNROLL
  for (int i = 0; i * 32 < SHARE; i++) {
    windows[i] =
        SHARE % 32 == 0 ? words[i] : window(words[i], words[i + 1], uint(lane * SHARE % 32));
  }
}

// All lanes of a simdgroup must arrive.
template <int W, int BITS, int GROUP, typename Words, typename Scales, typename Share>
inline void load_share(
    PackedRows<BITS, GROUP, Words, Scales> rows, int row, int lane, thread Share* share) {
  constexpr uint LEVELS = 1u << BITS;
  uint windows[(W * BITS + 31) / 32 + 1];
  windows[(W * BITS + 31) / 32] = 0;
  load_windows<W, BITS>(rows.words, row, lane, windows);

  const int group = lane * W / GROUP;
  const float scale = float(rows.scales.data[row * rows.scales.row + group * rows.scales.column]);
  const float bias = float(rows.biases.data[row * rows.biases.row + group * rows.biases.column]);
  float next_scale = scale, next_bias = bias;
  // Where shares do not divide a group, one may reach into that which the next lane begins in.
  constexpr bool DIVIDES = GROUP % W == 0;
  if (!DIVIDES) {
    next_scale = simd_shuffle(scale, ushort((lane + 1) % 32));
    next_bias = simd_shuffle(bias, ushort((lane + 1) % 32));
  }
  const int here = GROUP - lane * W % GROUP;
  UNROLL
  for (int i = 0; i < W; i++) {
    const int at = i * BITS / 32, shift = i * BITS % 32;
    uint level = windows[at] >> shift;
    if (shift + BITS > 32) {
      level |= windows[at + 1] << (32 - shift);
    }
    const bool in_first = DIVIDES || i < here;
    share[i] = Share(
        float(level & (LEVELS - 1)) * (in_first ? scale : next_scale) +
        (in_first ? bias : next_bias));
  }
}

// Copies `count` rows to threadgroup memory as they are stored, all threads together.
template <int D, typename Elements, typename T>
inline void stage(
    Rows<Elements> rows, int count, Rows<threadgroup T*> to, int thread_index, int threads) {
  copy_rows<D>(rows, count, to, thread_index, threads);
}

template <int D, int BITS, int GROUP, typename Words, typename Scales, typename ToWords,
          typename ToScales>
inline void stage(
    PackedRows<BITS, GROUP, Words, Scales> rows, int count,
    PackedRows<BITS, GROUP, ToWords, ToScales> to, int thread_index, int threads) {
  copy_rows<D / 32 * BITS>(rows.words, count, to.words, thread_index, threads);
  copy_rows<D / GROUP>(rows.scales, count, to.scales, thread_index, threads);
  copy_rows<D / GROUP>(rows.biases, count, to.biases, thread_index, threads);
}

}  // namespace h2o
)metal"},
{"prelude_metal.h", R"metal(// Metal's prelude: the kernels' dialect is Metal Shading Language, so little is left to say.
// The other preludes define MLX_H2O_PRELUDE first, and then this one says nothing.
#ifndef MLX_H2O_PRELUDE
#define MLX_H2O_PRELUDE

#include <metal_simdgroup>
#include <metal_stdlib>

using namespace metal;

#define THREADGROUP_ARRAY(type, name, size) threadgroup type name[size]
#define UNROLL _Pragma("clang loop unroll(full)")

#endif
)metal"},
{"priority.h", R"metal(// What a slot has gathered and what it is worth, by policy; each function names its counterpart in
// python/mlx_h2o/policies.

#include "decode_step.h"

namespace h2o {

// What is accumulated.
#define SCORE_NONE 0
#define SCORE_SUM 1
#define SCORE_EMA 2
#define SCORE_EMA_LOGITS 3
#define SCORE_LAST 4

// What is ranked.
#define BY_SCORE 0
#define BY_AGE 1
#define BY_DISTANCE 2
#define BY_WORTH 3
#define BY_SALIENCE 4

#define MASS_FLOOR 1e-6f  // policies/terms.py

// What attention and the layer know of one KV head's slots; index 0 is its first. A packed value has
// RANGES groups of LEVELS + 1 levels; of dense ones, RANGES 0, lengths are kept.
template <int RANGES, int LEVELS, typename Positions, typename Scales>
struct HeadSlots {
  const device float* logits;  // [G, length]
  const device float* distances;
  Positions positions;
  device float* scores;
  const device float* norms;
  const device half* value_lengths;
  Scales value_scales;  // [length, RANGES]
  int length, offset, aged_from;
  int first_free, end_free;  // positions that may go: from the first on, before the end
  float least_distance;
};

// Policy.accumulate after one query, whose evidence is the mean over G query heads.
template <int SCORE, int G, typename Head>
inline float accumulated(
    float score, Head head, int slot, const thread float* lse, float decay) {
  float total = 0.0f;
  UNROLL
  for (int g = 0; g < G; g++) {
    const float logit = head.logits[int64_t(g) * head.length + slot];
    if (logit != -INFINITY && lse[g] != -INFINITY) {
      total += SCORE == SCORE_EMA_LOGITS ? abs(logit) : exp(logit - lse[g]);
    }
  }
  const float evidence = total / float(G);
  return SCORE == SCORE_SUM ? score + evidence
      : SCORE == SCORE_LAST ? evidence
                            : decay * score + (1.0f - decay) * evidence;
}

// Slots.ages: no step counts that is before where they count from.
template <typename Head>
inline float age_of(Head head, int position) {
  return float(head.offset - max(position, head.aged_from));
}

// selection.evictable_slots; the positions of pinned tokens are below 0 (pins.py).
template <typename Head>
inline bool may_go(Head head, int position) {
  return position >= head.first_free && position < head.end_free;
}

// Policy.weighted; a score per step where AGE is set.
template <bool AGE, bool VALUES, typename Head>
inline float weighted(Head head, int slot, int position) {
  float score = head.scores[slot];
  if (AGE) {
    score /= age_of(head, position);
  }
  return VALUES ? score * head.norms[slot] : score;
}

// value_lengths.value_lengths
template <int RANGES, int LEVELS, typename Positions, typename Scales>
inline float value_length(HeadSlots<RANGES, LEVELS, Positions, Scales> head, int slot) {
  if (RANGES == 0) {
    return float(head.value_lengths[slot]);
  }
  float square = 0.0f;
  UNROLL
  for (int g = 0; g < RANGES; g++) {
    const float range = float(head.value_scales[int64_t(slot) * RANGES + g]) * float(LEVELS);
    square += range * range;
  }
  return log(max(square, LEAST_SQUARE));
}

// The terms of Distinct and Salient before they are standardised (terms.py): distance, mass, value,
// age.
#define TERMS 4
#define VALUE_TERM 2

// Only salience looks at values.
template <int PRIORITY>
inline bool has_term(int i) {
  return i != VALUE_TERM || PRIORITY == BY_SALIENCE;
}

template <int PRIORITY, bool MASS, bool VALUES, typename Head>
inline void terms_of(Head head, int slot, int position, thread float* terms) {
  terms[0] = log(max(head.distances[slot], head.least_distance));
  terms[1] = MASS ? log(weighted<true, VALUES>(head, slot, position) + MASS_FLOOR) : 0.0f;
  terms[VALUE_TERM] = PRIORITY == BY_SALIENCE ? value_length(head, slot) : 0.0f;
  terms[3] = log(age_of(head, position));
}

// Policy.priority; `standards` has the mean and the weight over the deviation of each term.
template <int SCORE, int PRIORITY, bool AGE, bool VALUES, typename Head, typename Standards>
inline float priority_of(Head head, int slot, int position, Standards standards) {
  if (PRIORITY == BY_AGE) {
    return float(position);
  }
  if (PRIORITY == BY_WORTH) {
    return head.distances[slot];
  }
  if (PRIORITY == BY_SCORE) {
    return weighted<AGE, VALUES>(head, slot, position);
  }
  float terms[TERMS], sum = 0.0f;
  terms_of<PRIORITY, SCORE != SCORE_NONE, VALUES>(head, slot, position, terms);
  UNROLL
  for (int i = 0; i < TERMS; i++) {
    if (has_term<PRIORITY>(i)) {
      sum += (terms[i] - standards[2 * i]) * standards[2 * i + 1];
    }
  }
  return sum;
}

}  // namespace h2o
)metal"},
{"prompt_lse.metal", R"metal(// Log-sum-exp of many queries' logits, none of which is written. A threadgroup per TILE query rows
// of a KV head, over all keys.

#include "logit_tile.h"
#include "online_softmax.h"

namespace h2o {

// Threadgroup (tile of rows, KV head, batch) of a launch.
template <int D, int G, int MASK, typename T, typename Keys, typename Mask>
inline void prompt_lse(
    Prompt<T, Keys, Mask> prompt,
    device float* lse,  // [B, H * G, L]
    threadgroup float* query_chunk, threadgroup float* key_chunk, uint3 at, int thread_index) {
  const int first_row = int(at.x) * TILE;
  lse += (int64_t(at.z) * prompt.launch.kv_heads + prompt.work.head) * prompt.rows;
  float tops[SQUARE], sums[SQUARE];
  UNROLL
  for (int r = 0; r < SQUARE; r++) {
    tops[r] = LOWEST_LOGIT;
    sums[r] = 0.0f;
  }
  for (int first_key = 0; first_key < prompt.work.length; first_key += TILE) {
    if (all_hidden<MASK>(prompt, first_row, first_key)) {
      break;
    }
    float logits[SQUARE * SQUARE];
    logit_tile<D, MASK>(prompt, first_row, first_key, query_chunk, key_chunk, thread_index, logits);
    UNROLL
    for (int r = 0; r < SQUARE; r++) {
      float top = tops[r];
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        top = max(top, logits[r * SQUARE + k]);
      }
      sums[r] *= fast::exp(tops[r] - top);
      tops[r] = top;
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        sums[r] += weight_of(logits[r * SQUARE + k], top);
      }
    }
  }
  // The SIDE threads with the same rows are neighbours in one simdgroup.
  UNROLL
  for (int r = 0; r < SQUARE; r++) {
    float top = tops[r];
    for (int apart = 1; apart < SIDE; apart *= 2) {
      top = max(top, simd_shuffle_xor(top, ushort(apart)));
    }
    float sum = sums[r] * fast::exp(tops[r] - top);
    for (int apart = 1; apart < SIDE; apart *= 2) {
      sum += simd_shuffle_xor(sum, ushort(apart));
    }
    const int row = first_row + row_of_square(thread_index, r);
    if (row < prompt.rows && thread_index % SIDE == 0) {
      lse[row] = sum == 0.0f ? -INFINITY : top + log(sum);
    }
  }
}

}  // namespace h2o

//! buffers
//! in params
//! in factors
//! in queries
//! in keys
//! in key_scales optional float strided
//! in key_biases optional float strided
//! in mask optional bool strided
//! out lse
//! body

  THREADGROUP_ARRAY(float, query_chunk, TILE * PADDED_CHUNK);
  THREADGROUP_ARRAY(float, key_chunk, TILE * PADDED_CHUNK);
  h2o::prompt_lse<D, G, MASK>(
      h2o::prompt_of<G>(
          params, ROWS_OF(queries, queries_strides),
          h2o::stored_rows(
              h2o::Packing<K_BITS, K_GROUP>(), ROWS_OF(keys, keys_strides),
              ROWS_OF(key_scales, key_scales_strides), ROWS_OF(key_biases, key_biases_strides)),
          ROWS_OF(mask, mask_strides), factors[0], threadgroup_position_in_grid),
      lse, query_chunk, key_chunk, threadgroup_position_in_grid,
      int(thread_index_in_threadgroup));
)metal"},
{"prompt_mass.metal", R"metal(// The attention that many queries give each key: their weights' sum over queries, mean over the
// query heads. A threadgroup per TILE keys of a KV head, over all rows, whose lse is known.

#include "logit_tile.h"

namespace h2o {

// Threadgroup (tile of keys, KV head, batch) of a launch.
template <int D, int G, int MASK, typename T, typename Keys, typename Mask, typename Lse>
inline void prompt_mass(
    Prompt<T, Keys, Mask> prompt,
    Lse lse,             // [B, H * G, L]
    device float* mass,  // [B, slots], head after head
    threadgroup float* query_chunk, threadgroup float* key_chunk, uint3 at, int thread_index) {
  const int first_key = int(at.x) * TILE, length = prompt.work.length;
  if (first_key >= length) {
    return;
  }
  lse += (int64_t(at.z) * prompt.launch.kv_heads + prompt.work.head) * prompt.rows;
  mass += int64_t(at.z) * prompt.launch.slots + prompt.work.prefix;
  float sums[SQUARE] = {0.0f};
  for (int first_row = 0; first_row < prompt.rows; first_row += TILE) {
    if (all_hidden<MASK>(prompt, first_row, first_key)) {
      continue;
    }
    float logits[SQUARE * SQUARE];
    logit_tile<D, MASK>(prompt, first_row, first_key, query_chunk, key_chunk, thread_index, logits);
    UNROLL
    for (int r = 0; r < SQUARE; r++) {
      const int row = first_row + row_of_square(thread_index, r);
      const float of_row = row < prompt.rows ? float(lse[row]) : -INFINITY;
      UNROLL
      for (int k = 0; k < SQUARE; k++) {
        const float logit = logits[r * SQUARE + k];
        const bool seen = logit != -INFINITY && of_row != -INFINITY;
        sums[k] += seen ? fast::exp(logit - of_row) : 0.0f;
      }
    }
  }
  // Added up in one order, so that the same prompt always gives the same masses.
  threadgroup float* const partial = query_chunk;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int k = 0; k < SQUARE; k++) {
    partial[thread_index / SIDE * TILE + key_of_square(thread_index, k)] = sums[k];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < TILE && first_key + thread_index < length) {
    float sum = 0.0f;
    for (int i = 0; i < SIDE; i++) {
      sum += partial[i * TILE + thread_index];
    }
    mass[first_key + thread_index] = sum / float(G);
  }
}

}  // namespace h2o

//! buffers
//! in params
//! in factors
//! in queries
//! in keys
//! in key_scales optional float strided
//! in key_biases optional float strided
//! in mask optional bool strided
//! in lse
//! out mass
//! body

  THREADGROUP_ARRAY(float, query_chunk, TILE * PADDED_CHUNK);
  THREADGROUP_ARRAY(float, key_chunk, TILE * PADDED_CHUNK);
  h2o::prompt_mass<D, G, MASK>(
      h2o::prompt_of<G>(
          params, ROWS_OF(queries, queries_strides),
          h2o::stored_rows(
              h2o::Packing<K_BITS, K_GROUP>(), ROWS_OF(keys, keys_strides),
              ROWS_OF(key_scales, key_scales_strides), ROWS_OF(key_biases, key_biases_strides)),
          ROWS_OF(mask, mask_strides), factors[0], threadgroup_position_in_grid),
      lse, mass, query_chunk, key_chunk, threadgroup_position_in_grid,
      int(thread_index_in_threadgroup));
)metal"},
{"quantize.h", R"metal(// Rows that are written as they are stored. A simdgroup holds a row by columns: lane j has elements
// j, j + 32, ..., so that 32 lanes have a whole group's elements, or a part of one.

#include "packed_rows.h"

namespace h2o {

// Writes a row; `columns` become what a reader will find.
template <int W, typename T>
inline void store_columns(Rows<device T*> row, int lane, thread float* columns) {
  UNROLL
  for (int i = 0; i < W; i++) {
    row.data[32 * i + lane] = T(columns[i]);
  }
}

// Packs it by each group's least and greatest element (python/mlx_h2o/slots/packed.py), bit for bit: the
// levels count from scale and bias as they are stored, rounded to the row's dtype. A group of equal
// elements has scale 0 and levels 0; one with an infinity or a NaN is read as NaNs.
template <int W, int BITS, int GROUP, typename T>
inline void store_columns(
    PackedRows<BITS, GROUP, device uint*, device T*> row, int lane, thread float* columns) {
  constexpr int COLUMNS = GROUP / 32;
  const float top = float((1 << BITS) - 1);
  UNROLL
  for (int first = 0; first < W; first += COLUMNS) {
    float low = INFINITY, high = -INFINITY;
    bool broken = false;
    UNROLL
    for (int i = first; i < first + COLUMNS; i++) {
      low = min(low, columns[i]);
      high = max(high, columns[i]);
      broken = broken || isnan(columns[i]);
    }
    low = simd_min(low);
    high = simd_max(high);
    if (simd_any(broken)) {
      low = high = INFINITY - INFINITY;
    }
    const T scale_stored = T((high - low) / top), bias_stored = T(low);
    const float scale = float(scale_stored), bias = float(bias_stored);
    if (lane == 0) {
      row.scales.data[first / COLUMNS] = scale_stored;
      row.biases.data[first / COLUMNS] = bias_stored;
    }
    UNROLL
    for (int i = first; i < first + COLUMNS; i++) {
      const float nearest = scale > 0.0f ? rint((columns[i] - bias) / scale) : 0.0f;
      const float level = nearest > 0.0f ? min(nearest, top) : 0.0f;
      columns[i] = level * scale + bias;
      // Levels share no bit, so their sum is their union.
      uint word = 0;
      UNROLL
      for (int w = 0; w < BITS; w++) {
        const int shift = lane * BITS - 32 * w;
        const uint part = shift >= 32 || shift <= -BITS ? 0
            : shift >= 0                               ? uint(level) << shift
                                                       : uint(level) >> -shift;
        const uint whole = simd_sum(part);
        word = lane == w ? whole : word;
      }
      if (lane < BITS) {
        row.words.data[BITS * i + lane] = word;
      }
    }
  }
}

}  // namespace h2o
)metal"},
{"query_rows.h", R"metal(// The query rows of a KV head: row i is query i % QUERIES of query head i / QUERIES of its group.
// QUERIES is at least the number of queries; rows without a query or a head are dead.

#include "online_softmax.h"
#include "rows.h"

namespace h2o {

struct QueryRow {
  int head, query;
  bool live;
};

template <int G, int QUERIES>
inline QueryRow query_row(int index, int queries) {
  const int head = index / QUERIES, query = index % QUERIES;
  return {head, query, head < G && query < queries};
}

// The ROWS rows that a simdgroup works for: its lanes' shares of queries and sums. Queries stay
// narrow, without attention's scale, since so they take half the registers.
template <typename T, int W, int WV, int ROWS>
struct QueryRows {
  int first;
  T queries[ROWS][W];
  OnlineSoftmax<WV> sums[ROWS];
};

// Loads a block's rows. They pass through threadgroup memory, so that simdgroups that share rows
// read them from the device once; dead rows are zero.
template <int G, int QUERIES, int BLOCK_ROWS, int SCRATCH, typename T, int W, int WV, int ROWS>
inline void load_queries(
    Rows<const device T*> queries,
    int count,
    int block_first,
    threadgroup float* scratch,
    int thread_index,
    int threads,
    thread QueryRows<T, W, WV, ROWS>& rows) {
  constexpr int D = 32 * W;
  constexpr int AT_ONCE = SCRATCH / D;
  const int first = rows.first - block_first;
  for (int done = 0; done < BLOCK_ROWS; done += AT_ONCE) {
    const int here = min(AT_ONCE, BLOCK_ROWS - done);
    for (int e = thread_index; e < here * D; e += threads) {
      const QueryRow row = query_row<G, QUERIES>(block_first + done + e / D, count);
      const Rows<const device T*> query = from(queries, 0, row.head, row.query);
      scratch[e] = row.live ? float(query.data[e % D * query.column]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const int staged = first + r - done;
      if (staged >= 0 && staged < here) {
        load_share<W>(dense_rows(scratch, D), staged, thread_index % 32, rows.queries[r]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Brings loaded rows into the frame of the keys that they meet (python/mlx_h2o/slots/key_scaling.py): q' = q
// scale, rounded to the queries' type. What they meet later, the remainder too, lies in it.
template <int D, typename T, int W, int WV, int ROWS>
inline void enter_frame(
    const device float* scale,  // [D], of the KV head
    threadgroup float* scratch,
    int thread_index,
    int threads,
    thread QueryRows<T, W, WV, ROWS>& rows) {
  float share[W];
  copy_rows<D>(dense_rows(scale, D), 1, dense_rows(scratch, D), thread_index, threads);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  load_share<W>(dense_rows(scratch, D), 0, thread_index % 32, share);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    UNROLL
    for (int i = 0; i < W; i++) {
      rows.queries[r][i] = T(float(rows.queries[r][i]) * share[i]);
    }
  }
}

}  // namespace h2o
)metal"},
{"remainder.h", R"metal(// The column with which the evicted tokens answer (python/mlx_h2o/slots/remainder.py has the formula).

#include "rows.h"

namespace h2o {

// The statistics of all KV heads [B, Hk], [B, Hk, D] twice and [B, Hk, DV].
template <typename Counts>
struct Remainder {
  Counts counts;
  const device float* mean_keys;
  const device float* var_keys;
  const device float* mean_values;
};

template <typename Counts>
inline Remainder<Counts> remainder_of(
    Counts counts,
    const device float* mean_keys,
    const device float* var_keys,
    const device float* mean_values) {
  return {counts, mean_keys, var_keys, mean_values};
}

// Keep the second-order term finite whatever the queries and keys.
#define LARGEST_QUERY 1e15f
#define LARGEST_TERM 1e30f

// Its logit for a query; minus infinity while nothing was evicted. The second-order term x turns from
// x to sqrt(saturation x); a head whose saturation is 0 does without it.
template <int W, typename T>
inline float remainder_logit(
    const thread T* query,
    float scale,
    float count,
    const thread float* mean_key,
    const thread float* var_key,
    float saturation) {
  const float mean = scale * simd_sum(dot<W>(query, mean_key));
  float x = 0.0f;
  UNROLL
  for (int i = 0; i < W; i++) {
    const float q = clamp(scale * float(query[i]), -LARGEST_QUERY, LARGEST_QUERY);
    x += q * q * 0.5f * var_key[i];
  }
  x = min(simd_sum(x), LARGEST_TERM);
  const float term = saturation > 0.0f ? x * rsqrt(1.0f + x / saturation) : 0.0f;
  const float logit = log(count) + mean + term;
  return count > 0.0f ? logit : -INFINITY;
}

}  // namespace h2o
)metal"},
{"rows.h", R"metal(// Rows of arrays. A simdgroup holds a row, each lane a share of W neighbouring elements.

namespace h2o {

// A four-dimensional array (or a part of one) and its strides in elements.
template <typename Elements>
struct Rows {
  Elements data;
  int64_t batch, head, row, column;
};

#define ROWS_OF(data, strides) h2o::rows_of(data, strides[0], strides[1], strides[2], strides[3])

template <typename Elements>
inline Rows<Elements> rows_of(Elements data, int64_t b, int64_t h, int64_t r, int64_t c) {
  return {data, b, h, r, c};
}

// Contiguous rows of a width.
template <typename Elements>
inline Rows<Elements> dense_rows(Elements data, int width) {
  return {data, 0, 0, width, 1};
}

template <typename Elements>
inline void move(thread Rows<Elements>& rows, int batch, int head, int row) {
  rows.data += batch * rows.batch + head * rows.head + row * rows.row;
}

// The same array from another element on.
template <typename Elements>
inline Rows<Elements> from(Rows<Elements> rows, int batch, int head, int row) {
  move(rows, batch, head, row);
  return rows;
}

// Of a row, the columns from `first` on.
template <typename Elements>
inline Rows<Elements> columns_from(Rows<Elements> rows, int first) {
  rows.data += first * rows.column;
  return rows;
}

// This lane's share of a row. Rows are almost always contiguous, and then loads are wide.
template <int W, typename Elements, typename Share>
inline void load_share(Rows<Elements> rows, int row, int lane, thread Share* share) {
  const Elements at = rows.data + row * rows.row + lane * W * rows.column;
  if (rows.column == 1) {
    UNROLL
    for (int i = 0; i < W; i++) {
      share[i] = Share(at[i]);
    }
  } else {
    for (int i = 0; i < W; i++) {
      share[i] = Share(at[i * rows.column]);
    }
  }
}

// Copies `count` rows of D elements to threadgroup memory, all threads together.
template <int D, typename Elements, typename T>
inline void copy_rows(
    Rows<Elements> rows, int count, Rows<threadgroup T*> to, int thread_index, int threads) {
  for (int e = thread_index; e < count * D; e += threads) {
    to.data[e] = rows.data[e / D * rows.row + e % D * rows.column];
  }
}

template <int W, typename A>
inline float dot(const thread A* a, const thread float* b) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < W; i++) {
    sum += float(a[i]) * b[i];
  }
  return sum;
}

template <int W>
inline float square_distance(const thread float* a, const thread float* b) {
  float sum = 0.0f;
  UNROLL
  for (int i = 0; i < W; i++) {
    const float apart = a[i] - b[i];
    sum += apart * apart;
  }
  return sum;
}

}  // namespace h2o
)metal"},
{"simdgroup_merge.h", R"metal(// The end of attention in a threadgroup: merges the sums of simdgroups with the same rows and
// different keys, and writes the result.

#include "attention_step.h"

namespace h2o {

// Brings the sums of each row to one scale, so that adding them up over simdgroups gives the
// output; writes the lse.
template <int G, int QUERIES, int ROW_GROUPS, int SIMDS, int EXPORT, typename T, int W,
          int WV, int ROWS>
inline void rescale(
    thread QueryRows<T, W, WV, ROWS>& rows,
    int queries,
    int simd,
    int lane,
    threadgroup float* tops,
    threadgroup float* totals,
    device float* lse) {
  constexpr int SPLITS = SIMDS / ROW_GROUPS;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const float sum = simd_sum(rows.sums[r].sum);
    if (lane == 0) {
      tops[simd * ROWS + r] = rows.sums[r].top;
      totals[simd * ROWS + r] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Lane j reads what the j-th simdgroup with these rows has.
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int theirs = (lane * ROW_GROUPS + simd % ROW_GROUPS) * ROWS + r;
    const float top_there = lane < SPLITS ? tops[theirs] : LOWEST_LOGIT;
    const float top = simd_max(top_there);
    const float sum_there = lane < SPLITS ? totals[theirs] : 0.0f;
    const float total = simd_sum(sum_there * fast::exp(top_there - top));
    if (EXPORT != EXPORT_NOTHING) {
      const QueryRow row = query_row<G, QUERIES>(rows.first + r, queries);
      if (row.live && simd < ROW_GROUPS && lane == 0) {
        lse[row.head * queries + row.query] = total == 0.0f ? -INFINITY : top + log(total);
      }
    }
    const float share = total == 0.0f ? 0.0f : fast::exp(rows.sums[r].top - top) / total;
    UNROLL
    for (int i = 0; i < WV; i++) {
      rows.sums[r].values[i] *= share;
    }
  }
}

// Adds up the sums, some elements of every lane's shares at a time through threadgroup memory.
template <int G, int QUERIES, int ROW_GROUPS, int SIMDS, int SCRATCH, typename T, int W,
          int WV, int ROWS, typename Out>
inline void write_output(
    thread QueryRows<T, W, WV, ROWS>& rows,
    int block_first,
    int queries,
    int simd,
    int lane,
    threadgroup float* scratch,
    device Out* out) {
  constexpr int SPLITS = SIMDS / ROW_GROUPS;
  constexpr int PADDED = 33;  // so that lanes of one simdgroup read different banks
  constexpr int AT_ONCE = SCRATCH / (SIMDS * PADDED);
  UNROLL
  for (int done = 0; done < ROWS * WV; done += AT_ONCE) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL
    for (int p = 0; p < AT_ONCE && done + p < ROWS * WV; p++) {
      const int element = done + p;
      scratch[(p * SIMDS + simd) * PADDED + lane] = rows.sums[element / WV].values[element % WV];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int here = min(AT_ONCE, ROWS * WV - done);
    for (int e = simd; e < here * ROW_GROUPS * 32; e += SIMDS) {
      const int p = e / (ROW_GROUPS * 32), group = e / 32 % ROW_GROUPS, share = e % 32;
      const int theirs = (p * SIMDS + lane * ROW_GROUPS + group) * PADDED + share;
      const float value = simd_sum(lane < SPLITS ? scratch[theirs] : 0.0f);
      const int r = (done + p) / WV, i = (done + p) % WV;
      const QueryRow row = query_row<G, QUERIES>(block_first + group * ROWS + r, queries);
      if (row.live && lane == 0) {
        out[int64_t(row.head * queries + row.query) * 32 * WV + share * WV + i] = Out(value);
      }
    }
  }
}

}  // namespace h2o
)metal"},
{"threadgroup_reduce.h", R"metal(// Reductions over a threadgroup of SIMDS simdgroups, whose result every lane gets. Each begins with
// a barrier, so that scratch memory can be used again and again.

namespace h2o {

template <int SIMDS>
inline float sum_of_threadgroup(float x, threadgroup float* scratch, int simd, int lane) {
  x = simd_sum(x);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    scratch[simd] = x;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < SIMDS ? scratch[lane] : 0.0f);
}

// A slot with its rank. The lowest rank goes first, ties to the oldest position; positions differ,
// so the order is strict.
struct Candidate {
  float rank;
  int position, slot;
};

#define LARGEST_INT 0x7fffffff
#define LARGEST_FLOAT 3.40282347e38f

inline bool before(Candidate a, Candidate b) {
  return a.rank < b.rank || (a.rank == b.rank && a.position < b.position);
}

inline Candidate first_of_simdgroup(Candidate own) {
  const float rank = simd_min(own.rank);
  const int position = simd_min(own.rank == rank ? own.position : LARGEST_INT);
  const bool found = own.rank == rank && own.position == position;
  return {rank, position, simd_min(found ? own.slot : LARGEST_INT)};
}

template <int SIMDS>
inline Candidate first_of_threadgroup(
    Candidate own, threadgroup float* ranks, threadgroup int* places, int simd, int lane) {
  own = first_of_simdgroup(own);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    ranks[simd] = own.rank;
    places[2 * simd] = own.position;
    places[2 * simd + 1] = own.slot;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Candidate theirs = {INFINITY, LARGEST_INT, LARGEST_INT};
  if (lane < SIMDS) {
    theirs = {ranks[lane], places[2 * lane], places[2 * lane + 1]};
  }
  return first_of_simdgroup(theirs);
}

}  // namespace h2o
)metal"},
{"update.metal", R"metal(// After attention: scores, priorities and the next victims, in one launch.
//
// A threadgroup chooses for HEADS KV heads together: one, or all of a layer when their mean
// priority decides (unit="layer"). Its lanes share out the slots and keep theirs from pass to pass:
// the first accumulates and measures the terms' mean and deviation, the others rank, one per
// victim, so that no priority is ever stored.

#include "priority.h"
#include "threadgroup_reduce.h"

namespace h2o {

// Of a KV head, in threadgroup memory: mean and weight of each term, then the least distance.
#define LEAST_DISTANCE (2 * TERMS)
#define STANDARDS (LEAST_DISTANCE + 1)

// A layer's slots, all heads' in one buffer.
template <int RANGES, int LEVELS, typename Positions, typename Scales>
struct LayerSlots {
  const device int* plan;
  const device float* logits;
  const device float* distances;
  Positions positions;
  device float* scores;
  const device float* norms;
  const device half* value_lengths;
  Scales value_scales;
  DecodeStep step;
  int batch, queries;  // which of the batch; query heads of a KV head
};

// Of one head, but for its least distance.
template <int RANGES, int LEVELS, typename Positions, typename Scales>
inline HeadSlots<RANGES, LEVELS, Positions, Scales> head_slots_of(
    LayerSlots<RANGES, LEVELS, Positions, Scales> layer, int head) {
  const HeadPlan line = head_plan_of(layer.plan, head);
  const int64_t first = int64_t(layer.batch) * layer.step.buffer_slots + line.start;
  const int64_t attended = int64_t(layer.batch) * layer.step.attended_slots + line.prefix;
  return {
      layer.logits + attended * layer.queries,
      layer.distances + attended,
      layer.positions + first,
      layer.scores + first,
      layer.norms + first,
      layer.value_lengths + first,
      layer.value_scales + first * RANGES,
      line.length,
      layer.step.offset,
      layer.step.aged_from,
      layer.step.sink,
      layer.step.offset - line.recent,
      0.0f};
}

// Running mean and sum of squares around it (Welford).
struct Moments {
  float count, mean, squares;
};

inline void add(thread Moments& moments, float x) {
  const float step = x - moments.mean;
  moments.count += 1.0f;
  moments.mean += step / moments.count;
  moments.squares += step * (x - moments.mean);
}

// base.standardised over all lanes' slots, times a weight.
template <int SIMDS>
inline void standardise(
    Moments own, float weight, threadgroup float* standard, threadgroup float* scratch, int simd,
    int lane) {
  const float total = sum_of_threadgroup<SIMDS>(own.count, scratch, simd, lane);
  const float share = 1.0f / max(total, 1.0f);
  const float mean = sum_of_threadgroup<SIMDS>(own.count * own.mean, scratch, simd, lane) * share;
  const float apart = own.mean - mean;
  const float squares =
      sum_of_threadgroup<SIMDS>(own.squares + own.count * apart * apart, scratch, simd, lane);
  if (simd == 0 && lane == 0) {
    standard[0] = mean;
    standard[1] = weight / (sqrt(squares * share) + 1e-6f);
  }
}

template <int D, int SIMDS>
inline float square_norm(const device float* x, threadgroup float* scratch, int simd, int lane) {
  float sum = 0.0f;
  for (int d = simd * 32 + lane; d < D; d += 32 * SIMDS) {
    sum += x[d] * x[d];
  }
  return sum_of_threadgroup<SIMDS>(sum, scratch, simd, lane);
}

// Threadgroup (0, KV head or 0, batch) of a launch.
template <
    int D, int G, int SCORE, int PRIORITY, bool AGE, bool VALUES, int RANGES, int LEVELS, int HEADS,
    int SIMDS, typename Weights, typename Victims, typename Written, typename Lse,
    typename Positions, typename Scales>
inline void update(
    const device int* plan,
    Weights weights,                   // decay; of the terms: distance, mass, value, age
    Victims victims,                   // [B, H, evict_every]
    const device float* logits,        // [B, attended slots * G]: head after head [G, length]
    Lse lse,                           // [B, H * G, 1]
    const device float* distances,     // [B, attended slots], from ...
    const device float* means,         // ... [B, H, D]; or what else ranks the slots
    Positions positions,               // [B, S]
    device float* scores,              // [B, S]
    const device float* norms,         // [B, S]
    const device half* value_lengths,  // [B, S] of dense values
    Scales value_scales,               // [B, S, RANGES] of packed ones
    Written slots,                     // [B, H]: those just written, counted in their heads
    device int* victims_out,           // [B, H, evict_every]
    threadgroup float* standards, threadgroup float* scratch, threadgroup int* places, uint3 at,
    int thread_index) {
  constexpr int THREADS = 32 * SIMDS;
  constexpr bool RANKS_TERMS = PRIORITY == BY_DISTANCE || PRIORITY == BY_SALIENCE;
  const int simd = thread_index / 32, lane = thread_index % 32;
  const DecodeStep step = decode_step_of(plan);
  const int first_head = int(at.y);
  const float decay = weights[0];
  const int64_t heads_before = int64_t(at.z) * step.kv_heads;
  const HeadPlan lead = head_plan_of(plan, first_head);

  const LayerSlots<RANGES, LEVELS, Positions, Scales> layer = {
      plan,  logits,        distances,    positions, scores,
      norms, value_lengths, value_scales, step,      int(at.z),
      G};

  for (int h = 0; h < HEADS; h++) {
    const HeadPlan line = head_plan_of(plan, first_head + h);
    const int64_t kv_head = heads_before + first_head + h;
    auto head = head_slots_of(layer, first_head + h);
    const int fresh = slots[kv_head];
    float lses[G];
    UNROLL
    for (int g = 0; g < G; g++) {
      lses[g] = lse[kv_head * G + g];
    }
    threadgroup float* standard = standards + h * STANDARDS;
    if (RANKS_TERMS) {
      // A key at the mean itself must not stretch the scale for all others (terms.py).
      const float square = square_norm<D, SIMDS>(means + kv_head * D, scratch, simd, lane);
      head.least_distance = 1e-6f * square + 1e-12f;
      if (thread_index == 0) {
        standard[LEAST_DISTANCE] = head.least_distance;
      }
    }

    Moments moments[TERMS] = {};
    for (int n = thread_index; n < line.length; n += THREADS) {
      if (SCORE != SCORE_NONE) {
        const float held = n == fresh ? 0.0f : head.scores[n];
        head.scores[n] = accumulated<SCORE, G>(held, head, n, lses, decay);
      }
      if (RANKS_TERMS && line.choose && may_go(head, head.positions[n])) {
        float terms[TERMS];
        terms_of<PRIORITY, SCORE != SCORE_NONE, VALUES>(head, n, head.positions[n], terms);
        UNROLL
        for (int i = 0; i < TERMS; i++) {
          if (has_term<PRIORITY>(i)) {
            add(moments[i], terms[i]);
          }
        }
      }
    }
    if (RANKS_TERMS && line.choose) {
      UNROLL
      for (int i = 0; i < TERMS; i++) {
        if (has_term<PRIORITY>(i)) {
          standardise<SIMDS>(
              moments[i], weights[1 + i], standard + 2 * i, scratch, simd, lane);
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // An array of the heads' slots would lie in memory: the others' are made anew where they are read.
  auto first = head_slots_of(layer, first_head);
  if (RANKS_TERMS) {
    first.least_distance = standards[LEAST_DISTANCE];
  }

  // selection.select_victims: each pass finds the first slot after the last one.
  Candidate last = {-INFINITY, -1, 0};
  for (int e = 0; e < step.evict_every; e++) {
    if (lead.choose) {
      Candidate own = {INFINITY, LARGEST_INT, LARGEST_INT};
      for (int n = thread_index; n < lead.length; n += THREADS) {
        const int position = first.positions[n];
        if (!may_go(first, position)) {
          continue;
        }
        float worth = 0.0f;
        for (int h = 0; h < HEADS; h++) {
          threadgroup float* standard = standards + h * STANDARDS;
          auto head = first;
          if (h > 0) {
            head = head_slots_of(layer, first_head + h);
            if (RANKS_TERMS) {
              head.least_distance = standard[LEAST_DISTANCE];
            }
          }
          worth += priority_of<SCORE, PRIORITY, AGE, VALUES>(head, n, position, standard);
        }
        worth = HEADS > 1 ? worth / float(HEADS) : worth;
        // A NaN goes first; whatever may go is finite, and so before what may not.
        const float rank = isnan(worth) ? -INFINITY : min(worth, LARGEST_FLOAT);
        const Candidate candidate = {rank, position, n};
        own = before(last, candidate) && before(candidate, own) ? candidate : own;
      }
      last = first_of_threadgroup<SIMDS>(own, scratch, places, simd, lane);
    }
    for (int h = thread_index; h < HEADS; h += THREADS) {
      const int64_t written = (heads_before + first_head + h) * step.evict_every + e;
      victims_out[written] = lead.choose ? last.slot : int(victims[written]);
    }
  }
}

}  // namespace h2o

//! buffers
//! in plan
//! in weights
//! in victims
//! in logits optional float
//! in lse
//! in distances optional float
//! in means optional float
//! in positions
//! in scores optional float
//! in norms optional float
//! in value_lengths optional half
//! in value_scales optional half
//! in slots
//! out victims_out
//! body

  THREADGROUP_ARRAY(float, standards, HEADS * STANDARDS);
  THREADGROUP_ARRAY(float, scratch, SIMDS);
  THREADGROUP_ARRAY(int, places, 2 * SIMDS);
  h2o::update<D, G, SCORE, PRIORITY, AGE, VALUES, RANGES, LEVELS, HEADS, SIMDS>(
      plan, weights, victims, logits, lse, distances, means, positions,
      IN_PLACE(float, scores), norms, value_lengths, value_scales, slots, victims_out, standards,
      scratch, places, threadgroup_position_in_grid, int(thread_index_in_threadgroup));
)metal"},
{"work.h", R"metal(// What a threadgroup works on: some slots of one KV head, as the launch's table says.
//
// A head owns `length` slots of a buffer. Equal heads are a dimension of it ([B, Hk, N, D]); heads
// of different lengths share one ([B, S, D] read as [B, 1, S, D]: memory_head is 0, and start says
// where the head begins). What is written per slot lies head after head without gaps, so `prefix`
// counts the slots of the heads before this one; for equal heads that is [B, Hk, N] again.

namespace h2o {

// The launch's integers: a few of the whole launch, then a table with a line per item of work.
struct Launch {
  int queries, slots, mask_columns, kv_heads, items;
};

struct Work {
  int head, memory_head, start, length, prefix;
  int offset, count;  // this threadgroup's part of the head: slots offset to offset + count - 1
};

#define LAUNCH_INTS 8
#define WORK_INTS 8

inline Launch launch_of(const device int* params) {
  return {params[0], params[1], params[2], params[3], params[4]};
}

inline Work work_of(const device int* params, int item) {
  const device int* line = params + LAUNCH_INTS + item * WORK_INTS;
  return {line[0], line[1], line[2], line[3], line[4], line[5], line[6]};
}

// The items of a head are its blocks in order; after the table stands where each head's begin.
struct BlockRange {
  int first, count;
};

inline BlockRange block_range(const device int* params, int head) {
  const device int* firsts = params + LAUNCH_INTS + launch_of(params).items * WORK_INTS;
  return {firsts[head], firsts[head + 1] - firsts[head]};
}

}  // namespace h2o
)metal"},
  };
  const auto found = files.find(name);
  return found == files.end() ? nullptr : found->second;
}

}  // namespace mlx_h2o
