// Between mlx-c's handles and MLX's C++ classes.
//
// This is the one place that knows what mlx-c's ctx points to: an mlx::core::array, Stream or
// Device, as in mlx-c's own private headers. No function of mlx-c hands a C++ array out, and the
// CPU kernels are operations on those.
#pragma once

#include <exception>
#include <string>

#include "mlx_h2o.h"
#include "ops.h"

namespace mlx_h2o {

inline const mx::array& of(mlx_array handle) {
  check(handle.ctx, "An array is missing: a handle is empty.");
  const auto& given = *static_cast<const mx::array*>(handle.ctx);
  check(given.size() > 0, "An array is empty: " + text(given.shape()) + " has an axis of 0.");
  return given;
}

inline std::optional<mx::array> maybe(mlx_array handle) {
  return handle.ctx ? std::optional(of(handle)) : std::nullopt;
}

inline void give(mlx_array* res, mx::array value) {
  check(res, "A result is missing: a pointer is null.");
  if (res->ctx)
    *static_cast<mx::array*>(res->ctx) = std::move(value);
  else
    res->ctx = new mx::array(std::move(value));
}

// Handles of mlx-c for what stays ours: not to be freed.
inline mlx_array borrowed(const mx::array& value) {
  return {const_cast<mx::array*>(&value)};
}
inline mlx_stream borrowed(const mx::Stream& value) {
  return {const_cast<mx::Stream*>(&value)};
}
inline mlx_device borrowed(const mx::Device& value) {
  return {const_cast<mx::Device*>(&value)};
}

inline std::string& last_error() {
  thread_local std::string message;
  return message;
}

// Runs it: 0, or 1 with the message kept.
template <class F>
int guarded(F&& run) {
  try {
    run();
    return 0;
  } catch (const std::exception& error) {
    last_error() = error.what();
  } catch (...) {
    last_error() = "an unknown error";
  }
  return 1;
}

// The same with a stream as the default one.
template <class F>
int guarded_on(mlx_stream s, F&& run) {
  return guarded([&] {
    check(s.ctx, "The stream is missing: a handle is empty.");
    const mx::StreamContext context(*static_cast<const mx::Stream*>(s.ctx));
    run();
  });
}

}  // namespace mlx_h2o
