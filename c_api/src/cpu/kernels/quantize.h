// One row packed by its groups' ranges: pack_by_range of python/mlx_h2o/slots/packed.py, bit for
// bit.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

struct Range {
  float low, high;
};

// The least and the greatest of a group; NaNs if it has one.
inline Range range_of(const float* group, int size) {
  vf low = load(group), high = low;
  vi unordered = low != low;
  for (int d = W; d < size; d += W) {
    const vf x = load(group + d);
    low = min(x, low);
    high = max(x, high);
    unordered |= x != x;
  }
  Range range{low[0], high[0]};
  bool any = false;
  for (int i = 0; i < W; ++i) {
    range.low = low[i] < range.low ? low[i] : range.low;
    range.high = high[i] > range.high ? high[i] : range.high;
    any |= unordered[i] != 0;
  }
  if (any) range.low = range.high = __builtin_nanf("");
  return range;
}

// Writes a scale or a bias, and returns it as a reader will find it.
inline float stored(void* home, int index, Dtype dtype, float x) {
  void* at = static_cast<char*>(home) + index * size_of(dtype);
  narrow(at, dtype, &x, 1, 1);
  widen(&x, at, dtype, 1, 1);
  return x;
}

// The levels of W elements, in the lowest bits of each lane.
inline vu levels_of(vf x, float scale, float bias, float top) {
  // A NaN is level 0, and what is clipped first rounds to the same as what is clipped after.
  const vf nearest = (x - bias) / scale;
  const vf clipped = min(splat(top), nearest > 0 ? nearest : splat(0));
  // Rounds half to even by pushing the fraction out of the mantissa.
  return (vu)(clipped + 0x1.8p23f) & 0xff;
}

// Writes levels, eight of which fill whole bytes; returns where the next ones go.
template <int BITS>
inline uint8_t* put_levels(uint8_t* bytes, const uint32_t* levels, int count) {
  for (int d = 0; d < count; d += 8, bytes += BITS) {
    uint64_t eight = 0;
    UNROLL
    for (int i = 0; i < 8; ++i) eight |= uint64_t(levels[d + i]) << (i * BITS);
    __builtin_memcpy(bytes, &eight, BITS);
  }
  return bytes;
}

inline uint8_t* put_levels(uint8_t* bytes, int bits, const uint32_t* levels, int count) {
  switch (bits) {
    case 2: return put_levels<2>(bytes, levels, count);
    case 3: return put_levels<3>(bytes, levels, count);
    case 4: return put_levels<4>(bytes, levels, count);
    case 5: return put_levels<5>(bytes, levels, count);
    case 6: return put_levels<6>(bytes, levels, count);
    default: return put_levels<8>(bytes, levels, count);
  }
}

inline void quantize(const float* row, int width, const PackedRow& out) {
  const float top = float((1 << out.bits) - 1);
  auto* bytes = static_cast<uint8_t*>(out.data);
  uint32_t levels[128];  // of the largest group
  for (int first = 0, g = 0; first < width; first += out.group_size, ++g) {
    const Range range = range_of(row + first, out.group_size);
    const float scale = stored(out.scales, g, out.dtype, (range.high - range.low) / top);
    const float bias = stored(out.biases, g, out.dtype, range.low);
    for (int d = 0; d < out.group_size; d += W) {
      const vu some = scale > 0 ? levels_of(load(row + first + d), scale, bias, top) : vu{};
      __builtin_memcpy(levels + d, &some, sizeof(some));
    }
    bytes = put_levels(bytes, out.bits, levels, out.group_size);
  }
}

}  // namespace mlx_h2o::MLX_H2O_ISA
