// Rows to floats and back, vector by vector.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

// Calls f(n, count) for every vector of n elements; all but the last are whole.
template <class F>
inline void each_vector(int n_elements, F f) {
  int n = 0;
  for (; n + W <= n_elements; n += W) f(n, W);
  if (n < n_elements) f(n, n_elements - n);
}

template <class T>
inline vf load_some(const T* p, int count) {
  return count == W ? load(p) : load_partial(p, count);
}

inline void store_some(float* p, vf v, int count) {
  count == W ? store(p, v) : store_partial(p, v, count);
}

template <class T>
inline void widen_row(float* out, const T* row, float factor, int n) {
  each_vector(
      n, [&](int i, int count) { store_some(out + i, load_some(row + i, count) * factor, count); });
}

inline void widen(float* out, const void* row, Dtype dtype, float factor, int n) {
  switch (dtype) {
    case Dtype::float32: return widen_row(out, static_cast<const float*>(row), factor, n);
    case Dtype::float16: return widen_row(out, static_cast<const float16*>(row), factor, n);
    case Dtype::bfloat16: return widen_row(out, static_cast<const bfloat16*>(row), factor, n);
  }
}

// To the nearest, ties to even.
inline uint16_t narrowed_to_bfloat16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t narrowed_to_float16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t size = bits & 0x7fffffff;
  if (size > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (size >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65536 or beyond
  if (size < 0x38800000) {  // subnormal: adding 1/2 leaves the rounded mantissa in the last bits
    float magnitude;
    __builtin_memcpy(&magnitude, &size, 4);
    magnitude += 0.5f;
    uint32_t rounded;
    __builtin_memcpy(&rounded, &magnitude, 4);
    return uint16_t(sign | (rounded - 0x3f000000));
  }
  const uint32_t rounded = size + 0xfff + ((size >> 13) & 1) - 0x38000000;
  return uint16_t(sign | (rounded >> 13));
}

inline void narrow(void* out, Dtype dtype, const float* row, float factor, int n) {
  if (dtype == Dtype::float32) return widen_row(static_cast<float*>(out), row, factor, n);
  auto* half = static_cast<uint16_t*>(out);
  for (int i = 0; i < n; ++i) {
    const float x = row[i] * factor;
    half[i] = dtype == Dtype::float16 ? narrowed_to_float16(x) : narrowed_to_bfloat16(x);
  }
}

}  // namespace mlx_h2o::MLX_H2O_ISA
