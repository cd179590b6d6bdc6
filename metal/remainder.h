// The column with which the evicted tokens answer (python/mlx_h2o/slots/remainder.py has the formula).

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
