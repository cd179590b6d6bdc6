// GPU kernels prove themselves: each variant runs beside the definition before it is used
// (python/mlx_h2o/attention/backends/self_check.py).
//
// A variant is all that decides which text a kernel compiles from. It is checked at its first use
// in a process; one that raises, gives a NaN or differs by more than is tolerated is not used, and
// MLX's own operations do its work.
#pragma once

#include <functional>

#include "../attend.h"
#include "../bridge.h"
#include "../json.h"

namespace mlx_h2o {

// The largest error of a check: in units of what is tolerated, above 1 it is too much; which output
// it is of, and what is wrong there.
struct Deviation {
  double size = 0;
  std::string where;
};

// Whether a variant may be used on the GPU of the stream of the call; checked at its first use.
// Raises where MLX_H2O_VERIFY says what there is not.
//
// `variant` names all that decides which texts it compiles. `check` runs it on a small case, beside
// the definition, and may raise.
bool usable(const std::string& variant, const std::function<Deviation()>& check);

// Every verdict of this process, in order, as mlx_h2o_verdicts gives them.
Json::List verdicts();

// The function is called with the first variant of this process that is not used.
void set_notice(void (*notice)(void* context, const char* message), void* context);

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
struct Comparison {
  std::string name;
  mx::array actual, expected;
  Tolerance tolerance;
};

// The largest deviation; evaluates all. Infinities of one sign agree, a NaN agrees with nothing.
Deviation worst(const std::vector<Comparison>& outputs);

// Numbers [..] of a normal distribution, always the same for a seed, and evaluated nowhere.
mx::array normal_numbers(unsigned seed, const mx::Shape& shape);

// Has MLX's own operations compute on the CPU meanwhile, as the definition is computed.
struct OnCPU {
  const CPUContext context;
  const KernelScope plain{false};
};

}  // namespace mlx_h2o
