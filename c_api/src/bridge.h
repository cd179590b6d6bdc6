// Between mlx-c's handles and the engine's arrays.
//
// Over MLX's C++ API this is the one place that knows what mlx-c's ctx points to: an
// mlx::core::array or Stream, as in mlx-c's own private headers. No function of mlx-c hands a C++
// array out, and the CPU kernels are operations on those. Over mlx-c alone an array is a handle.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "mlx_h2o.h"
#include "ops.h"

namespace mlx_h2o {

#ifdef MLX_H2O_OVER_MLX_C

// One more reference to a handle's array.
inline mx::array shared(mlx_array handle) {
  return mx::array::sharing(handle);
}

// Handles of mlx-c for what stays ours: not to be freed.
inline mlx_array borrowed(const mx::array& value) {
  return value.handle();
}

// The stream of the call and its device, as handles that are not to be freed.
struct CallStream {
  mlx_stream handle() const {
    return mx::StreamContext::stream();
  }
  mlx_device device() const {
    return mx::StreamContext::device();
  }
};

// Has the operations of this thread go to the CPU meanwhile.
struct CPUContext {
  ~CPUContext() {
    mlx_stream_free(stream);
  }

  const mlx_stream stream = mlx_default_cpu_stream_new();
  const mx::StreamContext context{stream};
};

inline void set(mlx_array* res, const mx::array& value) {
  mx::succeed(mlx_array_set(res, value.handle()));
}

inline mlx_stream stream_of(mlx_stream handle) {
  return handle;
}

inline mlx_dtype dtype_of(mx::Dtype dtype) {
  return dtype;
}

#else

inline mx::array shared(mlx_array handle) {
  return *static_cast<const mx::array*>(handle.ctx);
}

inline mlx_array borrowed(const mx::array& value) {
  return {const_cast<mx::array*>(&value)};
}

struct CallStream {
  mlx_stream handle() const {
    return {const_cast<mx::Stream*>(&stream)};
  }
  mlx_device device() const {
    return {const_cast<mx::Device*>(&stream.device)};
  }

  const mx::Stream stream = mx::default_stream(mx::default_device());
};

struct CPUContext {
  const mx::StreamContext context{mx::default_stream(mx::Device::cpu)};
};

inline void set(mlx_array* res, mx::array value) {
  if (res->ctx)
    *static_cast<mx::array*>(res->ctx) = std::move(value);
  else
    res->ctx = new mx::array(std::move(value));
}

inline mx::Stream stream_of(mlx_stream handle) {
  return *static_cast<const mx::Stream*>(handle.ctx);
}

// Of the dtypes that rows have.
inline mlx_dtype dtype_of(mx::Dtype dtype) {
  return dtype == mx::float16 ? MLX_FLOAT16 : dtype == mx::bfloat16 ? MLX_BFLOAT16 : MLX_FLOAT32;
}

#endif

inline mx::array of(mlx_array handle) {
  check(handle.ctx, "An array is missing: a handle is empty.");
  mx::array given = shared(handle);
  check(given.size() > 0, "An array is empty: " + text(given.shape()) + " has an axis of 0.");
  return given;
}

inline std::optional<mx::array> maybe(mlx_array handle) {
  return handle.ctx ? std::optional(of(handle)) : std::nullopt;
}

inline void give(mlx_array* res, mx::array value) {
  check(res, "A result is missing: a pointer is null.");
  set(res, std::move(value));
}

// To be freed.
inline mlx_vector_array listed(const std::vector<mx::array>& arrays) {
  const mlx_vector_array all = mlx_vector_array_new();
  for (const mx::array& a : arrays) mlx_vector_array_append_value(all, borrowed(a));
  return all;
}

struct LastError {
  std::string message;
  mlx_h2o_error code = MLX_H2O_ERROR_NONE;
};

inline LastError& last_error() {
  thread_local LastError error;
  return error;
}

// Runs it: 0, or 1 with the message kept.
template <class F>
int guarded(F&& run) {
  try {
    run();
    return 0;
  } catch (const Refusal& refusal) {
    last_error() = {refusal.what(), static_cast<mlx_h2o_error>(refusal.blame)};
  } catch (const std::exception& error) {
    last_error() = {error.what(), MLX_H2O_ERROR_INTERNAL};
  } catch (...) {
    last_error() = {"an unknown error", MLX_H2O_ERROR_INTERNAL};
  }
  return 1;
}

// The same with a stream as the default one.
template <class F>
int guarded_on(mlx_stream s, F&& run) {
  return guarded([&] {
    check(s.ctx, "The stream is missing: a handle is empty.");
    const mx::StreamContext context(stream_of(s));
    run();
  });
}

}  // namespace mlx_h2o
