// Attention over a block of slots, tile by tile: logits, mask, online softmax, weighted values.
#pragma once

#include "kernels.h"
#include "rows.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

// Query rows that one register tile holds.
constexpr int kRegisterRows = 4;

// Rows that will be read soon. They are asked for a few at a time between sums: a burst of requests
// would fill the queue of outstanding misses, and the sums would wait behind it.
struct Ahead {
  const char* rows;
  int64_t stride;  // bytes
  int width;       // bytes
  int count;

  [[gnu::always_inline]] void ask(int first, int more) const {
    for (int j = first; j < first + more && j < count; ++j)
      for (int at = 0; at < width; at += 64) __builtin_prefetch(rows + j * stride + at);
  }
};

inline Ahead ahead_of(const Rows& rows, int width, int64_t first, int count) {
  const int size = rows.bits || rows.dtype == Dtype::float32 ? 4 : 2;
  const int64_t stride = rows.stride * size;
  return {
      static_cast<const char*>(rows.data) + first * stride, stride,
      rows.bits ? width * rows.bits / 8 : width * size, count};
}

// -- logits ---------------------------------------------------------------------------------------

// What K keys have, for the accumulators i to i + 3 of which number n is key n % K's.
template <int K>
inline vf4 of_keys(const float* x, int i) {
  if constexpr (K % 4 == 0) return load_as<vf4>(x + i % K);
  static_assert(K == 2 || K % 4 == 0);
  typedef double vd2 __attribute__((vector_size(16)));
  return (vf4)(load_as<double>(x) - vd2{});
}

// s[r][j] = the sum of acc[r * K + j]; R * K is a multiple of 4.
template <int R, int K>
[[gnu::always_inline]] inline void store_sums(const vf (&acc)[R * K], float* s, int64_t s_stride) {
  float total[R * K];
  UNROLL
  for (int i = 0; i < R * K; i += 4) {
    const vf4 four = sums(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
    __builtin_memcpy(total + i, &four, sizeof(four));
  }
  UNROLL
  for (int r = 0; r < R; ++r) __builtin_memcpy(s + r * s_stride, total + r * K, K * sizeof(float));
}

// Dot products of R query rows with K keys from row j on, s[r][k]; R * K is a multiple of 4. Of
// packed keys, without their biases.
template <int R, int K, class Keys>
[[gnu::always_inline]] inline void dots(
    const float* q, int64_t q_stride, const Keys& keys, int j, int D, float* s, int64_t s_stride) {
  float total[R * K] = {};
  for (int g = 0, d = 0; d < D; ++g) {
    vf acc[R * K] = {};
    const int end = keys.group_end(g, D);
    for (; d + Keys::kStep * W <= end; d += Keys::kStep * W) {
      vf kd[K][Keys::kStep];
      UNROLL
      for (int i = 0; i < K; ++i) keys.summed(j + i, d, kd[i]);
      UNROLL
      for (int t = 0; t < Keys::kStep; ++t) UNROLL
      for (int r = 0; r < R; ++r) {
        const vf qd = in_register(load(q + r * q_stride + d + t * W));
        UNROLL
        for (int i = 0; i < K; ++i) {
          acc[r * K + i] += qd * kd[i][t];
          // (gcc 12 would spill some of them.)
          if (Keys::kStep > 1) acc[r * K + i] = in_register(acc[r * K + i]);
        }
      }
    }
    if (d < end) {
      UNROLL
      for (int i = 0; i < K; ++i) {
        const vf kd = keys.some(j + i, d, end - d);
        UNROLL
        for (int r = 0; r < R; ++r) acc[r * K + i] += load(q + r * q_stride + d) * kd;
      }
      d = end;
    }
    UNROLL
    for (int i = 0; i < R * K; i += 4) {
      vf4 four = sums(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
      if constexpr (Keys::kPacked)
        four = load_as<vf4>(total + i) + four * of_keys<K>(keys.scales + g * kTile + j, i);
      __builtin_memcpy(total + i, &four, sizeof(four));
    }
  }
  UNROLL
  for (int r = 0; r < R; ++r) __builtin_memcpy(s + r * s_stride, total + r * K, K * sizeof(float));
}

#if MLX_H2O_BF16_DOT
// The same of bfloat16 queries and keys as they came.
template <int R, int K>
[[gnu::always_inline]] inline void dots(
    const uint16_t* q, int64_t q_stride, const DenseRows<bfloat16>& keys, int j, int D, float* s,
    int64_t s_stride) {
  vf acc[R * K] = {};
  for (int d = 0; d < D; d += 2 * W) {
    const bool whole = d + 2 * W <= D;
    const auto pairs = [&](const void* p) {
      vpairs x{};
      if (whole)
        __builtin_memcpy(&x, p, sizeof(x));
      else
        __builtin_memcpy(&x, p, (D - d) * 2);
      return x;
    };
    vpairs kd[K];
    UNROLL
    for (int i = 0; i < K; ++i) kd[i] = pairs(keys.data + (j + i) * keys.stride + d);
    UNROLL
    for (int r = 0; r < R; ++r) {
      const vpairs qd = pairs(q + r * q_stride + d);
      UNROLL
      for (int i = 0; i < K; ++i) acc[r * K + i] = add_products(acc[r * K + i], qd, kd[i]);
    }
  }
  store_sums<R, K>(acc, s, s_stride);
}
#endif

// The sums of each group of each query row, [rows, groups].
inline void sum_groups(const AttentionBlock& b, int group_size, float* sums_of_q) {
  const int groups = b.D / group_size;
  for (int r = 0; r < b.rows; ++r)
    for (int g = 0; g < groups; ++g) {
      vf total{};
      const float* q = b.q + r * b.q_stride + g * group_size;
      for (int i = 0; i < group_size; i += W) total += load(q + i);
      sums_of_q[r * groups + g] = sum(total);
    }
}

// What the biases of packed keys add: sum_g bias_jg sum_(d in g) q_d.
template <class Keys>
inline void add_biases(
    const AttentionBlock& b, const Keys& keys, int count, float* s, int64_t s_stride,
    const float* sums_of_q) {
  if constexpr (Keys::kPacked) {
    const int groups = b.D / keys.group_size;
    for (int r = 0; r < b.rows; ++r, s += s_stride, sums_of_q += groups)
      each_vector(count, [&](int j, int some) {
        vf total = load_some(s + j, some);
        for (int g = 0; g < groups; ++g)
          total += sums_of_q[g] * load_some(keys.biases + g * kTile + j, some);
        store_some(s + j, total, some);
      });
  }
}

template <int R, int K, class Q, class Keys>
void logits_of_rows(
    const Q* q, int64_t q_stride, const Keys& keys, int count, int D, float* s, int64_t s_stride,
    const Ahead& ahead) {
  int j = 0;
  for (; j + K <= count; j += K) {
    ahead.ask(j, K);
    dots<R, K>(q, q_stride, keys, j, D, s + j, s_stride);
  }
  // One by one: the same key fills the register tile, and one sum of each four is used.
  for (; j < count; ++j) {
    for (int r = 0; r < R; ++r) {
      float same[4];
      dots<1, 4>(q + r * q_stride, q_stride, keys.only(j), 0, D, same, 4);
      s[r * s_stride + j] = same[0];
    }
  }
}

template <class Q, class Keys>
void logits_of_keys(
    const AttentionBlock& b, const Q* queries, const Keys& keys, int count, float* s,
    int64_t s_stride, Ahead ahead) {
  for (int r = 0; r < b.rows; r += kRegisterRows) {
    const Q* q = queries + r * b.q_stride;
    float* out = s + r * s_stride;
    switch (b.rows - r) {
      default: logits_of_rows<4, 2>(q, b.q_stride, keys, count, b.D, out, s_stride, ahead); break;
      case 3: logits_of_rows<3, 4>(q, b.q_stride, keys, count, b.D, out, s_stride, ahead); break;
      case 2: logits_of_rows<2, 4>(q, b.q_stride, keys, count, b.D, out, s_stride, ahead); break;
      case 1: logits_of_rows<1, 8>(q, b.q_stride, keys, count, b.D, out, s_stride, ahead); break;
    }
    ahead.count = 0;  // once is enough
  }
}

// Rows that are not float32 are widened into scratch first when more query rows than one register
// tile holds will read them.
template <class R>
DenseRows<float> widened(const R& rows, int width, int count, float* to) {
  const int64_t stride = padded(width);
  for (int j = 0; j < count; ++j) {
    float* row = to + j * stride;
    int d = 0;
    for (int g = 0; d + W <= width; ++g) {
      const auto group = rows.group(j, g);
      for (const int end = rows.group_end(g, width); d + W <= end; d += W)
        store(row + d, rows.at(j, d, group));
    }
    if (d < width) store_partial(row + d, rows.some(j, d, width - d), width - d);
  }
  return {to, stride};
}

// Whether this block's logits are products of bfloat16 pairs.
template <class Keys>
constexpr bool kDotsPairs = false;
#if MLX_H2O_BF16_DOT
template <>
constexpr bool kDotsPairs<DenseRows<bfloat16>> = true;
#endif

template <class Keys>
void logits_of_tile(
    const AttentionBlock& b, const Keys& keys, int count, float* s, int64_t s_stride,
    const Ahead& ahead, float* wide, const float* sums_of_q) {
  if constexpr (kDotsPairs<Keys>) {
    if (b.q16) {
      logits_of_keys(b, b.q16, keys, count, s, s_stride, ahead);
      for (int r = 0; r < b.rows; ++r)
        for (int j = 0; j < count; ++j) s[r * s_stride + j] *= b.scale;
      return;
    }
  }
  if (Keys::kNarrow && b.rows > kRegisterRows) {
    logits_of_keys(b, b.q, widened(keys, b.D, count, wide), count, s, s_stride, ahead);
  } else {
    logits_of_keys(b, b.q, keys, count, s, s_stride, ahead);
    add_biases(b, keys, count, s, s_stride, sums_of_q);
  }
}

// ||k - center||^2 of four keys from row j on.
template <class Keys>
inline void distances(const float* center, const Keys& keys, int j, int D, float (&out)[4]) {
  vf acc[4] = {};
  int d = 0;
  for (int g = 0; d + W <= D; ++g) {
    typename Keys::Group group[4];
    UNROLL
    for (int i = 0; i < 4; ++i) group[i] = keys.group(j + i, g);
    for (const int end = keys.group_end(g, D); d + W <= end; d += W) {
      const vf c = load(center + d);
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const vf x = keys.at(j + i, d, group[i]) - c;
        acc[i] += x * x;
      }
    }
  }
  if (d < D) {
    const vf c = load_partial(center + d, D - d);
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const vf x = keys.some(j + i, d, D - d) - c;
      acc[i] += x * x;
    }
  }
  const vf4 four = sums(acc[0], acc[1], acc[2], acc[3]);
  __builtin_memcpy(out, &four, sizeof(four));
}

// Of each key, while the tile lies in the nearest cache.
template <class Keys>
void distances_of_tile(const AttentionBlock& b, const Keys& keys, int count, float* out) {
  float four[4];
  int j = 0;
  for (; j + 4 <= count; j += 4) {
    distances(b.center, keys, j, b.D, four);
    __builtin_memcpy(out + j, four, sizeof(four));
  }
  for (; j < count; ++j) {
    distances(b.center, keys.only(j), 0, b.D, four);
    out[j] = four[0];
  }
}

// -- mask -----------------------------------------------------------------------------------------

// Models write the lowest number of their dtype for "masked".
inline float lowest(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16: return -65504.0f;
    case Dtype::bfloat16: return -0x1.fep127f;
    default: return -0x1.fffffep127f;
  }
}

template <class T>
inline void add_mask(float* s, const T* mask, int64_t stride, int keys, float least) {
  for (int j = 0; j < keys; ++j) {
    const float added = widen(mask[j * stride]);
    s[j] = added <= least ? -__builtin_inff() : s[j] + added;
  }
}

inline void tile_mask(const AttentionBlock& b, int first, int keys, float* s, int64_t s_stride) {
  for (int r = 0; r < b.rows; ++r, s += s_stride) {
    const RowMask& mask = b.row_masks[r];
    const int64_t start = first * b.mask_stride;
    if (b.mask == MaskKind::causal) {
      for (int j = mask.visible > first ? mask.visible - first : 0; j < keys; ++j)
        s[j] = -__builtin_inff();
    } else if (b.mask == MaskKind::boolean) {
      const bool* row = static_cast<const bool*>(mask.data) + start;
      for (int j = 0; j < keys; ++j)
        if (!row[j * b.mask_stride]) s[j] = -__builtin_inff();
    } else {
      const float least = lowest(b.mask_dtype);
      switch (b.mask_dtype) {
        case Dtype::float32:
          add_mask(s, static_cast<const float*>(mask.data) + start, b.mask_stride, keys, least);
          break;
        case Dtype::float16:
          add_mask(s, static_cast<const float16*>(mask.data) + start, b.mask_stride, keys, least);
          break;
        case Dtype::bfloat16:
          add_mask(s, static_cast<const bfloat16*>(mask.data) + start, b.mask_stride, keys, least);
          break;
      }
    }
  }
}

// -- online softmax -------------------------------------------------------------------------------

// Weights p = e^(s - m) of one row's tile, m brought up to date; returns what older sums shrink by.
inline float tile_softmax(const float* s, float* p, int keys, float& m, float& l) {
  vf top = splat(-__builtin_inff());
  int j = 0;
  for (; j + W <= keys; j += W) top = max(top, load(s + j));
  float newest = largest(top);
  for (; j < keys; ++j) newest = s[j] > newest || s[j] != s[j] ? s[j] : newest;
  const float before = m;
  if (newest > m || newest != newest) m = newest;
  // A row that has seen nothing yet keeps weights of zero.
  const float reference = m == -__builtin_inff() ? 0 : m;
  vf total{};
  for (j = 0; j + W <= keys; j += W) {
    const vf e = exp(load(s + j) - reference);
    store(p + j, e);
    total += e;
  }
  if (j < keys) {
    const int left = keys - j;
    vf e = exp(load_partial(s + j, left) - reference);
    for (int i = left; i < W; ++i) e[i] = 0;
    store_partial(p + j, e, left);
    total += e;
  }
  const float shrink = before == m ? 1 : exp(before - reference);
  l = l * shrink + sum(total);
  return shrink;
}

// -- values ---------------------------------------------------------------------------------------

// acc[r] += sum_j p[r][j] v[j] over R rows and VB vectors of the value's width from d on; of packed
// values, without their scales and biases.
template <int R, int VB, class Values>
[[gnu::always_inline]] inline void add_values(
    const float* p, int64_t p_stride, const Values& values, int d, int count, float* acc,
    int64_t acc_stride) {
  vf sum[R * VB];
  UNROLL
  for (int r = 0; r < R; ++r) UNROLL
  for (int i = 0; i < VB; ++i) {
    sum[r * VB + i] = load(acc + r * acc_stride + d + i * W);
    if constexpr (Values::kStarts) sum[r * VB + i] += values.starts[r];
  }
  for (int j = 0; j < count; ++j) {
    vf row[VB];
    UNROLL
    for (int i = 0; i < VB; i += Values::kStep) values.summed(j, d + i * W, row + i);
    UNROLL
    for (int r = 0; r < R; ++r) {
      const vf weight = in_register(splat(p[r * p_stride + j]));
      UNROLL
      for (int i = 0; i < VB; ++i) sum[r * VB + i] += weight * row[i];
    }
  }
  UNROLL
  for (int r = 0; r < R; ++r) UNROLL
  for (int i = 0; i < VB; ++i) store(acc + r * acc_stride + d + i * W, sum[r * VB + i]);
}

// Elements `from` to `end - 1` of the values' width.
template <int R, int VB, class Values>
void values_of_rows(
    const float* p, int64_t p_stride, const Values& values, int count, int from, int end,
    float* acc, int64_t acc_stride, const Ahead& ahead) {
  const int share = ahead.count * VB * W / (end - from) + 1;
  int d = from;
  for (; d + VB * W <= end; d += VB * W) {
    ahead.ask((d - from) / (VB * W) * share, share);
    add_values<R, VB>(p, p_stride, values, d, count, acc, acc_stride);
  }
  constexpr int step = Values::kStep;
  for (; d + step * W <= end; d += step * W)
    add_values<R, step>(p, p_stride, values, d, count, acc, acc_stride);
  if (d == end) return;
  for (int j = 0; j < count; ++j) {
    const vf row = values.some(j, d, end - d);
    for (int r = 0; r < R; ++r) {
      float* out = acc + r * acc_stride + d;
      store(out, load(out) + p[r * p_stride + j] * row);
    }
  }
}

// A group's scale goes into the weights, and its bias is the same for all of its elements:
// sum_j p_j (scale_j x_j + bias_j) = sum_j (p_j scale_j) x_j + sum_j p_j bias_j.
template <int R, int VB, int BITS>
void values_of_rows(
    const float* p, int64_t p_stride, const PackedRows<BITS>& values, int count, int from, int end,
    float* acc, int64_t acc_stride, const Ahead& ahead) {
  const int groups = (end - from) / values.group_size;
  const int share = ahead.count / groups + 1;
  for (int d = from, g = 0; d < end; d += values.group_size, ++g) {
    const float* scales = values.scales + g * kTile;
    const float* biases = values.biases + g * kTile;
    float weights[R * kTile], starts[kRegisterRows];
    vf total[kRegisterRows] = {};
    for (int r = 0; r < R; ++r)
      each_vector(count, [&](int j, int some) {
        const vf weight = load_some(p + r * p_stride + j, some);
        store_some(weights + r * kTile + j, weight * load_some(scales + j, some), some);
        total[r] += weight * load_some(biases + j, some);
      });
    const vf4 four = sums(total[0], total[1], total[2], total[3]);
    __builtin_memcpy(starts, &four, sizeof(four));
    Ahead part = ahead;
    part.rows += g * share * ahead.stride;
    part.count = ahead.count - g * share < share ? ahead.count - g * share : share;
    values_of_rows<R, VB, PackedRaw<BITS>>(
        weights, kTile, {values.data, values.stride, starts}, count, d, d + values.group_size, acc,
        acc_stride, part);
  }
}

template <class Values>
void values_of_keys(
    const AttentionBlock& b, const Values& values, int count, const float* p, int64_t p_stride,
    Ahead ahead) {
  for (int r = 0; r < b.rows; r += kRegisterRows) {
    const float* weights = p + r * p_stride;
    float* acc = b.acc + r * b.acc_stride;
    switch (b.rows - r) {
      default:
        values_of_rows<4, 2>(weights, p_stride, values, count, 0, b.Dv, acc, b.acc_stride, ahead);
        break;
      case 3:
        values_of_rows<3, 2>(weights, p_stride, values, count, 0, b.Dv, acc, b.acc_stride, ahead);
        break;
      case 2:
        values_of_rows<2, 4>(weights, p_stride, values, count, 0, b.Dv, acc, b.acc_stride, ahead);
        break;
      case 1:
        values_of_rows<1, 8>(weights, p_stride, values, count, 0, b.Dv, acc, b.acc_stride, ahead);
        break;
    }
    ahead.count = 0;
  }
}

template <class Values>
void values_of_tile(
    const AttentionBlock& b, const Values& values, int count, const float* p, int64_t p_stride,
    const Ahead& ahead, float* wide) {
  if (Values::kNarrow && b.rows > kRegisterRows)
    values_of_keys(b, widened(values, b.Dv, count, wide), count, p, p_stride, ahead);
  else
    values_of_keys(b, values, count, p, p_stride, ahead);
}

// -- the block ------------------------------------------------------------------------------------

// What the loop below asks of keys and of values, whatever they are stored as.
using LogitsOfTile = void (*)(
    const AttentionBlock&, int64_t first, int count, float* s, int64_t s_stride, const Ahead&,
    float* wide, float* scales, const float* sums_of_q);
using ValuesOfTile = void (*)(
    const AttentionBlock&, int64_t first, int count, const float* p, int64_t p_stride, const Ahead&,
    float* wide, float* scales);

inline LogitsOfTile logits_of(const Rows& k) {
  return with_kind(k, [](auto kind) -> LogitsOfTile {
    return [](const AttentionBlock& b, int64_t first, int count, float* s, int64_t s_stride,
              const Ahead& ahead, float* wide, float* scales, const float* sums_of_q) {
      const auto keys = decltype(kind)::rows(b.k, b.D, first, count, scales);
      if (keys.kPacked && b.distance) {  // unpacked once for both
        const auto unpacked = widened(keys, b.D, count, wide);
        logits_of_keys(b, b.q, unpacked, count, s, s_stride, ahead);
        return distances_of_tile(b, unpacked, count, b.distance + first);
      }
      logits_of_tile(b, keys, count, s, s_stride, ahead, wide, sums_of_q);
      if (b.distance) distances_of_tile(b, keys, count, b.distance + first);
    };
  });
}

inline ValuesOfTile values_of(const Rows& v) {
  return with_kind(v, [](auto kind) -> ValuesOfTile {
    return [](const AttentionBlock& b, int64_t first, int count, const float* p, int64_t p_stride,
              const Ahead& ahead, float* wide, float* scales) {
      const auto values = decltype(kind)::rows(b.v, b.Dv, first, count, scales);
      values_of_tile(b, values, count, p, p_stride, ahead, wide);
    };
  });
}

// Rows of four bits that are summed up by pairs, because they are not widened first.
inline bool pairs(const AttentionBlock& b, const Rows& rows, bool widened_first) {
  return kPaired<4> && rows.bits == 4 && b.rows <= kRegisterRows && !widened_first;
}

inline void attend(const AttentionBlock& given) {
  AttentionBlock b = given;
  const LogitsOfTile tile_logits = logits_of(b.k);
  const ValuesOfTile tile_values = values_of(b.v);
  float* tile_s = b.scratch;
  float* tile_p = tile_s + kMaxRows * kTile;
  float* wide_k = tile_p + kMaxRows * kTile;
  float* wide_v = wide_k + kTile * padded(b.D);
  float* k_scales = wide_v + kTile * padded(b.Dv);
  float* v_scales = k_scales + tile_scales(b.k, b.D);
  float* sums_of_q = v_scales + tile_scales(b.v, b.Dv);
  if (b.k.bits) sum_groups(b, b.k.group_size, sums_of_q);
  if (pairs(b, b.k, b.distance)) {
    float* paired = sums_of_q + kMaxRows * (b.D / kSmallestGroup);
    for (int r = 0; r < b.rows; ++r) pair_queries(b.q + r * b.q_stride, b.D, paired + r * b.D);
    b.q = paired;
    b.q_stride = b.D;
  }
  for (int r = 0; r < b.rows; ++r) {
    b.m[r] = -__builtin_inff();
    b.l[r] = 0;
    __builtin_memset(b.acc + r * b.acc_stride, 0, b.acc_stride * sizeof(float));
  }
  for (int first = 0, tile = 0; first < b.slots; first += kTile, ++tile) {
    const int count = b.slots - first < kTile ? b.slots - first : kTile;
    const int left = b.slots - first - count;
    float* s = b.logits ? b.logits + first : tile_s;
    const int64_t s_stride = b.logits ? b.logits_stride : kTile;
    float* p = b.weights ? b.weights + first : tile_p;
    const int64_t p_stride = b.weights ? b.weights_stride : kTile;

    // The tile's values are fetched while its logits are computed, the next keys while its values
    // are added up.
    const Ahead values = ahead_of(b.v, b.Dv, first, count);
    const Ahead next_keys = ahead_of(b.k, b.D, first + count, left < kTile ? left : kTile);
    tile_logits(b, first, count, s, s_stride, values, wide_k, k_scales, sums_of_q);
    if (b.mask != MaskKind::none) tile_mask(b, first, count, s, s_stride);
    for (int r = 0; r < b.rows; ++r) {
      const float shrink = tile_softmax(s + r * s_stride, p + r * p_stride, count, b.m[r], b.l[r]);
      if (b.weights) b.tile_max[tile * b.rows + r] = b.m[r];
      if (shrink != 1) {
        float* acc = b.acc + r * b.acc_stride;
        for (int d = 0; d < b.acc_stride; d += W) store(acc + d, load(acc + d) * shrink);
      }
    }
    tile_values(b, first, count, p, p_stride, next_keys, wide_v, v_scales);
  }
  if (pairs(b, b.v, false))
    for (int r = 0; r < b.rows; ++r) unpair_values(b.acc + r * b.acc_stride, b.Dv);
}

}  // namespace mlx_h2o::MLX_H2O_ISA
