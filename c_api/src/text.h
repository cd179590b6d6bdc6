// Shapes and dtypes: which rows may have, and all in the words of messages.
#pragma once

#include <string>

#include "mx.h"

namespace mlx_h2o {

inline std::string text(const mx::Shape& shape) {
  std::string words = "[";
  for (size_t i = 0; i < shape.size(); ++i) words += (i ? ", " : "") + std::to_string(shape[i]);
  return words + "]";
}

// Whether rows may have this dtype.
inline bool is_float(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}
inline bool is_float(const mx::array& a) {
  return is_float(a.dtype());
}

// Of the dtypes that rows and masks have.
inline std::string text(mx::Dtype dtype) {
  if (dtype == mx::bool_) return "bool";
  return dtype == mx::float16 ? "float16" : dtype == mx::bfloat16 ? "bfloat16" : "float32";
}

}  // namespace mlx_h2o
