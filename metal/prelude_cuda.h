// CUDA's prelude: what the kernels' dialect means on NVIDIA GPUs. A threadgroup is a block and a
// simdgroup a warp; memory needs no address space but where it is declared. MLX compiles with every
// function on the device.
#ifndef MLX_H2O_PRELUDE
#define MLX_H2O_PRELUDE

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define device
#define constant
#define threadgroup
#define thread
#define THREADGROUP_ARRAY(type, name, size) __shared__ type name[size]
#define UNROLL _Pragma("unroll")
// Without bounds a kernel may take more registers than its block can have. The signature is MLX's.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(THREADGROUP_SIZE)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define thread_position_in_grid \
  make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, \
             blockIdx.z * blockDim.z + threadIdx.z)
#define threadgroup_position_in_grid make_uint3(blockIdx.x, blockIdx.y, blockIdx.z)
#define threadgroups_per_grid make_uint3(gridDim.x, gridDim.y, gridDim.z)
#define threads_per_threadgroup make_uint3(blockDim.x, blockDim.y, blockDim.z)
#define thread_index_in_threadgroup \
  (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))

typedef unsigned int uint;
typedef unsigned short ushort;
typedef __nv_bfloat16 bfloat;

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline void threadgroup_barrier(mem_flags) {
  __syncthreads();
}

inline void simdgroup_barrier(mem_flags) {
  __syncwarp();
}

template <typename T>
inline T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(0xffffffff, x, lane);
}

template <typename T>
inline T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(0xffffffff, x, mask);
}

template <typename T>
inline T simd_shuffle_down(T x, ushort delta) {
  return __shfl_down_sync(0xffffffff, x, delta);
}

template <typename T>
inline T simd_shuffle_up(T x, ushort delta) {
  return __shfl_up_sync(0xffffffff, x, delta);
}

template <typename T>
inline T simd_sum(T x) {
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    x += simd_shuffle_xor(x, mask);
  }
  return x;
}

template <typename T>
inline T simd_max(T x) {
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    x = max(x, simd_shuffle_xor(x, mask));
  }
  return x;
}

template <typename T>
inline T simd_min(T x) {
  UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    x = min(x, simd_shuffle_xor(x, mask));
  }
  return x;
}

template <typename T>
inline T simd_prefix_inclusive_sum(T x) {
  UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const T before = simd_shuffle_up(x, delta);
    x += threadIdx.x % 32 >= delta ? before : T(0);
  }
  return x;
}

inline bool simd_any(bool x) {
  return __any_sync(0xffffffff, x);
}

inline float clamp(float x, float low, float high) {
  return fminf(fmaxf(x, low), high);
}

namespace fast {

inline float exp(float x) {
  return __expf(x);
}

inline float log(float x) {
  return __logf(x);
}

}  // namespace fast
}  // namespace metal

using namespace metal;

#endif
