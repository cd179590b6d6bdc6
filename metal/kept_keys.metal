// What a policy asks of the kept keys themselves: their mean, while too few were evicted to have
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
