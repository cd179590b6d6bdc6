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
