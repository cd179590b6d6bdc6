#include "operands.h"

#include <sstream>

#include "evaluation.h"

namespace mlx_h2o {

namespace {

const char* words(Kind kind) {
  switch (kind) {
    case Kind::floating: return "float32, float16 or bfloat16";
    case Kind::float32: return "float32";
    case Kind::int32: return "int32";
    case Kind::uint32: return "uint32";
    case Kind::boolean: return "boolean";
  }
  return "";
}

bool is_of(Kind kind, mx::Dtype dtype) {
  switch (kind) {
    case Kind::floating: return is_float(dtype);
    case Kind::float32: return dtype == mx::float32;
    case Kind::int32: return dtype == mx::int32;
    case Kind::uint32: return dtype == mx::uint32;
    case Kind::boolean: return dtype == mx::bool_;
  }
  return false;
}

}  // namespace

mx::array Operands::take(
    const std::string& name, mlx_array handle, const std::string& axes, Kind kind) {
  check(handle.ctx, name + " is missing: a handle is empty.");
  const mx::array given = of(handle);
  std::vector<std::string> names;
  std::istringstream text_of_axes(axes);
  for (std::string axis; text_of_axes >> axis;) names.push_back(axis);
  bool fits = given.ndim() == names.size();
  std::string wanted;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto known = lengths_.find(names[i]);
    wanted += (i ? ", " : "") + names[i];
    if (known != lengths_.end()) {
      wanted += " = " + std::to_string(known->second);
      fits = fits && given.shape(i) == known->second;
    } else if (fits) {
      lengths_.emplace(names[i], given.shape(i));
    }
  }
  check(fits, name + " must be [" + wanted + "]; got " + text(given.shape()) + ".");
  check(is_of(kind, given.dtype()), name + " must be " + words(kind) + ".");
  return given;
}

std::optional<mx::array> Operands::take_if_any(
    const std::string& name, mlx_array handle, const std::string& axes, Kind kind) {
  return handle.ctx ? std::optional(take(name, handle, axes, kind)) : std::nullopt;
}

void Operands::check_heads() const {
  const int queries = (*this)["Hq"], keys = (*this)["Hk"];
  check(
      queries % keys == 0,
      std::to_string(queries) + " query heads are no multiple of " + std::to_string(keys) +
          " KV heads.");
}

void check_scale(float scale) {
  check(std::isfinite(scale), "scale must be a finite number.");
}

void refuse_tracing() {
#ifndef MLX_H2O_OVER_MLX_C  // mlx-c does not tell
  // MLX does not export its own answer; an array marked as a tracer has it.
  static const mx::array* const probe = [] {
    auto* marked = new mx::array(0);
    marked->set_tracer(true);
    return marked;
  }();
  check(
      !probe->is_tracer(),
      "A cache cannot be used in a function that is compiled or differentiated: it changes from "
      "call to call, and such a function is traced only once.");
#endif
}

void check_index(const mx::array& index, int slots) {
  const mx::array lowest = mx::min(index), highest = mx::max(index);
  evaluate({lowest, highest});
  const int least = lowest.item<int>(), most = highest.item<int>();
  check(
      least >= 0 && most < slots,
      "An index must be from 0 to " + std::to_string(slots - 1) + "; got " +
          std::to_string(least < 0 ? least : most) + ".");
}

}  // namespace mlx_h2o
