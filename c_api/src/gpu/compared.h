// How far a kernel's outputs are from the definition's, in units of what is tolerated
// (python/mlx_h2o/attention/backends/verification/compared.py).
#pragma once

#include "../attend.h"
#include "../bridge.h"
#include "verdicts.h"

namespace mlx_h2o {

// An error may be absolute + relative * |expected|.
struct Tolerance {
  double absolute, relative;
};

// Of outputs in a model's dtype, whose numbers are about 1: two to four of its roundings.
Tolerance tolerance_of(mx::Dtype dtype);
// Of logits and of their log-sum-exp, float32 for every dtype of the operands.
constexpr Tolerance kOfLogits{5e-4, 2e-4};
// Of masses and of what a policy accumulates of them: probabilities, many of them small.
constexpr Tolerance kOfMasses{1e-6, 2e-3};
// Of what must be the same.
constexpr Tolerance kExact{0, 0};

// An output of a kernel, what the definition says of it, and how near they must be.
struct Compared {
  std::string name;
  mx::array found, expected;
  Tolerance tolerance;
};

// The largest deviation; evaluates all. Infinities of one sign agree, a NaN agrees with nothing.
Deviation worst(const std::vector<Compared>& outputs);

// Numbers [..] of a normal distribution, always the same for a seed, and evaluated nowhere.
mx::array normal_numbers(unsigned seed, const mx::Shape& shape);

// Has MLX's own operations compute on the CPU meanwhile, as the definition is computed.
struct OnCPU {
  const CPUContext context;
  const KernelScope plain{false};
};

}  // namespace mlx_h2o
