// How rows of keys and values are read: dense in any dtype, or packed as mx.quantize packs them.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

// Each kind of rows offers
//   group(j, g)      what is the same for a whole group g of row j's elements
//   at(j, d, group)  W elements from d on
//   raw(j, d)        the same without scale and bias
//   some(j, d, n)    n < W elements, zeros behind them
//   only(j)          every row is row j
template <class T>
struct DenseRows {
  static constexpr bool kPacked = false;
  static constexpr bool kNarrow = sizeof(T) < 4;
  struct Group {};

  const T* data;
  int64_t stride;

  Group group(int, int) const {
    return {};
  }
  int group_end(int, int D) const {
    return D;
  }
  vf raw(int j, int d) const {
    return load(data + j * stride + d);
  }
  vf at(int j, int d, Group) const {
    return raw(j, d);
  }
  vf some(int j, int d, int count) const {
    return load_partial(data + j * stride + d, count);
  }
  DenseRows only(int j) const {
    return {data + j * stride, 0};
  }
};

// W values of BITS bits each, from the bit d * BITS of a row on. A row is a stream of bits, lowest
// first (that is what words of 2, 4 and 8 bits and bytes of 3, 5 and 6 bits come to), and d is a
// multiple of W.
template <int BITS>
inline vf unpacked(const uint8_t* row, int d) {
  const vi lanes = [] {
    vi x;
    UNROLL
    for (int i = 0; i < W; ++i) x[i] = i;
    return x;
  }();
#if defined(__AVX2__) && MLX_H2O_LANES == 8
  if constexpr (BITS == 8) {
    uint64_t word;
    __builtin_memcpy(&word, row + d, 8);
    return __builtin_convertvector(
        (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)word)), vf);
  }
#endif
  // Four neighbours at most lie in one 32-bit window: up to 32 bits, or 24 and half a byte.
  vu windows;
  UNROLL
  for (int part = 0; part < W / 4; ++part) {
    const int bit = (d + 4 * part) * BITS;
    uint64_t window = 0;
    __builtin_memcpy(&window, row + bit / 8, (bit % 8 + 4 * BITS + 7) / 8);
    const uint32_t four = uint32_t(window >> (bit % 8));
    UNROLL
    for (int i = 0; i < 4; ++i) windows[4 * part + i] = four;
  }
  const vu values = (windows >> (vu)((lanes & 3) * BITS)) & ((1u << BITS) - 1);
  return __builtin_convertvector((vi)values, vf);
}

template <int BITS>
struct PackedRows {
  static constexpr bool kPacked = true;
  static constexpr bool kNarrow = true;
  struct Group {
    vf scale, bias;
  };

  const uint8_t* data;
  int64_t stride;  // bytes
  const float* scales;
  const float* biases;
  int groups;      // a row
  int group_size;  // elements, a multiple of W

  Group group(int j, int g) const {
    return {splat(scales[j * groups + g]), splat(biases[j * groups + g])};
  }
  int group_end(int g, int) const {
    return (g + 1) * group_size;
  }
  vf raw(int j, int d) const {
    return unpacked<BITS>(data + j * stride, d);
  }
  vf at(int j, int d, const Group& g) const {
    return raw(j, d) * g.scale + g.bias;
  }
  vf some(int, int, int) const {
    return vf{};  // widths are multiples of the group size
  }
  PackedRows only(int j) const {
    return {data + j * stride, 0, scales + j * groups, biases + j * groups, 0, group_size};
  }
};

// Packed rows whose scales and biases are taken care of elsewhere.
template <int BITS>
struct PackedRaw {
  const PackedRows<BITS>& rows;

  vf raw(int j, int d) const {
    return rows.raw(j, d);
  }
  vf some(int, int, int) const {
    return vf{};
  }
};

// Floats that scales and biases of a tile take.
inline int64_t tile_scales(const Rows& rows, int width) {
  return rows.bits ? 2 * kTile * (width / rows.group_size) : 0;
}

// Rows `first` to `first + count - 1`, as their kind. `room` holds a tile's scales and biases.
template <class R>
struct Opened;

template <class T>
struct Opened<DenseRows<T>> {
  static DenseRows<T> rows(const Rows& r, int, int64_t first, int, float*) {
    return {static_cast<const T*>(r.data) + first * r.stride, r.stride};
  }
};

template <int BITS>
struct Opened<PackedRows<BITS>> {
  static PackedRows<BITS> rows(const Rows& r, int width, int64_t first, int count, float* room) {
    const int groups = width / r.group_size;
    float* biases = room + int64_t(kTile) * groups;
    for (int j = 0; j < count; ++j) {
      const int64_t at = (first + j) * r.scale_stride * size_of(r.dtype);
      widen(room + j * groups, static_cast<const char*>(r.scales) + at, r.dtype, 1, groups);
      widen(biases + j * groups, static_cast<const char*>(r.biases) + at, r.dtype, 1, groups);
    }
    return {
        static_cast<const uint8_t*>(r.data) + first * r.stride * 4,
        r.stride * 4,
        room,
        biases,
        groups,
        r.group_size};
  }
};

// Calls f with a value of the type that reads these rows.
template <class F>
auto with_kind(const Rows& r, F f) {
  switch (r.bits) {
    case 2: return f(Opened<PackedRows<2>>{});
    case 3: return f(Opened<PackedRows<3>>{});
    case 4: return f(Opened<PackedRows<4>>{});
    case 5: return f(Opened<PackedRows<5>>{});
    case 6: return f(Opened<PackedRows<6>>{});
    case 8: return f(Opened<PackedRows<8>>{});
  }
  switch (r.dtype) {
    case Dtype::float16: return f(Opened<DenseRows<float16>>{});
    case Dtype::bfloat16: return f(Opened<DenseRows<bfloat16>>{});
    default: return f(Opened<DenseRows<float>>{});
  }
}

}  // namespace mlx_h2o::MLX_H2O_ISA
