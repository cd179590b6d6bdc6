// Calls of custom kernels by the names of their buffers
// (python/mlx_h2o/attention/backends/launcher.py).
//
// MLX writes a kernel's signature from the arrays that it gets, so a buffer that a launch does
// without has no name there. Its declaration as a null pointer goes before the body instead, and
// the template arguments say that it is not read.
#pragma once

#include <array>
#include <map>
#include <variant>

#include "../ops.h"

namespace mlx_h2o {

// Lanes of a simdgroup.
constexpr int kSimdgroup = 32;

// The parts one after the other.
template <class T>
std::vector<T> joined_lists(std::initializer_list<std::vector<T>> parts) {
  std::vector<T> whole;
  for (const auto& part : parts) whole.insert(whole.end(), part.begin(), part.end());
  return whole;
}

using Buffers = std::map<std::string, mx::array>;
// Shape and dtype of what a kernel is to write, by name.
using Outputs = std::map<std::string, std::pair<mx::Shape, mx::Dtype>>;
// Template arguments in order.
using Template = std::vector<std::pair<std::string, std::variant<mx::Dtype, int, bool>>>;

// Runs a kernel, by the name of its file in metal/, on the stream of the call, which is a GPU's: so
// many threadgroups along x, y and z, each with `threads` along x. Raises for buffers that the
// kernel does not declare, and for those that it must have.
Buffers launch(
    const std::string& kernel, const Buffers& inputs, const Outputs& outputs,
    const Template& arguments, std::array<int, 3> threadgroups, int threads);

// The name of the GPU of the stream of the call, as MLX knows it ("applegpu_g13s"); nothing if the
// stream is not on a GPU that runs the kernels.
std::optional<std::string> gpu_architecture();

}  // namespace mlx_h2o
