#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace mlx_h2o {

#define MLX_H2O_VARIANT(name) \
  namespace name {            \
  extern const Kernels table; \
  }
#if defined(MLX_H2O_AVX512)
MLX_H2O_VARIANT(avx512bf16)
MLX_H2O_VARIANT(avx512)
#endif
#if defined(__x86_64__)
MLX_H2O_VARIANT(avx2)
MLX_H2O_VARIANT(sse2)
#else
MLX_H2O_VARIANT(baseline)
#endif
#if defined(MLX_H2O_WIDE)
MLX_H2O_VARIANT(wide)
#endif

namespace {

const Kernels& choose() {
  const char* wanted = std::getenv("MLX_H2O_ISA");
  [[maybe_unused]] const auto allowed = [&](const Kernels& k) {
    return !wanted || !std::strcmp(wanted, k.name);
  };
#if defined(MLX_H2O_WIDE)
  if (wanted && allowed(wide::table)) return wide::table;
#endif
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(MLX_H2O_AVX512)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx512 && __builtin_cpu_supports("avx512bf16") && allowed(avx512bf16::table))
    return avx512bf16::table;
  if (has_avx512 && allowed(avx512::table)) return avx512::table;
#endif
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c") && allowed(avx2::table))
    return avx2::table;
  return sse2::table;
#else
  return baseline::table;
#endif
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace mlx_h2o
