// An array of MLX as mlx-c hands it out, with the members of mlx::core::array that the engine uses.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "mlx/c/mlx.h"

namespace mlx_h2o::mx {

using Shape = std::vector<int>;

using Dtype = mlx_dtype;
inline constexpr Dtype bool_ = MLX_BOOL, uint8 = MLX_UINT8, uint32 = MLX_UINT32, int16 = MLX_INT16,
                       int32 = MLX_INT32;
inline constexpr Dtype float16 = MLX_FLOAT16, bfloat16 = MLX_BFLOAT16, float32 = MLX_FLOAT32;
enum Category { floating };

inline size_t size_of(Dtype dtype) {
  return mlx_dtype_size(dtype);
}
bool issubdtype(Dtype dtype, Category category);

// The least number of a dtype.
struct finfo {
  explicit finfo(Dtype dtype);
  float min;
};

// Raises unless mlx-c did what it was asked for; its error handler was told why.
void succeed(int status);

// One reference to an array.
class array {
 public:
  template <class T>
    requires std::is_arithmetic_v<T>
  explicit array(T number) : handle_(of(number)) {}
  template <class T>
    requires std::is_arithmetic_v<T>
  array(T number, Dtype dtype) : array(one(number), dtype) {}
  array(std::initializer_list<float> numbers);
  // Numbers from `first` on, in a dtype in which the engine makes arrays: float32, int32, uint8,
  // bool.
  template <class Iterator>
  array(Iterator first, const Shape& shape, Dtype dtype) : handle_(of(first, shape, dtype)) {}

  // The array of a handle, which stays the caller's, or becomes this one's.
  static array sharing(mlx_array handle);
  static array owning(mlx_array handle) {
    return array(handle);
  }

  array(const array& other);
  array(array&& other) noexcept : handle_(std::exchange(other.handle_, mlx_array_new())) {}
  array& operator=(array other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~array() {
    mlx_array_free(handle_);
  }

  // Not to be freed.
  mlx_array handle() const {
    return handle_;
  }

  size_t ndim() const {
    return mlx_array_ndim(handle_);
  }
  size_t size() const {
    return mlx_array_size(handle_);
  }
  size_t itemsize() const {
    return mlx_array_itemsize(handle_);
  }
  size_t nbytes() const {
    return mlx_array_nbytes(handle_);
  }
  Dtype dtype() const {
    return mlx_array_dtype(handle_);
  }
  // A list of its own, unlike in MLX: two calls are not two ends of one list.
  Shape shape() const;
  // From the end where the axis is below 0.
  int shape(int axis) const;

  // Of an evaluated array; of one element.
  template <class T>
  const T* data() const;
  template <class T>
  T item() const;

 private:
  explicit array(mlx_array handle) : handle_(handle) {}
  array(const array& number, Dtype dtype);

  static mlx_array of(bool number) {
    return mlx_array_new_bool(number);
  }
  static mlx_array of(int number) {
    return mlx_array_new_int(number);
  }
  static mlx_array of(float number) {
    return mlx_array_new_float(number);
  }
  static array one(uint32_t number);
  static array one(int number) {
    return array(number);
  }
  static array one(float number) {
    return array(number);
  }
  static mlx_array of_data(const void* data, const Shape& shape, Dtype dtype);

  template <class Iterator>
  static mlx_array of(Iterator first, const Shape& shape, Dtype dtype) {
    switch (dtype) {
      case MLX_FLOAT32: return copied<float>(first, shape, dtype);
      case MLX_INT32: return copied<int32_t>(first, shape, dtype);
      case MLX_UINT8: return copied<uint8_t>(first, shape, dtype);
      default: return copied<uint8_t>(first, shape, MLX_BOOL);
    }
  }
  template <class T, class Iterator>
  static mlx_array copied(Iterator first, const Shape& shape, Dtype dtype) {
    size_t count = 1;
    for (int length : shape) count *= length;
    std::vector<T> numbers;
    numbers.reserve(count);
    for (; count; --count) numbers.push_back(static_cast<T>(*first++));
    return of_data(numbers.data(), shape, dtype);
  }

  mlx_array handle_;
};

// The CPU: its default stream.
enum class Device { cpu };

// Has the operations of this thread go to a stream, which must outlive it.
class StreamContext {
 public:
  explicit StreamContext(mlx_stream stream);
  StreamContext(const StreamContext&) = delete;
  ~StreamContext();

  // Those of the innermost one. Raise where there is none.
  static mlx_stream stream();
  static mlx_device device();

 private:
  const mlx_stream stream_;
  mlx_device device_;
  const StreamContext* const outer_;
};

}  // namespace mlx_h2o::mx
