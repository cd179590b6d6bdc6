// The texts of the kernels in metal/, as compilers get them
// (python/mlx_h2o/attention/backends/kernel_text.py).
#pragma once

#include <string>
#include <vector>

namespace mlx_h2o {

// A kernel's buffers, in order, as its file in metal/ declares them
// (python/mlx_h2o/attention/backends/interface.py says how).
struct Interface {
  std::vector<std::string> inputs, outputs;
  // Names of buffers that a launch may do without, and the declarations that then stand in.
  std::vector<std::pair<std::string, std::string>> optional;
};

// A kernel's functions, its buffers and its body.
struct KernelText {
  std::string header;
  Interface buffers;
  std::string body;
};

// A kernel by the name of its file, without ".metal"; made once.
const KernelText& kernel_text(const std::string& name);

// A file of metal/ by name, nullptr if there is none. tools/embed_metal.py writes the
// function (kernel_files.cpp).
const char* kernel_file(const std::string& name);

}  // namespace mlx_h2o
