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
