#include "operations.h"

namespace mlx_h2o::mx {

namespace {

// The array that an operation of mlx-c gives on the stream of the call.
template <auto operation, class... Arguments>
array result(Arguments... arguments) {
  mlx_array made = mlx_array_new();
  const int status = operation(&made, arguments..., StreamContext::stream());
  array owned = array::owning(made);
  succeed(status);
  return owned;
}

template <auto operation>
array of_one(const array& a) {
  return result<operation>(a.handle());
}

template <auto operation>
array of_two(const array& a, const array& b) {
  return result<operation>(a.handle(), b.handle());
}

// mlx-c's list of arrays.
class Arrays {
 public:
  Arrays() : handle(mlx_vector_array_new()) {}
  explicit Arrays(const std::vector<array>& arrays) : Arrays() {
    for (const array& a : arrays) succeed(mlx_vector_array_append_value(handle, a.handle()));
  }
  Arrays(const Arrays&) = delete;
  ~Arrays() {
    mlx_vector_array_free(handle);
  }

  mlx_vector_array handle;
};

mlx_optional_int given(int number) {
  return {number, true};
}

}  // namespace

array abs(const array& a) {
  return of_one<mlx_abs>(a);
}
array cos(const array& a) {
  return of_one<mlx_cos>(a);
}
array exp(const array& a) {
  return of_one<mlx_exp>(a);
}
array isnan(const array& a) {
  return of_one<mlx_isnan>(a);
}
array log(const array& a) {
  return of_one<mlx_log>(a);
}
array round(const array& a) {
  return result<mlx_round>(a.handle(), 0);
}
array rsqrt(const array& a) {
  return of_one<mlx_rsqrt>(a);
}
array sin(const array& a) {
  return of_one<mlx_sin>(a);
}
array sqrt(const array& a) {
  return of_one<mlx_sqrt>(a);
}
array square(const array& a) {
  return of_one<mlx_square>(a);
}

array operator+(const array& a, const array& b) {
  return of_two<mlx_add>(a, b);
}
array operator-(const array& a, const array& b) {
  return of_two<mlx_subtract>(a, b);
}
array operator*(const array& a, const array& b) {
  return of_two<mlx_multiply>(a, b);
}
array operator/(const array& a, const array& b) {
  return of_two<mlx_divide>(a, b);
}
array operator==(const array& a, const array& b) {
  return of_two<mlx_equal>(a, b);
}
array bitwise_and(const array& a, const array& b) {
  return of_two<mlx_bitwise_and>(a, b);
}
array greater(const array& a, const array& b) {
  return of_two<mlx_greater>(a, b);
}
array greater_equal(const array& a, const array& b) {
  return of_two<mlx_greater_equal>(a, b);
}
array left_shift(const array& a, const array& b) {
  return of_two<mlx_left_shift>(a, b);
}
array less(const array& a, const array& b) {
  return of_two<mlx_less>(a, b);
}
array less_equal(const array& a, const array& b) {
  return of_two<mlx_less_equal>(a, b);
}
array logaddexp(const array& a, const array& b) {
  return of_two<mlx_logaddexp>(a, b);
}
array logical_and(const array& a, const array& b) {
  return of_two<mlx_logical_and>(a, b);
}
array maximum(const array& a, const array& b) {
  return of_two<mlx_maximum>(a, b);
}
array minimum(const array& a, const array& b) {
  return of_two<mlx_minimum>(a, b);
}
array right_shift(const array& a, const array& b) {
  return of_two<mlx_right_shift>(a, b);
}

array clip(const array& a, const array& least, const array& most) {
  return result<mlx_clip>(a.handle(), least.handle(), most.handle());
}
array where(const array& condition, const array& x, const array& y) {
  return result<mlx_where>(condition.handle(), x.handle(), y.handle());
}

array max(const array& a) {
  return result<mlx_max>(a.handle(), false);
}
array max(const array& a, int axis) {
  return result<mlx_max_axis>(a.handle(), axis, false);
}
array min(const array& a) {
  return result<mlx_min>(a.handle(), false);
}
array min(const array& a, int axis) {
  return result<mlx_min_axis>(a.handle(), axis, false);
}
array logsumexp(const array& a, int axis) {
  return result<mlx_logsumexp_axis>(a.handle(), axis, false);
}
array mean(const array& a, int axis, bool keepdims) {
  return result<mlx_mean_axis>(a.handle(), axis, keepdims);
}
array sum(const array& a, int axis, bool keepdims) {
  return result<mlx_sum_axis>(a.handle(), axis, keepdims);
}
array argsort(const array& a, int axis) {
  return result<mlx_argsort_axis>(a.handle(), axis);
}
array matmul(const array& a, const array& b) {
  return of_two<mlx_matmul>(a, b);
}
array put_along_axis(const array& a, const array& indices, const array& values, int axis) {
  return result<mlx_put_along_axis>(a.handle(), indices.handle(), values.handle(), axis);
}
array take(const array& a, const array& indices, int axis) {
  return result<mlx_take_axis>(a.handle(), indices.handle(), axis);
}
array take_along_axis(const array& a, const array& indices, int axis) {
  return result<mlx_take_along_axis>(a.handle(), indices.handle(), axis);
}

array broadcast_to(const array& a, const Shape& shape) {
  return result<mlx_broadcast_to>(a.handle(), shape.data(), shape.size());
}
array concatenate(const std::vector<array>& arrays, int axis) {
  const Arrays parts(arrays);
  return result<mlx_concatenate_axis>(parts.handle, axis);
}
array expand_dims(const array& a, int axis) {
  return result<mlx_expand_dims>(a.handle(), axis);
}
array flatten(const array& a, int first, int last) {
  return result<mlx_flatten>(a.handle(), first, last);
}
array pad(const array& a, const std::vector<std::pair<int, int>>& widths, const array& value) {
  std::vector<int> axes, low, high;
  for (const auto& [before, after] : widths) {
    axes.push_back(static_cast<int>(axes.size()));
    low.push_back(before);
    high.push_back(after);
  }
  return result<mlx_pad>(
      a.handle(), axes.data(), axes.size(), low.data(), low.size(), high.data(), high.size(),
      value.handle(), "constant");
}
array repeat(const array& a, int times, int axis) {
  return result<mlx_repeat_axis>(a.handle(), times, axis);
}
array reshape(const array& a, const Shape& shape) {
  return result<mlx_reshape>(a.handle(), shape.data(), shape.size());
}
array roll(const array& a, int shift, int axis) {
  return result<mlx_roll_axis>(a.handle(), &shift, size_t(1), axis);
}
array slice(const array& a, const Shape& start, const Shape& stop) {
  const Shape steps(start.size(), 1);
  return result<mlx_slice>(
      a.handle(), start.data(), start.size(), stop.data(), stop.size(), steps.data(), steps.size());
}
array squeeze(const array& a, int axis) {
  return result<mlx_squeeze_axis>(a.handle(), axis);
}
array swapaxes(const array& a, int first, int second) {
  return result<mlx_swapaxes>(a.handle(), first, second);
}

array arange(int start, int stop, int step) {
  return result<mlx_arange>(double(start), double(stop), double(step), int32);
}
array full(const Shape& shape, const array& value) {
  return result<mlx_full>(shape.data(), shape.size(), value.handle(), value.dtype());
}
array ones(const Shape& shape, Dtype dtype) {
  return result<mlx_ones>(shape.data(), shape.size(), dtype);
}
array zeros(const Shape& shape, Dtype dtype) {
  return result<mlx_zeros>(shape.data(), shape.size(), dtype);
}
array astype(const array& a, Dtype dtype) {
  return result<mlx_astype>(a.handle(), dtype);
}
array view(const array& a, Dtype dtype) {
  return result<mlx_view>(a.handle(), dtype);
}
array contiguous(const array& a) {
  return result<mlx_contiguous>(a.handle(), false);
}
array contiguous(const array& a, bool column_major, Device) {
  const mlx_stream cpu = mlx_default_cpu_stream_new();
  mlx_array made = mlx_array_new();
  const int status = mlx_contiguous(&made, a.handle(), column_major, cpu);
  mlx_stream_free(cpu);
  array owned = array::owning(made);
  succeed(status);
  return owned;
}
array dequantize(
    const array& words, const array& scales, const array& biases, int group_size, int bits) {
  return result<mlx_dequantize>(
      words.handle(), scales.handle(), biases.handle(), given(group_size), given(bits), "affine",
      mlx_array{}, mlx_optional_dtype{});
}
std::vector<array> depends(
    const std::vector<array>& inputs, const std::vector<array>& dependencies) {
  const Arrays given(inputs), first(dependencies);
  Arrays made;
  succeed(mlx_depends(&made.handle, given.handle, first.handle));
  std::vector<array> results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    mlx_array one = mlx_array_new();
    const int status = mlx_vector_array_get(&one, made.handle, i);
    results.push_back(array::owning(one));
    succeed(status);
  }
  return results;
}

}  // namespace mlx_h2o::mx
