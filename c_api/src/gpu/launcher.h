// Calls of custom kernels by the names of their buffers (python/mlx_h2o/backends/launcher.py).
//
// MLX writes a kernel's signature from the arrays that it gets, so a buffer that a launch does
// without has no name there. Its declaration as a null pointer goes before the body instead, and
// the template arguments say that nobody looks.
#pragma once

#include <array>
#include <map>
#include <variant>

#include "../ops.h"

namespace mlx_h2o {

// Lanes of a simdgroup.
constexpr int kSimdgroup = 32;

// Names of buffers that a launch may do without, and the declarations that then stand in.
using Absent = std::vector<std::pair<std::string, std::string>>;

// A kernel's buffers, in order; its name is that of its file in metal/.
struct Interface {
  std::string name;
  std::vector<std::string> inputs, outputs;
  Absent optional = {};
};

Absent absent_inputs(const std::vector<std::string>& names);
Absent absent_outputs(const std::vector<std::string>& names);
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

// Runs a kernel on the stream of the call, which is a GPU's: so many threadgroups along x, y and z,
// each with `threads` along x.
Buffers launch(
    const Interface& interface, const Buffers& inputs, const Outputs& outputs,
    const Template& arguments, std::array<int, 3> threadgroups, int threads);

// The name of the GPU of the stream of the call, as MLX knows it ("applegpu_g13s"); nothing if the
// stream is not on a GPU that runs the kernels.
std::optional<std::string> gpu_architecture();

}  // namespace mlx_h2o
