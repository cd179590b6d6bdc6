// One float vector type per instruction set, from the compiler's vector extensions.
//
// Everything here lives in a namespace named after the instruction set, because kernels.cpp is
// compiled once for each of them. No standard header with inline functions is included: the linker
// keeps one copy of such a function, and it must not be the one that was compiled for AVX-512.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef MLX_H2O_ISA
#error "Define MLX_H2O_ISA as the namespace of the instruction set."
#endif

// Lanes of a vector. A build may ask for more than the registers hold: the compiler then splits
// them, which is how the 16-lane code is tested on machines without AVX-512.
#ifndef MLX_H2O_LANES
#if defined(__AVX512F__)
#define MLX_H2O_LANES 16
#elif defined(__AVX2__)
#define MLX_H2O_LANES 8
#else
#define MLX_H2O_LANES 4
#endif
#endif

#define UNROLL _Pragma("GCC unroll 16")

namespace mlx_h2o::MLX_H2O_ISA {

constexpr int W = MLX_H2O_LANES;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

template <class V>
inline V load_as(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

inline vf splat(float x) {
  return x - vf{};
}

// Loaded once: compilers like to fold a load into every instruction that uses it, and then the
// load ports set the time.
inline vf in_register(vf v) {
#if defined(__AVX2__) && MLX_H2O_LANES * 4 <= __BIGGEST_ALIGNMENT__
  asm("" : "+x"(v));
#endif
  return v;
}

inline vf load(const float* p) {
  return load_as<vf>(p);
}

inline vf load(const bfloat16* p) {
#if defined(__AVX2__) && MLX_H2O_LANES == 8
  // (gcc 12 makes four instructions of the conversion below.)
  return (vf)((vu)_mm256_cvtepu16_epi32(load_as<__m128i>(p)) << 16);
#else
  return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
#endif
}

// IEEE half to single for lanes of bits, subnormals included (no instruction for it).
inline vf widened_by_hand(vh half) {
  const vu h = __builtin_convertvector(half, vu);
  const vu sign = (h & 0x8000) << 16;
  const vu rest = (h & 0x7fff) << 13;
  // Scaling by 2^112 moves the exponent's bias and normalises subnormals; infinities and NaNs
  // come out with too small an exponent and get it set.
  const vf scaled = (vf)rest * 0x1p112f;
  const vu special = (vu)(rest >= 0x0f800000);
  return (vf)(((vu)scaled | (special & 0x7f800000)) | sign);
}

inline vf load(const float16* p) {
#if defined(__AVX512F__) && MLX_H2O_LANES == 16
  return (vf)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__) && MLX_H2O_LANES == 8
  return (vf)_mm256_cvtph_ps(load_as<__m128i>(p));
#elif defined(__aarch64__) && MLX_H2O_LANES == 4
  return (vf)vcvt_f32_f16(load_as<float16x4_t>(p));
#else
  return widened_by_hand(load_as<vh>(p));
#endif
}

inline void store(float* p, vf v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// The first `count` (1 to W - 1) elements, zeros behind them; reads no further.
template <class T>
inline vf load_partial(const T* p, int count) {
  T padded[W] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

// To the nearest, ties to even.
inline vu narrowed_to_bfloat16(vf v) {
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? rounded : (vu)((bits >> 16) | 0x40);
}

// The same to half precision (no instruction for it): subnormals are rounded by adding 1/2, which
// leaves their mantissa in the last bits.
inline vu narrowed_to_float16(vf v) {
  const vu bits = (vu)v;
  const vu sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
  const vu ordinary = (size + 0xfff + ((size >> 13) & 1) - 0x38000000) >> 13;
  const vu small = (vu)((vf)size + 0.5f) - 0x3f000000;
  const vu large = size > 0x7f800000 ? vu{} + 0x7e00 : vu{} + 0x7c00;
  const vu finite = size < 0x38800000 ? small : ordinary;
  // From 0x477ff000 on a number rounds to 65536 or beyond.
  return sign | (size >= 0x477ff000 ? large : finite);
}

inline void store(bfloat16* p, vf v) {
  const vh half = __builtin_convertvector(narrowed_to_bfloat16(v), vh);
  __builtin_memcpy(p, &half, sizeof(half));
}

inline void store(float16* p, vf v) {
#if defined(__AVX512F__) && MLX_H2O_LANES == 16
  const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__) && MLX_H2O_LANES == 8
  const __m128i half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
  const vh half = __builtin_convertvector(narrowed_to_float16(v), vh);
#endif
  __builtin_memcpy(p, &half, sizeof(half));
}

// The first `count` (1 to W - 1) elements; writes no further.
template <class T>
inline void store_partial(T* p, vf v, int count) {
  T padded[W];
  store(padded, v);
  __builtin_memcpy(p, padded, count * sizeof(T));
}

inline float widen(float x) {
  return x;
}

template <class T>
inline float widen(T x) {
  return load_partial(&x, 1)[0];
}

// Of two, NaNs of the second survive.
inline vf max(vf a, vf b) {
  return a > b ? a : b;
}
inline vf min(vf a, vf b) {
  return a < b ? a : b;
}

inline float sum(vf v) {
  float total = 0;
  for (int i = 0; i < W; ++i) total += v[i];
  return total;
}

inline float largest(vf v) {
  float m = v[0];
  for (int i = 1; i < W; ++i) m = v[i] > m || v[i] != v[i] ? v[i] : m;
  return m;
}

typedef float vf4 __attribute__((vector_size(16)));

// The sums of four vectors, with shuffles that stay within 128-bit lanes.
#if MLX_H2O_LANES == 4
inline vf4 sums(vf a, vf b, vf c, vf d) {
  const vf ab =
      __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const vf cd =
      __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
#else
typedef float vf8 __attribute__((vector_size(32)));

inline vf4 sums_of_eight(vf8 a, vf8 b, vf8 c, vf8 d) {
  const vf8 ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
      __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const vf8 cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
      __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  const vf8 abcd = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
      __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3) +
      __builtin_shufflevector(abcd, abcd, 4, 5, 6, 7);
}

#if MLX_H2O_LANES == 8
inline vf4 sums(vf a, vf b, vf c, vf d) {
  return sums_of_eight(a, b, c, d);
}
#else
inline vf8 halved(vf v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
      __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
inline vf4 sums(vf a, vf b, vf c, vf d) {
  return sums_of_eight(halved(a), halved(b), halved(c), halved(d));
}
#endif
#endif

// Products of bfloat16 pairs, where there is an instruction for them. A build may ask for it to be
// spelled out, which is how the code around it is tested on machines without it.
#if defined(__AVX512BF16__) || defined(MLX_H2O_SPELL_OUT_BF16_DOT)
#define MLX_H2O_BF16_DOT 1
typedef uint16_t vpairs __attribute__((vector_size(W * 4)));

// sum[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1]
inline vf add_products(vf sum, vpairs a, vpairs b) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const vu x = (vu)a, y = (vu)b;
  sum += (vf)(x << 16) * (vf)(y << 16);
  return sum + (vf)(x & 0xffff0000u) * (vf)(y & 0xffff0000u);
#endif
}
#else
#define MLX_H2O_BF16_DOT 0
#endif

// e^x within 2 ulp; 0 below the smallest normal number, NaN for NaN. (Cephes' expf.)
inline vf exp(vf x) {
  const vf lowest = splat(-87.33654f), highest = splat(88.72283f);
  const vf clamped = min(highest, max(lowest, x));
  // Rounds to the nearest integer by pushing the fraction out of the mantissa.
  const vf shifter = splat(0x1.8p23f);
  const vf n = (clamped * 1.44269504088896341f + shifter) - shifter;
  vf r = clamped - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // In two factors, so that 2^128 does not overflow.
  const vi whole = __builtin_convertvector(n, vi);
  const vi half = whole >> 1;
  const vf y = p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
  return x < lowest ? splat(0) : (x > highest ? splat(__builtin_inff()) : y);
}

// Natural logarithm of x >= 0 within 2 ulp; minus infinity at 0 and below the normal numbers,
// infinity for infinity, NaN for NaN. (Cephes' logf.)
inline vf log(vf x) {
  const vi bits = (vi)x;
  vi exponent = ((bits >> 23) & 0xff) - 126;
  vf m = (vf)((bits & 0x007fffff) | 0x3f000000);  // in [0.5, 1)
  const vi small = m < 0.707106781186547524f;
  exponent = exponent + small;
  m = small ? m + m - 1.0f : m - 1.0f;
  const vf z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = p * m + -1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m + -1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m + -1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m + -2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const vf e = __builtin_convertvector(exponent, vf);
  const vf y = m + (m * z * p + e * -2.12194440e-4f - z * 0.5f) + e * 0.693359375f;
  const vf unusual = x < 0x1p-126f ? splat(-__builtin_inff()) : x + x;
  return x >= 0x1p-126f && x < __builtin_inff() ? y : unusual;
}

inline float exp(float x) {
  return exp(splat(x))[0];
}
inline float log(float x) {
  return log(splat(x))[0];
}

}  // namespace mlx_h2o::MLX_H2O_ISA
