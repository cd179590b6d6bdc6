// One row quantized as mx.quantize does it (affine), bit for bit.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

// Scales and biases are rounded to the row's dtype after the values were quantized with them
// unrounded, as in MLX (mlx/backend/cpu/quantized.cpp).
inline void quantize(const float* row, int width, const PackedRow& out) {
  const float bins = float((1 << out.bits) - 1);
  const float least = 1e-7f;
  uint8_t* bytes = static_cast<uint8_t*>(out.data);
  uint64_t pending = 0;
  int held = 0;
  for (int first = 0, g = 0; first < width; first += out.group_size, ++g) {
    float low = __builtin_inff(), high = -__builtin_inff();
    for (int d = first; d < first + out.group_size; ++d) {
      high = high < row[d] ? row[d] : high;
      low = row[d] < low ? row[d] : low;
    }
    const bool from_low = __builtin_fabsf(low) > __builtin_fabsf(high);
    float scale = (high - low) / bins;
    scale = scale < least ? least : scale;
    scale = from_low ? scale : -scale;
    const float edge = from_low ? low : high;
    const float steps = __builtin_rintf(edge / scale);
    float bias = 0;
    if (steps != 0) {
      scale = edge / steps;
      bias = edge;
    }
    for (int d = first; d < first + out.group_size; ++d) {
      float level = __builtin_rintf((row[d] - bias) / scale);
      level = level > 0 ? level : 0;
      level = bins < level ? bins : level;
      pending |= uint64_t(level) << held;
      for (held += out.bits; held >= 8; held -= 8, pending >>= 8) *bytes++ = uint8_t(pending);
    }
    float* parts[] = {&scale, &bias};
    void* homes[] = {out.scales, out.biases};
    for (int i = 0; i < 2; ++i) {
      narrow(static_cast<char*>(homes[i]) + g * size_of(out.dtype), out.dtype, parts[i], 1, 1);
    }
  }
}

}  // namespace mlx_h2o::MLX_H2O_ISA
