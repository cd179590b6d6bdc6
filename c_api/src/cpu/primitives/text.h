// Shapes and dtypes in the words of error messages.
#pragma once

#include <sstream>
#include <string>

#include "mlx/mlx.h"

namespace mlx_h2o {

inline std::string text(const mlx::core::Shape& shape) {
  std::string words = "[";
  for (size_t i = 0; i < shape.size(); ++i) words += (i ? ", " : "") + std::to_string(shape[i]);
  return words + "]";
}

// As in "[1, 2, 3] float32".
inline std::string description(const mlx::core::array& a) {
  std::ostringstream words;
  words << text(a.shape()) << " " << a.dtype();
  return words.str();
}

}  // namespace mlx_h2o
