// What the operations of this folder have in common.
#pragma once

#include <initializer_list>

#include "../../mx.h"
#include "kernels/kernels.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "text.h"

namespace mlx_h2o {

// An operation of the CPU, without derivatives.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override;
};

// An operand by the name that it has in an error message.
struct Operand {
  const char* name;
  const mx::array& array;
};

// Raises std::invalid_argument: what is wrong, and the operands' shapes and dtypes.
[[noreturn]] void refuse(const std::string& what, std::initializer_list<Operand> operands = {});

inline void require(bool fits, const char* what, std::initializer_list<Operand> operands = {}) {
  if (!fits) refuse(what, operands);
}

Dtype dtype_of(const mx::array& a);

// The array in float32, row after row.
mx::array float32(const mx::array& a, mx::StreamOrDevice s);

// Memory for an output.
void allocate(mx::array& a);

// The array itself if its last axis is dense, else a dense copy that lives as long as the task.
mx::array dense_last(const mx::array& a, mx::cpu::CommandEncoder& encoder);

}  // namespace mlx_h2o
