// Keys and queries into a frame (python/mlx_h2o/slots/key_scaling.py), rounded to their dtype as
// they came.
#pragma once

#include "convert.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

// out[i] = of(row[i], i), vector by vector; `of` gets how many lanes count.
template <class T, class F>
inline void each_narrowed(void* out, const void* row, int n, F of) {
  each_vector(n, [&](int i, int count) {
    const vf x = of(load_some(static_cast<const T*>(row) + i, count), i, count);
    store_some(static_cast<T*>(out) + i, x, count);
  });
}

template <class F>
inline void each_narrowed(void* out, const void* row, Dtype dtype, int n, F of) {
  switch (dtype) {
    case Dtype::float32: return each_narrowed<float>(out, row, n, of);
    case Dtype::float16: return each_narrowed<float16>(out, row, n, of);
    case Dtype::bfloat16: return each_narrowed<bfloat16>(out, row, n, of);
  }
}

// Frame.enter
inline void enter_frame(
    void* out, const void* row, Dtype dtype, const float* centre, const float* scale, int n) {
  each_narrowed(out, row, dtype, n, [&](vf x, int i, int count) {
    return (x - load_some(centre + i, count)) / load_some(scale + i, count);
  });
}

// Frame.enter_query
inline void multiply(void* out, const void* row, Dtype dtype, const float* by, int n) {
  each_narrowed(
      out, row, dtype, n, [&](vf x, int i, int count) { return x * load_some(by + i, count); });
}

}  // namespace mlx_h2o::MLX_H2O_ISA
