// Attention over a block of slots, tile by tile: logits, mask, online softmax, weighted values.
#pragma once

#include "kernels.h"
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

template <class T>
inline Ahead ahead_of(const T* rows, int64_t stride, int width, int count) {
  return {
      reinterpret_cast<const char*>(rows), stride * int(sizeof(T)), width * int(sizeof(T)), count};
}

// -- logits ---------------------------------------------------------------------------------------

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

// Dot products of R query rows with K keys, s[r][j]; R * K is a multiple of 4.
template <int R, int K, class T>
[[gnu::always_inline]] inline void dots(
    const float* q, int64_t q_stride, const T* k, int64_t k_stride, int D, float* s,
    int64_t s_stride) {
  vf acc[R * K] = {};
  int d = 0;
  for (; d + W <= D; d += W) {
    vf kd[K];
    UNROLL
    for (int j = 0; j < K; ++j) kd[j] = load(k + j * k_stride + d);
    UNROLL
    for (int r = 0; r < R; ++r) {
      const vf qd = in_register(load(q + r * q_stride + d));
      UNROLL
      for (int j = 0; j < K; ++j) acc[r * K + j] += qd * kd[j];
    }
  }
  if (d < D) {
    UNROLL
    for (int j = 0; j < K; ++j) {
      const vf kd = load_partial(k + j * k_stride + d, D - d);
      UNROLL
      for (int r = 0; r < R; ++r) acc[r * K + j] += load(q + r * q_stride + d) * kd;
    }
  }
  store_sums<R, K>(acc, s, s_stride);
}

#if MLX_H2O_BF16_DOT
// The same of bfloat16 queries and keys as they came.
template <int R, int K>
[[gnu::always_inline]] inline void dots(
    const uint16_t* q, int64_t q_stride, const bfloat16* k, int64_t k_stride, int D, float* s,
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
    for (int j = 0; j < K; ++j) kd[j] = pairs(k + j * k_stride + d);
    UNROLL
    for (int r = 0; r < R; ++r) {
      const vpairs qd = pairs(q + r * q_stride + d);
      UNROLL
      for (int j = 0; j < K; ++j) acc[r * K + j] = add_products(acc[r * K + j], qd, kd[j]);
    }
  }
  store_sums<R, K>(acc, s, s_stride);
}
#endif

template <int R, int K, class Q, class T>
void logits_of_rows(
    const Q* q, int64_t q_stride, const T* k, int64_t k_stride, int D, int keys, float* s,
    int64_t s_stride, const Ahead& ahead) {
  int j = 0;
  for (; j + K <= keys; j += K) {
    ahead.ask(j, K);
    dots<R, K>(q, q_stride, k + j * k_stride, k_stride, D, s + j, s_stride);
  }
  // One by one: the same key fills the register tile, and one sum of each four is used.
  for (; j < keys; ++j) {
    for (int r = 0; r < R; ++r) {
      float same[4];
      dots<1, 4>(q + r * q_stride, q_stride, k + j * k_stride, 0, D, same, 4);
      s[r * s_stride + j] = same[0];
    }
  }
}

template <class Q, class T>
void tile_logits(
    const AttentionBlock& b, const Q* queries, const T* k, int64_t k_stride, int keys, float* s,
    int64_t s_stride, Ahead ahead) {
  for (int r = 0; r < b.rows; r += kRegisterRows) {
    const Q* q = queries + r * b.q_stride;
    float* out = s + r * s_stride;
    switch (b.rows - r) {
      default:
        logits_of_rows<4, 2>(q, b.q_stride, k, k_stride, b.D, keys, out, s_stride, ahead);
        break;
      case 3:
        logits_of_rows<3, 4>(q, b.q_stride, k, k_stride, b.D, keys, out, s_stride, ahead);
        break;
      case 2:
        logits_of_rows<2, 4>(q, b.q_stride, k, k_stride, b.D, keys, out, s_stride, ahead);
        break;
      case 1:
        logits_of_rows<1, 8>(q, b.q_stride, k, k_stride, b.D, keys, out, s_stride, ahead);
        break;
    }
    ahead.count = 0;  // once is enough
  }
}

// Whether this block's logits are products of bfloat16 pairs.
template <class T>
inline bool dots_pairs(const AttentionBlock&) {
  return false;
}

template <class T>
inline void pair_logits(const AttentionBlock&, const T*, int, float*, int64_t, const Ahead&) {}

#if MLX_H2O_BF16_DOT
template <>
inline bool dots_pairs<bfloat16>(const AttentionBlock& b) {
  return b.q16 != nullptr;
}

inline void pair_logits(
    const AttentionBlock& b, const bfloat16* k, int keys, float* s, int64_t s_stride,
    const Ahead& ahead) {
  tile_logits(b, b.q16, k, b.k.stride, keys, s, s_stride, ahead);
  for (int r = 0; r < b.rows; ++r)
    for (int j = 0; j < keys; ++j) s[r * s_stride + j] *= b.scale;
}
#endif

// ||k - center||^2 of each key, while the tile lies in the nearest cache.
template <class T>
void tile_distances(const AttentionBlock& b, const T* k, int64_t k_stride, int keys, float* out) {
  for (int j = 0; j < keys; ++j, k += k_stride) {
    vf acc[2] = {};
    int d = 0;
    for (; d + 2 * W <= b.D; d += 2 * W) {
      const vf x = load(k + d) - load(b.center + d);
      const vf y = load(k + d + W) - load(b.center + d + W);
      acc[0] += x * x;
      acc[1] += y * y;
    }
    for (; d < b.D; d += W) {
      const bool whole = d + W <= b.D;
      const vf x = (whole ? load(k + d) : load_partial(k + d, b.D - d)) -
          (whole ? load(b.center + d) : load_partial(b.center + d, b.D - d));
      acc[0] += x * x;
    }
    out[j] = sum(acc[0] + acc[1]);
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

// acc[r] += sum_j p[r][j] v[j] over R rows and VB vectors of the value's width.
template <int R, int VB, class T>
[[gnu::always_inline]] inline void add_values(
    const float* p, int64_t p_stride, const T* v, int64_t v_stride, int keys, float* acc,
    int64_t acc_stride) {
  vf sum[R * VB];
  UNROLL
  for (int r = 0; r < R; ++r) UNROLL
  for (int i = 0; i < VB; ++i) sum[r * VB + i] = load(acc + r * acc_stride + i * W);
  for (int j = 0; j < keys; ++j) {
    vf row[VB];
    UNROLL
    for (int i = 0; i < VB; ++i) row[i] = load(v + j * v_stride + i * W);
    UNROLL
    for (int r = 0; r < R; ++r) {
      const vf weight = in_register(splat(p[r * p_stride + j]));
      UNROLL
      for (int i = 0; i < VB; ++i) sum[r * VB + i] += weight * row[i];
    }
  }
  UNROLL
  for (int r = 0; r < R; ++r) UNROLL
  for (int i = 0; i < VB; ++i) store(acc + r * acc_stride + i * W, sum[r * VB + i]);
}

template <int R, int VB, class T>
void values_of_rows(
    const float* p, int64_t p_stride, const T* v, int64_t v_stride, int keys, int Dv, float* acc,
    int64_t acc_stride, const Ahead& ahead) {
  const int share = kTile * VB * W / Dv + 1;
  int d = 0;
  for (; d + VB * W <= Dv; d += VB * W) {
    ahead.ask(d / (VB * W) * share, share);
    add_values<R, VB>(p, p_stride, v + d, v_stride, keys, acc + d, acc_stride);
  }
  for (; d + W <= Dv; d += W)
    add_values<R, 1>(p, p_stride, v + d, v_stride, keys, acc + d, acc_stride);
  if (d == Dv) return;
  for (int j = 0; j < keys; ++j) {
    const vf row = load_partial(v + j * v_stride + d, Dv - d);
    for (int r = 0; r < R; ++r) {
      float* out = acc + r * acc_stride + d;
      store(out, load(out) + p[r * p_stride + j] * row);
    }
  }
}

template <class T>
void tile_values(
    const AttentionBlock& b, const T* v, int64_t v_stride, int keys, const float* p,
    int64_t p_stride, Ahead ahead) {
  for (int r = 0; r < b.rows; r += kRegisterRows) {
    const float* weights = p + r * p_stride;
    float* acc = b.acc + r * b.acc_stride;
    switch (b.rows - r) {
      default:
        values_of_rows<4, 2>(weights, p_stride, v, v_stride, keys, b.Dv, acc, b.acc_stride, ahead);
        break;
      case 3:
        values_of_rows<3, 2>(weights, p_stride, v, v_stride, keys, b.Dv, acc, b.acc_stride, ahead);
        break;
      case 2:
        values_of_rows<2, 4>(weights, p_stride, v, v_stride, keys, b.Dv, acc, b.acc_stride, ahead);
        break;
      case 1:
        values_of_rows<1, 8>(weights, p_stride, v, v_stride, keys, b.Dv, acc, b.acc_stride, ahead);
        break;
    }
    ahead.count = 0;
  }
}

// -- the block ------------------------------------------------------------------------------------

template <class T>
void widen_rows(const T* from, int64_t stride, int width, int count, float* to, int64_t to_stride) {
  for (int j = 0; j < count; ++j, from += stride, to += to_stride) {
    int d = 0;
    for (; d + W <= width; d += W) store(to + d, load(from + d));
    if (d < width) store(to + d, load_partial(from + d, width - d));
  }
}

// Sixteen-bit rows are widened into scratch first when more query rows than one register tile
// holds will read them.
template <class T>
constexpr bool kNarrow = sizeof(T) < 4;

template <class TK, class TV>
void attend_typed(const AttentionBlock& b) {
  const auto* k = static_cast<const TK*>(b.k.data);
  const auto* v = static_cast<const TV*>(b.v.data);
  float* tile_s = b.scratch;
  float* tile_p = tile_s + kMaxRows * kTile;
  float* wide_k = tile_p + kMaxRows * kTile;
  float* wide_v = wide_k + kTile * padded(b.D);
  for (int r = 0; r < b.rows; ++r) {
    b.m[r] = -__builtin_inff();
    b.l[r] = 0;
    __builtin_memset(b.acc + r * b.acc_stride, 0, b.acc_stride * sizeof(float));
  }
  const bool shared = b.rows > kRegisterRows;
  for (int first = 0, tile = 0; first < b.slots; first += kTile, ++tile) {
    const int keys = b.slots - first < kTile ? b.slots - first : kTile;
    const int ahead = b.slots - first - keys < kTile ? b.slots - first - keys : kTile;
    const TK* tk = k + first * b.k.stride;
    const TV* tv = v + first * b.v.stride;
    float* s = b.logits ? b.logits + first : tile_s;
    const int64_t s_stride = b.logits ? b.logits_stride : kTile;
    float* p = b.weights ? b.weights + first : tile_p;
    const int64_t p_stride = b.weights ? b.weights_stride : kTile;

    // The tile's values are fetched while its logits are computed, the next keys while its values
    // are added up.
    const Ahead values = ahead_of(tv, b.v.stride, b.Dv, keys);
    const Ahead next_keys = ahead_of(tk + keys * b.k.stride, b.k.stride, b.D, ahead);
    if (dots_pairs<TK>(b)) {
      pair_logits(b, tk, keys, s, s_stride, values);
    } else if (kNarrow<TK> && shared) {
      widen_rows(tk, b.k.stride, b.D, keys, wide_k, padded(b.D));
      tile_logits(b, b.q, wide_k, padded(b.D), keys, s, s_stride, values);
    } else {
      tile_logits(b, b.q, tk, b.k.stride, keys, s, s_stride, values);
    }
    if (b.distance) tile_distances(b, tk, b.k.stride, keys, b.distance + first);
    if (b.mask != MaskKind::none) tile_mask(b, first, keys, s, s_stride);

    for (int r = 0; r < b.rows; ++r) {
      const float shrink = tile_softmax(s + r * s_stride, p + r * p_stride, keys, b.m[r], b.l[r]);
      if (b.weights) b.tile_max[tile * b.rows + r] = b.m[r];
      if (shrink != 1) {
        float* acc = b.acc + r * b.acc_stride;
        for (int d = 0; d < b.acc_stride; d += W) store(acc + d, load(acc + d) * shrink);
      }
    }
    if (kNarrow<TV> && shared) {
      widen_rows(tv, b.v.stride, b.Dv, keys, wide_v, padded(b.Dv));
      tile_values(b, wide_v, padded(b.Dv), keys, p, p_stride, next_keys);
    } else {
      tile_values(b, tv, b.v.stride, keys, p, p_stride, next_keys);
    }
  }
}

template <class TK>
void attend_keyed(const AttentionBlock& b) {
  switch (b.v.dtype) {
    case Dtype::float32: return attend_typed<TK, float>(b);
    case Dtype::float16: return attend_typed<TK, float16>(b);
    case Dtype::bfloat16: return attend_typed<TK, bfloat16>(b);
  }
}

inline void attend(const AttentionBlock& b) {
  switch (b.k.dtype) {
    case Dtype::float32: return attend_keyed<float>(b);
    case Dtype::float16: return attend_keyed<float16>(b);
    case Dtype::bfloat16: return attend_keyed<bfloat16>(b);
  }
}

}  // namespace mlx_h2o::MLX_H2O_ISA
