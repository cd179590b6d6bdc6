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
