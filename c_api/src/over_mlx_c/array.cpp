#include "array.h"

#include <limits>
#include <stdexcept>

#include "operations.h"

namespace mlx_h2o::mx {

namespace {

// The greatest finite numbers.
constexpr float kMostFloat16 = 65504, kMostBfloat16 = 3.3895313892515355e38f;

thread_local const StreamContext* innermost = nullptr;

const StreamContext& context() {
  if (!innermost) throw std::logic_error("An operation needs the stream of a call.");
  return *innermost;
}

}  // namespace

void succeed(int status) {
  if (status)
    throw std::runtime_error("MLX refused an operation: its error handler has the reason.");
}

bool issubdtype(Dtype dtype, Category) {
  return dtype == MLX_FLOAT16 || dtype == MLX_BFLOAT16 || dtype == MLX_FLOAT32 ||
      dtype == MLX_FLOAT64;
}

finfo::finfo(Dtype dtype)
    : min(dtype == float16        ? -kMostFloat16
              : dtype == bfloat16 ? -kMostBfloat16
                                  : std::numeric_limits<float>::lowest()) {}

array::array(std::initializer_list<float> numbers)
    : array(numbers.begin(), Shape{static_cast<int>(numbers.size())}, float32) {}

array::array(const array& number, Dtype dtype) : array(astype(number, dtype)) {}

array array::sharing(mlx_array handle) {
  array shared(mlx_array_new());
  succeed(mlx_array_set(&shared.handle_, handle));
  return shared;
}

array::array(const array& other) : array(sharing(other.handle_)) {}

Shape array::shape() const {
  const int* lengths = mlx_array_shape(handle_);
  return Shape(lengths, lengths + ndim());
}

int array::shape(int axis) const {
  return mlx_array_dim(handle_, axis);
}

template <>
const float* array::data<float>() const {
  return mlx_array_data_float32(handle_);
}

template <>
const int* array::data<int>() const {
  return mlx_array_data_int32(handle_);
}

template <>
const uint8_t* array::data<uint8_t>() const {
  return mlx_array_data_uint8(handle_);
}

template <>
float array::item<float>() const {
  float number;
  succeed(mlx_array_item_float32(&number, handle_));
  return number;
}

template <>
int array::item<int>() const {
  int number;
  succeed(mlx_array_item_int32(&number, handle_));
  return number;
}

array array::one(uint32_t number) {
  return array(of_data(&number, {}, uint32));
}

mlx_array array::of_data(const void* data, const Shape& shape, Dtype dtype) {
  const mlx_array made =
      mlx_array_new_data(data, shape.data(), static_cast<int>(shape.size()), dtype);
  succeed(!made.ctx);
  return made;
}

StreamContext::StreamContext(mlx_stream stream)
    : stream_(stream), device_(mlx_device_new()), outer_(innermost) {
  succeed(mlx_stream_get_device(&device_, stream));
  innermost = this;
}

StreamContext::~StreamContext() {
  innermost = outer_;
  mlx_device_free(device_);
}

mlx_stream StreamContext::stream() {
  return context().stream_;
}

mlx_device StreamContext::device() {
  return context().device_;
}

}  // namespace mlx_h2o::mx
