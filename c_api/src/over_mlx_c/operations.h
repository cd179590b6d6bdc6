// The operations of MLX that the engine uses, over mlx-c: names and arguments are those of MLX's
// C++ API, but for streams: they go to that of the call (StreamContext).
#pragma once

#include "array.h"

namespace mlx_h2o::mx {

// -- elementwise ----------------------------------------------------------------------------------

array abs(const array& a);
array cos(const array& a);
array exp(const array& a);
array isnan(const array& a);
array log(const array& a);
array round(const array& a);
array rsqrt(const array& a);
array sin(const array& a);
array sqrt(const array& a);
array square(const array& a);

array operator+(const array& a, const array& b);
array operator-(const array& a, const array& b);
array operator*(const array& a, const array& b);
array operator/(const array& a, const array& b);
// Element by element, as in MLX.
array operator==(const array& a, const array& b);
array bitwise_and(const array& a, const array& b);
array greater(const array& a, const array& b);
array greater_equal(const array& a, const array& b);
array left_shift(const array& a, const array& b);
array less(const array& a, const array& b);
array less_equal(const array& a, const array& b);
array logaddexp(const array& a, const array& b);
array logical_and(const array& a, const array& b);
array maximum(const array& a, const array& b);
array minimum(const array& a, const array& b);
array right_shift(const array& a, const array& b);

array clip(const array& a, const array& least, const array& most);
array where(const array& condition, const array& x, const array& y);

// -- along axes -----------------------------------------------------------------------------------

array max(const array& a);
array max(const array& a, int axis);
array min(const array& a);
array min(const array& a, int axis);
array logsumexp(const array& a, int axis);
array mean(const array& a, int axis, bool keepdims = false);
array sum(const array& a, int axis, bool keepdims = false);
array argsort(const array& a, int axis);
array matmul(const array& a, const array& b);
array put_along_axis(const array& a, const array& indices, const array& values, int axis);
array take(const array& a, const array& indices, int axis);
array take_along_axis(const array& a, const array& indices, int axis);

// -- shapes ---------------------------------------------------------------------------------------

array broadcast_to(const array& a, const Shape& shape);
array concatenate(const std::vector<array>& arrays, int axis);
array expand_dims(const array& a, int axis);
array flatten(const array& a, int first, int last);
array pad(const array& a, const std::vector<std::pair<int, int>>& widths, const array& value);
array repeat(const array& a, int times, int axis);
array reshape(const array& a, const Shape& shape);
array roll(const array& a, int shift, int axis);
array slice(const array& a, const Shape& start, const Shape& stop);
array squeeze(const array& a, int axis);
array swapaxes(const array& a, int first, int second);

// -- arrays and their types -----------------------------------------------------------------------

array arange(int start, int stop, int step);
array full(const Shape& shape, const array& value);
array ones(const Shape& shape, Dtype dtype = float32);
array zeros(const Shape& shape, Dtype dtype = float32);
array astype(const array& a, Dtype dtype);
// The same bytes as numbers of another dtype, of which the last axis is more or fewer.
array view(const array& a, Dtype dtype);
array contiguous(const array& a);
array contiguous(const array& a, bool column_major, Device device);
array dequantize(
    const array& words, const array& scales, const array& biases, int group_size, int bits);
std::vector<array> depends(
    const std::vector<array>& inputs, const std::vector<array>& dependencies);

}  // namespace mlx_h2o::mx
