// The host's prelude: what the kernels' dialect means on a CPU (metal/README.md has its rules).
//
// Address spaces are empty words here; every access is watched by the runtime instead, through the
// calls that -fsanitize=thread puts before it. Types and address spaces are checked in a build of
// its own (prelude_types.h).
#pragma once
#define MLX_H2O_PRELUDE

#include <stdint.h>

#define device
#define constant
#define threadgroup
#define thread
#define INFINITY __builtin_inff()
#define UNROLL

#define THREADGROUP_ARRAY(type, name, size) \
  type* name = static_cast<type*>(host_threadgroup_array(#name, sizeof(type), size))

using uint = uint32_t;
using ushort = uint16_t;

struct uint3 {
  uint x, y, z;
};

// Operations of a simdgroup, resolved by the runtime when all of its lanes have arrived.
enum HostOp : int {
  HOST_SUM,
  HOST_MAX,
  HOST_MIN,
  HOST_PREFIX_SUM,
  HOST_ANY,
  HOST_SHUFFLE,
  HOST_SHUFFLE_XOR,
  HOST_SHUFFLE_DOWN,
  HOST_SHUFFLE_UP,
};
enum HostType : int { HOST_FLOAT, HOST_INT, HOST_UINT };

extern "C" {
void* host_threadgroup_array(const char* name, int width, int64_t count);
uint32_t host_simd(int op, int type, uint32_t bits, uint32_t argument, int line);
void host_barrier(int whole_threadgroup, int flags, int line);
}

// half and bfloat, stored as their bits and computed with as floats.
template <uint16_t (*narrow)(float), float (*widen)(uint16_t)>
struct HostFloat16 {
  uint16_t bits;
  HostFloat16() = default;
  HostFloat16(float x) : bits(narrow(x)) {}
  operator float() const { return widen(bits); }
};

inline float host_float(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

inline uint32_t host_bits(float x) {
  return __builtin_bit_cast(uint32_t, x);
}

inline float host_from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) {
    return host_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  }
  const float size = rest < 0x400 ? float(rest) * 0x1p-24f : host_float((rest << 13) + (112 << 23));
  return host_float(sign | host_bits(size));
}

// Rounds to nearest, ties to even.
inline uint16_t host_to_half(float x) {
  const uint32_t sign = host_bits(x) >> 16 & 0x8000, size = host_bits(x) & 0x7fffffff;
  if (size > 0x7f800000) {
    return sign | 0x7e00;
  }
  if (size >= 0x47800000) {
    return sign | 0x7c00;
  }
  if (size < 0x38800000) {
    // Subnormal: adding 0.5 makes the FPU round to its last bit, 2^-24.
    return sign | (host_bits(host_float(size) + 0.5f) - 0x3f000000);
  }
  const uint32_t odd = size >> 13 & 1;
  return sign | ((size - (112 << 23) + 0xfff + odd) >> 13);
}

inline float host_from_bfloat(uint16_t b) {
  return host_float(uint32_t(b) << 16);
}

inline uint16_t host_to_bfloat(float x) {
  const uint32_t bits = host_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return bits >> 16 | 0x40;
  }
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

using half = HostFloat16<host_to_half, host_from_half>;
using bfloat = HostFloat16<host_to_bfloat, host_from_bfloat>;
using float16_t = half;
using bfloat16_t = bfloat;

inline int host_type(float) {
  return HOST_FLOAT;
}
inline int host_type(int) {
  return HOST_INT;
}
inline int host_type(uint) {
  return HOST_UINT;
}

template <typename T>
inline T host_simd_op(int op, T x, uint argument, int line) {
  static_assert(sizeof(T) == 4, "simdgroup operations take float, int or uint");
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return __builtin_bit_cast(T, host_simd(op, host_type(x), bits, argument, line));
}

namespace metal {

enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}

inline void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  host_barrier(1, int(flags), line);
}

inline void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  host_barrier(0, int(flags), line);
}

template <typename T>
inline T simd_sum(T x, int line = __builtin_LINE()) {
  return host_simd_op(HOST_SUM, x, 0, line);
}

template <typename T>
inline T simd_max(T x, int line = __builtin_LINE()) {
  return host_simd_op(HOST_MAX, x, 0, line);
}

template <typename T>
inline T simd_min(T x, int line = __builtin_LINE()) {
  return host_simd_op(HOST_MIN, x, 0, line);
}

template <typename T>
inline T simd_prefix_inclusive_sum(T x, int line = __builtin_LINE()) {
  return host_simd_op(HOST_PREFIX_SUM, x, 0, line);
}

inline bool simd_any(bool x, int line = __builtin_LINE()) {
  return host_simd_op(HOST_ANY, uint(x), 0, line);
}

template <typename T>
inline T simd_shuffle(T x, ushort lane, int line = __builtin_LINE()) {
  return host_simd_op(HOST_SHUFFLE, x, lane, line);
}

template <typename T>
inline T simd_shuffle_xor(T x, ushort mask, int line = __builtin_LINE()) {
  return host_simd_op(HOST_SHUFFLE_XOR, x, mask, line);
}

template <typename T>
inline T simd_shuffle_down(T x, ushort delta, int line = __builtin_LINE()) {
  return host_simd_op(HOST_SHUFFLE_DOWN, x, delta, line);
}

template <typename T>
inline T simd_shuffle_up(T x, ushort delta, int line = __builtin_LINE()) {
  return host_simd_op(HOST_SHUFFLE_UP, x, delta, line);
}

// NaN gives way to a number, as in MSL.
inline float max(float a, float b) {
  return __builtin_fmaxf(a, b);
}
inline float min(float a, float b) {
  return __builtin_fminf(a, b);
}
inline int max(int a, int b) {
  return a > b ? a : b;
}
inline int min(int a, int b) {
  return a < b ? a : b;
}
inline uint max(uint a, uint b) {
  return a > b ? a : b;
}
inline uint min(uint a, uint b) {
  return a < b ? a : b;
}
inline float clamp(float x, float low, float high) {
  return min(max(x, low), high);
}
inline float abs(float x) {
  return __builtin_fabsf(x);
}
inline float exp(float x) {
  return __builtin_expf(x);
}
inline float log(float x) {
  return __builtin_logf(x);
}
inline float sqrt(float x) {
  return __builtin_sqrtf(x);
}
inline float rint(float x) {
  return __builtin_rintf(x);
}
inline float rsqrt(float x) {
  return 1.0f / __builtin_sqrtf(x);
}
inline bool isnan(float x) {
  return __builtin_isnan(x);
}

namespace fast {
using metal::exp;
using metal::log;
}  // namespace fast

}  // namespace metal

using namespace metal;

// Where a lane stands; the names are Metal's attributes.
struct HostAttributes {
  uint3 dispatch_threads_per_threadgroup, grid_origin, grid_size;
  uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  uint3 threadgroups_per_grid, threads_per_grid, threads_per_threadgroup;
  uint dispatch_simdgroups_per_threadgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup, thread_execution_width, thread_index_in_simdgroup;
  uint thread_index_in_threadgroup, threads_per_simdgroup;
};
