// What the functions of mlx_h2o.h accept: shapes by named axes, and dtypes.
#pragma once

#include <map>

#include "bridge.h"

namespace mlx_h2o {

enum class Kind { floating, float32, int32, uint32, boolean };

// The arrays of one call. An axis' name stands for one length in all of them.
class Operands {
 public:
  // The handle's array. Raises unless it has these axes ("B Hk N D") and a dtype of this kind.
  mx::array take(const std::string& name, mlx_array handle, const std::string& axes, Kind kind);
  // The same of one that may be left out.
  std::optional<mx::array> take_if_any(
      const std::string& name, mlx_array handle, const std::string& axes, Kind kind);
  int operator[](const std::string& axis) const {
    return lengths_.at(axis);
  }
  // Raises unless the query heads Hq are a multiple of the KV heads Hk.
  void check_heads() const;

 private:
  std::map<std::string, int> lengths_;
};

// Raises for results without a place.
template <class... Results>
void wants(const Results*... results) {
  check((... && results), "A result is missing: a pointer is null.");
}

void check_scale(float scale);

// Raises while a function is traced (compile, grad, vmap) and not run: a cache would stay where it
// was, or keep arrays that mean nothing afterwards.
void refuse_tracing();

// An index [..., M] whose numbers are those of `slots` slots, evaluated: a write elsewhere would be
// one into memory that is not the buffer's. Raises for others.
void check_index(const mx::array& index, int slots);

}  // namespace mlx_h2o
