// Shapes and dtypes in the words of messages.
#pragma once

#include <string>

#include "mx.h"

namespace mlx_h2o {

inline std::string text(const mx::Shape& shape) {
  std::string words = "[";
  for (size_t i = 0; i < shape.size(); ++i) words += (i ? ", " : "") + std::to_string(shape[i]);
  return words + "]";
}

// Of the dtypes that rows and masks have.
inline std::string text(mx::Dtype dtype) {
  if (dtype == mx::bool_) return "bool";
  return dtype == mx::float16 ? "float16" : dtype == mx::bfloat16 ? "bfloat16" : "float32";
}

}  // namespace mlx_h2o
