// Arrays in the words of error messages.
#pragma once

#include <sstream>
#include <string>

#include "../../text.h"

namespace mlx_h2o {

// As in "[1, 2, 3] float32".
inline std::string description(const mx::array& a) {
  std::ostringstream words;
  words << text(a.shape()) << " " << a.dtype();
  return words.str();
}

}  // namespace mlx_h2o
