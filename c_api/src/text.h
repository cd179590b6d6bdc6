// Shapes in the words of error messages.
#pragma once

#include <string>

#include "mx.h"

namespace mlx_h2o {

inline std::string text(const mx::Shape& shape) {
  std::string words = "[";
  for (size_t i = 0; i < shape.size(); ++i) words += (i ? ", " : "") + std::to_string(shape[i]);
  return words + "]";
}

}  // namespace mlx_h2o
