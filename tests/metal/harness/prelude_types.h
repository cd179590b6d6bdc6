// The prelude of the type-checking build: address spaces are types, half and bfloat are the
// compiler's own. Nothing runs; a pointer without its address space, or with another's, does not
// compile. For clang.
#pragma once
#define MLX_H2O_PRELUDE

#include <stdint.h>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define INFINITY __builtin_inff()
#define UNROLL

// A static variable, since clang has no automatic ones outside the default address space.
#define THREADGROUP_ARRAY(type, name, size) static threadgroup type name[size]

using uint = uint32_t;
using ushort = uint16_t;
using half = _Float16;
using bfloat = __bf16;
using float16_t = half;
using bfloat16_t = bfloat;

struct uint3 {
  uint x, y, z;
};

namespace metal {

enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <typename T>
T simd_sum(T);
template <typename T>
T simd_max(T);
template <typename T>
T simd_min(T);
template <typename T>
T simd_prefix_inclusive_sum(T);
bool simd_any(bool);
template <typename T>
T simd_shuffle(T, ushort);
template <typename T>
T simd_shuffle_xor(T, ushort);
template <typename T>
T simd_shuffle_down(T, ushort);
template <typename T>
T simd_shuffle_up(T, ushort);

float max(float, float);
float min(float, float);
int max(int, int);
int min(int, int);
uint max(uint, uint);
uint min(uint, uint);
float clamp(float, float, float);
float abs(float);
float exp(float);
float log(float);
float sqrt(float);
float rint(float);
float rsqrt(float);
bool isnan(float);

namespace fast {
using metal::exp;
using metal::log;
}  // namespace fast

}  // namespace metal

using namespace metal;
