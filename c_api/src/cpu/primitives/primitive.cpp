#include "primitive.h"

#include <cstring>
#include <stdexcept>

#include "text.h"

namespace mlx_h2o {

void CpuPrimitive::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error(
      std::string("[mlx_h2o] ") + name() + " is the CPU's; give it a stream of the CPU.");
}

void refuse(const std::string& what, std::initializer_list<Operand> operands) {
  std::string words = "[mlx_h2o] " + what;
  const char* separator = ": ";
  for (const Operand& operand : operands) {
    words.append(separator).append(operand.name).append(" ").append(description(operand.array));
    separator = ", ";
  }
  throw std::invalid_argument(words + ".");
}

Dtype dtype_of(const mx::array& a) {
  if (a.dtype() == mx::float16) return Dtype::float16;
  if (a.dtype() == mx::bfloat16) return Dtype::bfloat16;
  return Dtype::float32;
}

mx::array float32(const mx::array& a, mx::StreamOrDevice s) {
  return mx::contiguous(mx::astype(a, mx::float32, s), false, s);
}

void allocate(mx::array& a) {
  a.set_data(mx::allocator::malloc(a.nbytes()));
}

mx::array dense_last(const mx::array& a, mx::cpu::CommandEncoder& encoder) {
  if (a.size() == 0 || a.strides().back() == 1 || a.shape().back() == 1) return a;
  mx::array copy(a.shape(), a.dtype(), nullptr, {});
  allocate(copy);
  encoder.add_temporary(copy);
  encoder.dispatch([from = a.data<char>(), to = copy.data<char>(), shape = a.shape(),
                    strides = a.strides(), size = a.itemsize(), count = a.size()]() {
    for (size_t i = 0; i < count; ++i) {
      size_t rest = i;
      int64_t where = 0;
      for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
        where += static_cast<int64_t>(rest % shape[axis]) * strides[axis];
        rest /= shape[axis];
      }
      std::memcpy(to + i * size, from + where * static_cast<int64_t>(size), size);
    }
  });
  return copy;
}

}  // namespace mlx_h2o
