// What a handle's ctx points to, and how C++ exceptions become error codes.
#pragma once

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/c/mlx.h"
#include "mlx/mlx.h"

namespace mlxc {

namespace mx = mlx::core;

template <class Handle>
struct Pointee;
template <>
struct Pointee<mlx_array> {
  using type = mx::array;
};
template <>
struct Pointee<mlx_string> {
  using type = std::string;
};
template <>
struct Pointee<mlx_vector_array> {
  using type = std::vector<mx::array>;
};
template <>
struct Pointee<mlx_vector_string> {
  using type = std::vector<std::string>;
};
template <>
struct Pointee<mlx_map_string_to_array> {
  using type = std::unordered_map<std::string, mx::array>;
};
template <>
struct Pointee<mlx_map_string_to_string> {
  using type = std::unordered_map<std::string, std::string>;
};
template <>
struct Pointee<mlx_device> {
  using type = mx::Device;
};
template <>
struct Pointee<mlx_device_info> {
  using type = std::unordered_map<std::string, std::variant<std::string, size_t>>;
};
template <>
struct Pointee<mlx_stream> {
  using type = mx::Stream;
};

template <class Handle>
auto& get(Handle handle) {
  if (!handle.ctx) throw std::invalid_argument("an empty handle where a value is needed");
  return *static_cast<typename Pointee<Handle>::type*>(handle.ctx);
}

template <class Handle>
Handle make(typename Pointee<Handle>::type value) {
  return Handle{new typename Pointee<Handle>::type(std::move(value))};
}

template <class Handle>
void set(Handle* handle, typename Pointee<Handle>::type value) {
  if (handle->ctx)
    get(*handle) = std::move(value);
  else
    *handle = make<Handle>(std::move(value));
}

template <class Handle>
void release(Handle handle) {
  delete static_cast<typename Pointee<Handle>::type*>(handle.ctx);
}

inline std::optional<mx::array> maybe(mlx_array a) {
  return a.ctx ? std::optional(get(a)) : std::nullopt;
}
inline std::optional<int> maybe(mlx_optional_int v) {
  return v.has_value ? std::optional(v.value) : std::nullopt;
}
inline std::optional<float> maybe(mlx_optional_float v) {
  return v.has_value ? std::optional(v.value) : std::nullopt;
}

mx::Dtype dtype(mlx_dtype t);
inline std::optional<mx::Dtype> maybe(mlx_optional_dtype v) {
  return v.has_value ? std::optional(dtype(v.value)) : std::nullopt;
}

inline mx::Shape shape(const int* values, size_t n) {
  return mx::Shape(values, values + n);
}
inline std::vector<int> ints(const int* values, size_t n) {
  return std::vector<int>(values, values + n);
}

// Runs it; 0, or 1 after the error handler has seen the exception.
template <class F>
int guard(F&& run) {
  try {
    run();
    return 0;
  } catch (const std::exception& e) {
    mlx_error("%s", e.what());
    return 1;
  }
}

// The same for functions that give a value and not a code.
template <class T, class F>
T guarded(T otherwise, F&& run) {
  guard([&] { otherwise = run(); });
  return otherwise;
}

// The default stream of a device, one for all threads. streams.cpp.
mx::Stream shared_stream(mx::Device device);

// Evaluation, by one thread at a time: the streams are shared (see stream.h), and an encoder is not
// made for two. transforms.cpp.
void evaluate(std::vector<mx::array> arrays, bool async = false);

}  // namespace mlxc
