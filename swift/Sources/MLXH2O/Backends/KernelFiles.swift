// Written by tools/embed_metal.py from metal/; change that and run the tool.
// swift-format-ignore-file

/// The texts of the GPU kernels, by file name.
let kernelFiles: [String: String] = [
    "attention_merge.metal": ##"""
// The second pass of attention over long caches: merges the results of a head's blocks, one row of
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

//! body

  THREADGROUP_ARRAY(float, scratch, SIMDS * DV);
  h2o::attention_merge<DV, SIMDS>(
      params, partials, partial_lses, out, lse, scratch, threadgroup_position_in_grid,
      threadgroups_per_grid, int(thread_index_in_threadgroup));

"""##,
    "attention_step.h": ##"""
// One step of attention: a few keys and values, for all rows of a simdgroup.
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
// that nobody sees are not read.
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

"""##,
    "attention_vector.metal": ##"""
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
          typename Sinks, typename Counts>
inline void join_other_columns(
    thread QueryRows<T, W, WV, ROWS>& rows,
    Sinks sinks,  // of this KV head's group
    Remainder<Counts> remainder,
    int kv_head,  // counted over the batch
    float scale,
    float saturation,
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
          remainder_logit<W>(rows.queries[r], scale, count, mean_key, var_key, saturation);
      join(rows.sums[r], logit, mean_value, lane);
    }
  }
}

// Threadgroup (0, item, batch and block of rows) of a launch.
template <typename T, int D, int DV, int G, int QUERIES, int ROWS, int ROW_GROUPS, int SIMDS,
          int KEYS, int MASK, bool SINKS, bool REMAINDER, bool DISTANCES, int EXPORT,
          typename Factors, typename Keys, typename Values, typename Mask, typename Sinks,
          typename Counts, typename Out, typename StagedKeys, typename StagedValues>
inline void attention_vector(
    const device int* params,
    Factors factors,  // scale, saturation of the remainder's term
    Rows<const device T*> queries,
    Keys keys,      // dense or packed, each
    Values values,  // of the two
    Rows<Mask> mask,
    Sinks sinks,  // [Hq]
    Remainder<Counts> remainder,
    const device float* means,  // [B, Hk, D], from which distances are measured
    device Out* out,            // [B, items, G, L, DV]
    device float* lse,          // [B, items, G, L]
    device float* logits,       // [B, slots * G * L]: head after head [G, L, length]
    device float* distances,    // [B, slots]
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
        rows, sinks + work.head * G, remainder, kv_head, factors[0], factors[1], lane);
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
      EXPORT>(
      params, factors, ROWS_OF(queries, queries_strides),
      h2o::stored_rows(
          of_keys, ROWS_OF(keys, keys_strides), ROWS_OF(key_scales, key_scales_strides),
          ROWS_OF(key_biases, key_biases_strides)),
      h2o::stored_rows(
          of_values, ROWS_OF(values, values_strides), ROWS_OF(value_scales, value_scales_strides),
          ROWS_OF(value_biases, value_biases_strides)),
      ROWS_OF(mask, mask_strides), sinks,
      h2o::remainder_of(counts, mean_keys, var_keys, mean_values), means, out, lse, logits,
      distances, scratch, tops, totals,
      h2o::stored_rows(
          of_keys, h2o::dense_rows(staged_keys, KEY_ELEMENTS),
          h2o::dense_rows(staged_key_scales, KEY_GROUPS),
          h2o::dense_rows(staged_key_biases, KEY_GROUPS)),
      h2o::stored_rows(
          of_values, h2o::dense_rows(staged_values, VALUE_ELEMENTS),
          h2o::dense_rows(staged_value_scales, VALUE_GROUPS),
          h2o::dense_rows(staged_value_biases, VALUE_GROUPS)),
      threadgroup_position_in_grid, int(thread_index_in_threadgroup));

"""##,
    "masks.h": ##"""
// Masks: none, causal (aligned at the end), or an array of booleans (true is visible) or of numbers
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

"""##,
    "online_softmax.h": ##"""
// A softmax that grows column by column: the largest logit so far, the sum of exponentials relative
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

"""##,
    "packed_rows.h": ##"""
// Rows as mx.quantize packs them (python/mlx_h2o/packed.py): levels of BITS bits each, and a scale
// and a bias for every GROUP of a row's elements. The levels of a row are a stream of bits, lowest
// first, so 32 of them are BITS words. They become numbers in registers.

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

"""##,
    "prelude_metal.h": ##"""
// Metal's prelude: the kernels' dialect is Metal Shading Language, so little is left to say.
// The other preludes define MLX_H2O_PRELUDE first, and then this one says nothing.
#ifndef MLX_H2O_PRELUDE
#define MLX_H2O_PRELUDE

#include <metal_simdgroup>
#include <metal_stdlib>

using namespace metal;

#define THREADGROUP_ARRAY(type, name, size) threadgroup type name[size]
#define UNROLL _Pragma("clang loop unroll(full)")

#endif

"""##,
    "query_rows.h": ##"""
// The query rows of a KV head: row i is query i % QUERIES of query head i / QUERIES of its group.
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

// The ROWS rows that a simdgroup works for: its lanes' shares of queries and sums. Queries stay as
// they came, unscaled, since narrow ones take half the registers.
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

}  // namespace h2o

"""##,
    "remainder.h": ##"""
// The column with which the evicted tokens answer (python/mlx_h2o/remainder.py has the formula).

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

// Its logit for a query; minus infinity while nothing was evicted.
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
  const float logit = log(count) + mean + x * rsqrt(1.0f + x / saturation);
  return count > 0.0f ? logit : -INFINITY;
}

}  // namespace h2o

"""##,
    "rows.h": ##"""
// Rows of arrays. A simdgroup holds a row, each lane a share of W neighbouring elements.

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

"""##,
    "simdgroup_merge.h": ##"""
// The end of attention in a threadgroup: merges the sums of simdgroups with the same rows and
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

"""##,
    "work.h": ##"""
// What a threadgroup works on: some slots of one KV head, as the launch's table says.
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

"""##,
]
