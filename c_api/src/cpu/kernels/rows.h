// How rows of keys and values are read: dense in any dtype, or packed in the format of mx.quantize.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

// Each kind of rows offers
//   group(j, g)      what is the same for a whole group g of row j's elements
//   at(j, d, group)  W elements from d on
//   raw(j, d)        the same without scale and bias
//   summed(j, d, x)  kStep vectors of them, as sums take them (of packed rows, see kPaired)
//   some(j, d, n)    n < W elements, zeros behind them
//   only(j)          every row is row j
template <class T>
struct DenseRows {
  static constexpr bool kPacked = false;
  static constexpr bool kStarts = false;
  static constexpr int kStep = 1;
  static constexpr bool kNarrow = sizeof(T) < 4;
  struct Group {
    float scale = 1;
  };

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
  void summed(int j, int d, vf* x) const {
    *x = raw(j, d);
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

// The first BYTES bytes as a number, in whole loads: pieces put together in memory would be waited
// for.
template <int BYTES>
inline uint64_t number(const uint8_t* p) {
  constexpr int first = BYTES >= 8 ? 8 : BYTES >= 4 ? 4 : BYTES >= 2 ? 2 : 1;
  uint64_t low;
  if constexpr (first == 8) low = load_as<uint64_t>(p);
  if constexpr (first == 4) low = load_as<uint32_t>(p);
  if constexpr (first == 2) low = load_as<uint16_t>(p);
  if constexpr (first == 1) low = *p;
  if constexpr (first < BYTES) low |= number<BYTES - first>(p + first) << (8 * first);
  return low;
}

// The bits of `lanes` values of BITS bits each, from the value d of a row on.
template <int BITS, int lanes>
inline uint64_t window(const uint8_t* row, int d) {
  // Four values of 3 or 5 bits may begin in the middle of a byte; the same number of bytes holds
  // them either way.
  const int bit = d * BITS;
  const uint64_t bits = number<(lanes * BITS + 7) / 8>(row + bit / 8);
  return lanes * BITS % 8 ? bits >> (bit % 8) : bits;
}

// W values of BITS bits each, from the value d (a multiple of W) of a row on. A row is a stream of
// bits, lowest first: that is what mx.quantize's words of 2, 4 and 8 bits and its bytes of 3, 5 and
// 6 bits come to.
template <int BITS>
inline vf unpacked(const uint8_t* row, int d) {
#if defined(__AVX512F__) && MLX_H2O_LANES == 16
  if constexpr (BITS == 8)
    return __builtin_convertvector((vi)_mm512_cvtepu8_epi32(load_as<__m128i>(row + d)), vf);
#elif defined(__AVX2__) && MLX_H2O_LANES == 8
  if constexpr (BITS == 8)
    return __builtin_convertvector(
        (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + d))), vf);
  if constexpr (BITS == 4) {
    // (One load that fills all lanes; gcc 12 goes through a general register otherwise.)
    const vu word =
        (vu)_mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(row + d / 2)));
    return __builtin_convertvector((vi)((word >> vu{0, 4, 8, 12, 16, 20, 24, 28}) & 15), vf);
  }
#endif
  // Several lanes share a 32-bit window: as many as it holds, eight or four.
  constexpr int shared = W >= 8 && 8 * BITS <= 32 ? 8 : 4;
  constexpr int loaded = W >= 8 ? 8 : 4;
  vi lanes;
  UNROLL
  for (int i = 0; i < W; ++i) lanes[i] = i;
  vu windows{};
  UNROLL
  for (int first = 0; first < W; first += loaded) {
    const uint64_t bits = window<BITS, loaded>(row, d + first);
    UNROLL
    for (int part = 0; part < loaded; part += shared) {
      const vu four = uint32_t(bits >> (part * BITS)) - vu{};
      windows = first + part == 0 ? four : (vu)(lanes >= first + part ? four : windows);
    }
  }
  const vu shifts = (vu)((lanes & (shared - 1)) * BITS);
  return __builtin_convertvector((vi)((windows >> shifts) & ((1u << BITS) - 1)), vf);
}

// Whether sums take these rows by pairs of vectors: of 2 W elements first the even ones, then the
// odd ones, since both are in the same bytes. The queries are put into that order first
// (pair_queries), and the sums of values back in order at the end (unpair_values).
template <int BITS>
constexpr bool kPaired = false;
#if defined(__AVX2__) && MLX_H2O_LANES == 8
template <>
constexpr bool kPaired<4> = true;
#endif

template <int BITS>
inline void unpacked_for_sums(const uint8_t* row, unsigned d, vf* x) {
  if constexpr (kPaired<BITS>) {
    vi bytes{};
#if defined(__AVX2__) && MLX_H2O_LANES == 8
    bytes =
        (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + d / 2)));
#endif
    x[0] = __builtin_convertvector(bytes & 15, vf);
    x[1] = __builtin_convertvector((vi)((vu)bytes >> 4), vf);
  } else {
    *x = unpacked<BITS>(row, d);
  }
}

inline void pair_queries(const float* q, int D, float* out) {
  for (int d = 0; d < D; d += 2 * W)
    for (int i = 0; i < W; ++i) {
      out[d + i] = q[d + 2 * i];
      out[d + W + i] = q[d + 2 * i + 1];
    }
}

inline void unpair_values(float* acc, int D) {
  for (int d = 0; d < D; d += 2 * W) {
    const vf even = load(acc + d), odd = load(acc + d + W);
    for (int i = 0; i < W; ++i) {
      acc[d + 2 * i] = even[i];
      acc[d + 2 * i + 1] = odd[i];
    }
  }
}

template <int BITS>
struct PackedRows {
  static constexpr bool kPacked = true;
  static constexpr bool kNarrow = true;
  static constexpr int kStep = kPaired<BITS> ? 2 : 1;
  struct Group {
    vf scale, bias;
  };

  const uint8_t* data;
  int64_t stride;       // bytes
  const float* scales;  // [groups, kTile]
  const float* biases;
  int group_size;  // elements, a multiple of W

  Group group(int j, int g) const {
    return {splat(scales[g * kTile + j]), splat(biases[g * kTile + j])};
  }
  int group_end(int g, int) const {
    return (g + 1) * group_size;
  }
  vf raw(int j, int d) const {
    return unpacked<BITS>(data + j * stride, d);
  }
  void summed(int j, int d, vf* x) const {
    unpacked_for_sums<BITS>(data + j * stride, d, x);
  }
  vf at(int j, int d, const Group& g) const {
    return raw(j, d) * g.scale + g.bias;
  }
  vf some(int, int, int) const {
    return vf{};  // widths are multiples of the group size
  }
  PackedRows only(int j) const {
    return {data + j * stride, 0, scales + j, biases + j, group_size};
  }
};

// Packed rows whose scales and biases are taken care of elsewhere.
template <int BITS>
struct PackedRaw {
  static constexpr bool kStarts = true;
  static constexpr int kStep = kPaired<BITS> ? 2 : 1;

  const uint8_t* data;
  int64_t stride;       // bytes
  const float* starts;  // per query row: what its sums begin with

  void summed(int j, int d, vf* x) const {
    unpacked_for_sums<BITS>(data + j * stride, d, x);
  }
  vf some(int, int, int) const {
    return vf{};
  }
};

// Floats that scales and biases of a tile take.
inline int64_t tile_scales(const Rows& rows, int width) {
  return rows.bits ? 2 * kTile * (width / rows.group_size) : 0;
}

// A tile's scales or biases to floats, group by group.
inline void widen_scales(
    const void* from, const Rows& r, int groups, int64_t first, int count, float* to) {
  float rows[kTile * kMostGroups];
  const auto row = [&](int64_t j) {
    return static_cast<const char*>(from) + (first + j) * r.scale_stride * size_of(r.dtype);
  };
  if (r.scale_stride == groups)
    widen(rows, row(0), r.dtype, 1, count * groups);
  else
    for (int j = 0; j < count; ++j) widen(rows + j * groups, row(j), r.dtype, 1, groups);
  // A constant number of groups is shuffled in registers.
  const auto part = [&](int n) {
    for (int g = 0; g < n; ++g)
      for (int j = 0; j < count; ++j) to[g * kTile + j] = rows[j * n + g];
  };
  switch (groups) {
    case 1: return part(1);
    case 2: return part(2);
    case 4: return part(4);
    default: return part(groups);
  }
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
    widen_scales(r.scales, r, groups, first, count, room);
    widen_scales(r.biases, r, groups, first, count, biases);
    return {
        static_cast<const uint8_t*>(r.data) + first * r.stride * 4, r.stride * 4, room, biases,
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
