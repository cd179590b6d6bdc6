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

template <class T>
inline void store_some(T* p, vf v, int count) {
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

template <class T>
inline void narrow_row(T* out, const float* row, float factor, int n) {
  each_vector(
      n, [&](int i, int count) { store_some(out + i, load_some(row + i, count) * factor, count); });
}

// To the nearest, ties to even.
inline void narrow(void* out, Dtype dtype, const float* row, float factor, int n) {
  switch (dtype) {
    case Dtype::float32: return narrow_row(static_cast<float*>(out), row, factor, n);
    case Dtype::float16: return narrow_row(static_cast<float16*>(out), row, factor, n);
    case Dtype::bfloat16: return narrow_row(static_cast<bfloat16*>(out), row, factor, n);
  }
}

}  // namespace mlx_h2o::MLX_H2O_ISA
