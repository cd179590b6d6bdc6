// The texts of the kernels in metal/, as compilers get them
// (python/mlx_h2o/backends/kernel_text.py).
#pragma once

#include <string>

namespace mlx_h2o {

// A kernel's functions and its body.
struct KernelText {
  std::string header, body;
};

// A kernel by the name of its file, without ".metal".
KernelText kernel_text(const std::string& name);

// A file of metal/ by name, nullptr if there is none. CMake writes the function (kernel_files.cpp).
const char* kernel_file(const std::string& name);

}  // namespace mlx_h2o
