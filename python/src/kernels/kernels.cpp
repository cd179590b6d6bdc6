// Compiled once per instruction set, with MLX_H2O_ISA naming it; see CMakeLists.txt.
#include "attention_tile.h"
#include "update.h"

namespace mlx_h2o::MLX_H2O_ISA {

static void blend(float* y, const float* x, float a, float b, int n) {
  each_vector(n, [&](int i, int count) {
    store_some(y + i, a * load_some(y + i, count) + b * load_some(x + i, count), count);
  });
}

static float dot(const float* x, const float* y, int n) {
  vf total{};
  each_vector(
      n, [&](int i, int count) { total += load_some(x + i, count) * load_some(y + i, count); });
  return sum(total);
}

template <class T>
static void widen_row(float* out, const T* row, float factor, int n) {
  each_vector(n, [&](int i, int count) {
    const vf x = count == W ? load(row + i) : load_partial(row + i, count);
    store_some(out + i, x * factor, count);
  });
}

static void widen(float* out, const void* row, Dtype dtype, float factor, int n) {
  switch (dtype) {
    case Dtype::float32: return widen_row(out, static_cast<const float*>(row), factor, n);
    case Dtype::float16: return widen_row(out, static_cast<const float16*>(row), factor, n);
    case Dtype::bfloat16: return widen_row(out, static_cast<const bfloat16*>(row), factor, n);
  }
}

// To the nearest, ties to even.
static uint16_t narrowed_to_bfloat16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static uint16_t narrowed_to_float16(float x) {
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

static void narrow(void* out, Dtype dtype, const float* row, float factor, int n) {
  if (dtype == Dtype::float32) return widen_row(static_cast<float*>(out), row, factor, n);
  auto* half = static_cast<uint16_t*>(out);
  for (int i = 0; i < n; ++i) {
    const float x = row[i] * factor;
    half[i] = dtype == Dtype::float16 ? narrowed_to_float16(x) : narrowed_to_bfloat16(x);
  }
}

template <class T>
static void sum_keys_of(const T* k, int64_t stride, int slots, int D, bool unit, float* total) {
  __builtin_memset(total, 0, D * sizeof(float));
  const auto some = [](const T* p, int count) {
    return count == W ? load(p) : load_partial(p, count);
  };
  for (int n = 0; n < slots; ++n, k += stride) {
    float factor = 1;
    if (unit) {
      vf square{};
      each_vector(D, [&](int d, int count) { square += some(k + d, count) * some(k + d, count); });
      factor = 1 / __builtin_sqrtf(sum(square) + 1e-12f);
    }
    each_vector(D, [&](int d, int count) {
      store_some(total + d, load_some(total + d, count) + factor * some(k + d, count), count);
    });
  }
}

static void sum_keys(const Rows& k, int slots, int D, bool unit, float* total) {
  switch (k.dtype) {
    case Dtype::float32:
      return sum_keys_of(static_cast<const float*>(k.data), k.stride, slots, D, unit, total);
    case Dtype::float16:
      return sum_keys_of(static_cast<const float16*>(k.data), k.stride, slots, D, unit, total);
    case Dtype::bfloat16:
      return sum_keys_of(static_cast<const bfloat16*>(k.data), k.stride, slots, D, unit, total);
  }
}

#define MLX_H2O_STRING(x) #x
#define MLX_H2O_NAME(x) MLX_H2O_STRING(x)

extern const Kernels table;
const Kernels table{
    MLX_H2O_NAME(MLX_H2O_ISA),
    MLX_H2O_BF16_DOT,
    attend,
    add_mass,
    update,
    blend,
    dot,
    widen,
    narrow,
    sum_keys};

}  // namespace mlx_h2o::MLX_H2O_ISA
