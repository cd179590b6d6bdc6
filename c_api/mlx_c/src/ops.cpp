#include "handles.h"

using namespace mlxc;

// One line per function that only forwards; the others are written out.
#define UNARY(name)                                                       \
  int mlx_##name(mlx_array* res, const mlx_array a, const mlx_stream s) { \
    return guard([&] { set(res, mx::name(get(a), get(s))); });            \
  }
#define BINARY(name)                                                                         \
  int mlx_##name(mlx_array* res, const mlx_array a, const mlx_array b, const mlx_stream s) { \
    return guard([&] { set(res, mx::name(get(a), get(b), get(s))); });                       \
  }
#define REDUCTION(name)                                                                  \
  int mlx_##name(mlx_array* res, const mlx_array a, bool keepdims, const mlx_stream s) { \
    return guard([&] { set(res, mx::name(get(a), keepdims, get(s))); });                 \
  }                                                                                      \
  int mlx_##name##_axes(                                                                 \
      mlx_array* res, const mlx_array a, const int* axes, size_t n, bool keepdims,       \
      const mlx_stream s) {                                                              \
    return guard([&] { set(res, mx::name(get(a), ints(axes, n), keepdims, get(s))); });  \
  }                                                                                      \
  int mlx_##name##_axis(                                                                 \
      mlx_array* res, const mlx_array a, int axis, bool keepdims, const mlx_stream s) {  \
    return guard([&] { set(res, mx::name(get(a), axis, keepdims, get(s))); });           \
  }
#define SPREAD(name)                                                                               \
  int mlx_##name(mlx_array* res, const mlx_array a, bool keepdims, int ddof, const mlx_stream s) { \
    return guard([&] { set(res, mx::name(get(a), keepdims, ddof, get(s))); });                     \
  }                                                                                                \
  int mlx_##name##_axes(                                                                           \
      mlx_array* res, const mlx_array a, const int* axes, size_t n, bool keepdims, int ddof,       \
      const mlx_stream s) {                                                                        \
    return guard([&] { set(res, mx::name(get(a), ints(axes, n), keepdims, ddof, get(s))); });      \
  }                                                                                                \
  int mlx_##name##_axis(                                                                           \
      mlx_array* res, const mlx_array a, int axis, bool keepdims, int ddof, const mlx_stream s) {  \
    return guard([&] { set(res, mx::name(get(a), axis, keepdims, ddof, get(s))); });               \
  }
#define ARG_REDUCTION(name)                                                              \
  int mlx_##name(mlx_array* res, const mlx_array a, bool keepdims, const mlx_stream s) { \
    return guard([&] { set(res, mx::name(get(a), keepdims, get(s))); });                 \
  }                                                                                      \
  int mlx_##name##_axis(                                                                 \
      mlx_array* res, const mlx_array a, int axis, bool keepdims, const mlx_stream s) {  \
    return guard([&] { set(res, mx::name(get(a), axis, keepdims, get(s))); });           \
  }
#define CUMULATIVE(name)                                                                 \
  int mlx_##name(                                                                        \
      mlx_array* res, const mlx_array a, int axis, bool reverse, bool inclusive,         \
      const mlx_stream s) {                                                              \
    return guard([&] { set(res, mx::name(get(a), axis, reverse, inclusive, get(s))); }); \
  }
#define SORTING(name)                                                                      \
  int mlx_##name##_axis(mlx_array* res, const mlx_array a, int axis, const mlx_stream s) { \
    return guard([&] { set(res, mx::name(get(a), axis, get(s))); });                       \
  }                                                                                        \
  UNARY(name)
#define WITH_INT(name, function)                                                           \
  int mlx_##name(mlx_array* res, const mlx_array a, int k, int axis, const mlx_stream s) { \
    return guard([&] { set(res, mx::function(get(a), k, axis, get(s))); });                \
  }
#define SCATTER(name)                                                                             \
  int mlx_##name(                                                                                 \
      mlx_array* res, const mlx_array a, const mlx_vector_array indices, const mlx_array updates, \
      const int* axes, size_t n, const mlx_stream s) {                                            \
    return guard(                                                                                 \
        [&] { set(res, mx::name(get(a), get(indices), get(updates), ints(axes, n), get(s))); });  \
  }
#define ALONG_AXIS(name)                                                                        \
  int mlx_##name(                                                                               \
      mlx_array* res, const mlx_array a, const mlx_array indices, const mlx_array values,       \
      int axis, const mlx_stream s) {                                                           \
    return guard([&] { set(res, mx::name(get(a), get(indices), get(values), axis, get(s))); }); \
  }

extern "C" {

UNARY(abs)
UNARY(ceil)
UNARY(cos)
UNARY(exp)
UNARY(expm1)
UNARY(erf)
UNARY(floor)
UNARY(isfinite)
UNARY(isinf)
UNARY(isnan)
UNARY(log)
UNARY(log1p)
UNARY(log2)
UNARY(logical_not)
UNARY(negative)
UNARY(reciprocal)
UNARY(rsqrt)
UNARY(sigmoid)
UNARY(sign)
UNARY(sin)
UNARY(sqrt)
UNARY(square)
UNARY(tanh)
UNARY(bitwise_invert)
UNARY(stop_gradient)

BINARY(add)
BINARY(divide)
BINARY(equal)
BINARY(floor_divide)
BINARY(greater)
BINARY(greater_equal)
BINARY(less)
BINARY(less_equal)
BINARY(logaddexp)
BINARY(logical_and)
BINARY(logical_or)
BINARY(maximum)
BINARY(minimum)
BINARY(multiply)
BINARY(not_equal)
BINARY(power)
BINARY(remainder)
BINARY(subtract)
BINARY(bitwise_and)
BINARY(bitwise_or)
BINARY(bitwise_xor)
BINARY(left_shift)
BINARY(right_shift)

int mlx_clip(
    mlx_array* res, const mlx_array a, const mlx_array low, const mlx_array high,
    const mlx_stream s) {
  return guard([&] { set(res, mx::clip(get(a), maybe(low), maybe(high), get(s))); });
}
int mlx_round(mlx_array* res, const mlx_array a, int decimals, const mlx_stream s) {
  return guard([&] { set(res, mx::round(get(a), decimals, get(s))); });
}
int mlx_where(
    mlx_array* res, const mlx_array condition, const mlx_array x, const mlx_array y,
    const mlx_stream s) {
  return guard([&] { set(res, mx::where(get(condition), get(x), get(y), get(s))); });
}
int mlx_nan_to_num(
    mlx_array* res, const mlx_array a, float nan, mlx_optional_float posinf,
    mlx_optional_float neginf, const mlx_stream s) {
  return guard(
      [&] { set(res, mx::nan_to_num(get(a), nan, maybe(posinf), maybe(neginf), get(s))); });
}
int mlx_allclose(
    mlx_array* res, const mlx_array a, const mlx_array b, double rtol, double atol, bool equal_nan,
    const mlx_stream s) {
  return guard([&] { set(res, mx::allclose(get(a), get(b), rtol, atol, equal_nan, get(s))); });
}
int mlx_array_equal(
    mlx_array* res, const mlx_array a, const mlx_array b, bool equal_nan, const mlx_stream s) {
  return guard([&] { set(res, mx::array_equal(get(a), get(b), equal_nan, get(s))); });
}

REDUCTION(all)
REDUCTION(any)
REDUCTION(logsumexp)
REDUCTION(max)
REDUCTION(mean)
REDUCTION(min)
REDUCTION(prod)
REDUCTION(sum)
SPREAD(std)
SPREAD(var)
ARG_REDUCTION(argmax)
ARG_REDUCTION(argmin)

int mlx_softmax(mlx_array* res, const mlx_array a, bool precise, const mlx_stream s) {
  return guard([&] { set(res, mx::softmax(get(a), precise, get(s))); });
}
int mlx_softmax_axes(
    mlx_array* res, const mlx_array a, const int* axes, size_t n, bool precise,
    const mlx_stream s) {
  return guard([&] { set(res, mx::softmax(get(a), ints(axes, n), precise, get(s))); });
}
int mlx_softmax_axis(
    mlx_array* res, const mlx_array a, int axis, bool precise, const mlx_stream s) {
  return mlx_softmax_axes(res, a, &axis, 1, precise, s);
}
CUMULATIVE(cumsum)
CUMULATIVE(cummax)
CUMULATIVE(cumprod)
CUMULATIVE(logcumsumexp)
SORTING(sort)
SORTING(argsort)
WITH_INT(partition_axis, partition)
WITH_INT(argpartition_axis, argpartition)
WITH_INT(topk_axis, topk)

UNARY(atleast_1d)
UNARY(squeeze)
UNARY(transpose)
int mlx_broadcast_to(
    mlx_array* res, const mlx_array a, const int* sizes, size_t n, const mlx_stream s) {
  return guard([&] { set(res, mx::broadcast_to(get(a), shape(sizes, n), get(s))); });
}
int mlx_broadcast_arrays(mlx_vector_array* res, const mlx_vector_array inputs, const mlx_stream s) {
  return guard([&] { set(res, mx::broadcast_arrays(get(inputs), get(s))); });
}
int mlx_concatenate(mlx_array* res, const mlx_vector_array arrays, const mlx_stream s) {
  return guard([&] { set(res, mx::concatenate(get(arrays), get(s))); });
}
int mlx_concatenate_axis(
    mlx_array* res, const mlx_vector_array arrays, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::concatenate(get(arrays), axis, get(s))); });
}
int mlx_expand_dims(mlx_array* res, const mlx_array a, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::expand_dims(get(a), axis, get(s))); });
}
int mlx_expand_dims_axes(
    mlx_array* res, const mlx_array a, const int* axes, size_t n, const mlx_stream s) {
  return guard([&] { set(res, mx::expand_dims(get(a), ints(axes, n), get(s))); });
}
int mlx_flatten(
    mlx_array* res, const mlx_array a, int start_axis, int end_axis, const mlx_stream s) {
  return guard([&] { set(res, mx::flatten(get(a), start_axis, end_axis, get(s))); });
}
WITH_INT(moveaxis, moveaxis)
WITH_INT(repeat_axis, repeat)
WITH_INT(swapaxes, swapaxes)
int mlx_pad(
    mlx_array* res, const mlx_array a, const int* axes, size_t axes_num, const int* low,
    size_t low_num, const int* high, size_t high_num, const mlx_array pad_value, const char* mode,
    const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::pad(
            get(a), ints(axes, axes_num), shape(low, low_num), shape(high, high_num),
            get(pad_value), mode, get(s)));
  });
}
int mlx_repeat(mlx_array* res, const mlx_array arr, int repeats, const mlx_stream s) {
  return guard([&] { set(res, mx::repeat(get(arr), repeats, get(s))); });
}
int mlx_reshape(mlx_array* res, const mlx_array a, const int* sizes, size_t n, const mlx_stream s) {
  return guard([&] { set(res, mx::reshape(get(a), shape(sizes, n), get(s))); });
}
int mlx_roll_axis(
    mlx_array* res, const mlx_array a, const int* shift, size_t n, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::roll(get(a), shape(shift, n), axis, get(s))); });
}
int mlx_split(
    mlx_vector_array* res, const mlx_array a, int num_splits, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::split(get(a), num_splits, axis, get(s))); });
}
int mlx_split_sections(
    mlx_vector_array* res, const mlx_array a, const int* indices, size_t n, int axis,
    const mlx_stream s) {
  return guard([&] { set(res, mx::split(get(a), shape(indices, n), axis, get(s))); });
}
int mlx_squeeze_axes(
    mlx_array* res, const mlx_array a, const int* axes, size_t n, const mlx_stream s) {
  return guard([&] { set(res, mx::squeeze(get(a), ints(axes, n), get(s))); });
}
int mlx_squeeze_axis(mlx_array* res, const mlx_array a, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::squeeze(get(a), axis, get(s))); });
}
int mlx_stack(mlx_array* res, const mlx_vector_array arrays, const mlx_stream s) {
  return guard([&] { set(res, mx::stack(get(arrays), get(s))); });
}
int mlx_stack_axis(mlx_array* res, const mlx_vector_array arrays, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::stack(get(arrays), axis, get(s))); });
}
int mlx_tile(mlx_array* res, const mlx_array arr, const int* reps, size_t n, const mlx_stream s) {
  return guard([&] { set(res, mx::tile(get(arr), ints(reps, n), get(s))); });
}
int mlx_transpose_axes(
    mlx_array* res, const mlx_array a, const int* axes, size_t n, const mlx_stream s) {
  return guard([&] { set(res, mx::transpose(get(a), ints(axes, n), get(s))); });
}
int mlx_unflatten(
    mlx_array* res, const mlx_array a, int axis, const int* sizes, size_t n, const mlx_stream s) {
  return guard([&] { set(res, mx::unflatten(get(a), axis, shape(sizes, n), get(s))); });
}
int mlx_as_strided(
    mlx_array* res, const mlx_array a, const int* sizes, size_t n, const int64_t* strides,
    size_t strides_num, size_t offset, const mlx_stream s) {
  return guard([&] {
    mx::Strides steps(strides, strides + strides_num);
    set(res, mx::as_strided(get(a), shape(sizes, n), steps, offset, get(s)));
  });
}

BINARY(take)
int mlx_take_axis(
    mlx_array* res, const mlx_array a, const mlx_array indices, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::take(get(a), get(indices), axis, get(s))); });
}
int mlx_take_along_axis(
    mlx_array* res, const mlx_array a, const mlx_array indices, int axis, const mlx_stream s) {
  return guard([&] { set(res, mx::take_along_axis(get(a), get(indices), axis, get(s))); });
}
ALONG_AXIS(put_along_axis)
ALONG_AXIS(scatter_add_axis)
int mlx_gather(
    mlx_array* res, const mlx_array a, const mlx_vector_array indices, const int* axes,
    size_t axes_num, const int* sizes, size_t sizes_num, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::gather(get(a), get(indices), ints(axes, axes_num), shape(sizes, sizes_num), get(s)));
  });
}
SCATTER(scatter)
SCATTER(scatter_add)
int mlx_slice(
    mlx_array* res, const mlx_array a, const int* start, size_t start_num, const int* stop,
    size_t stop_num, const int* strides, size_t strides_num, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::slice(
            get(a), shape(start, start_num), shape(stop, stop_num), shape(strides, strides_num),
            get(s)));
  });
}
int mlx_slice_dynamic(
    mlx_array* res, const mlx_array a, const mlx_array start, const int* axes, size_t axes_num,
    const int* sizes, size_t sizes_num, const mlx_stream s) {
  return guard([&] {
    set(res, mx::slice(get(a), get(start), ints(axes, axes_num), shape(sizes, sizes_num), get(s)));
  });
}
int mlx_slice_update(
    mlx_array* res, const mlx_array src, const mlx_array update, const int* start, size_t start_num,
    const int* stop, size_t stop_num, const int* strides, size_t strides_num, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::slice_update(
            get(src), get(update), shape(start, start_num), shape(stop, stop_num),
            shape(strides, strides_num), get(s)));
  });
}
int mlx_slice_update_dynamic(
    mlx_array* res, const mlx_array src, const mlx_array update, const mlx_array start,
    const int* axes, size_t n, const mlx_stream s) {
  return guard([&] {
    set(res, mx::slice_update(get(src), get(update), get(start), ints(axes, n), get(s)));
  });
}

BINARY(matmul)
BINARY(inner)
BINARY(outer)
int mlx_addmm(
    mlx_array* res, const mlx_array c, const mlx_array a, const mlx_array b, float alpha,
    float beta, const mlx_stream s) {
  return guard([&] { set(res, mx::addmm(get(c), get(a), get(b), alpha, beta, get(s))); });
}
int mlx_einsum(
    mlx_array* res, const char* subscripts, const mlx_vector_array operands, const mlx_stream s) {
  return guard([&] { set(res, mx::einsum(subscripts, get(operands), get(s))); });
}
int mlx_diag(mlx_array* res, const mlx_array a, int k, const mlx_stream s) {
  return guard([&] { set(res, mx::diag(get(a), k, get(s))); });
}
int mlx_tri(mlx_array* res, int n, int m, int k, mlx_dtype type, const mlx_stream s) {
  return guard([&] { set(res, mx::tri(n, m, k, dtype(type), get(s))); });
}
int mlx_tril(mlx_array* res, const mlx_array x, int k, const mlx_stream s) {
  return guard([&] { set(res, mx::tril(get(x), k, get(s))); });
}
int mlx_triu(mlx_array* res, const mlx_array x, int k, const mlx_stream s) {
  return guard([&] { set(res, mx::triu(get(x), k, get(s))); });
}

int mlx_quantize(
    mlx_vector_array* res, const mlx_array w, mlx_optional_int group_size, mlx_optional_int bits,
    const char* mode, const mlx_array global_scale, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::quantize(get(w), maybe(group_size), maybe(bits), mode, maybe(global_scale), get(s)));
  });
}
int mlx_dequantize(
    mlx_array* res, const mlx_array w, const mlx_array scales, const mlx_array biases,
    mlx_optional_int group_size, mlx_optional_int bits, const char* mode,
    const mlx_array global_scale, mlx_optional_dtype dtype, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::dequantize(
            get(w), get(scales), maybe(biases), maybe(group_size), maybe(bits), mode,
            maybe(global_scale), maybe(dtype), get(s)));
  });
}
int mlx_quantized_matmul(
    mlx_array* res, const mlx_array x, const mlx_array w, const mlx_array scales,
    const mlx_array biases, bool transpose, mlx_optional_int group_size, mlx_optional_int bits,
    const char* mode, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::quantized_matmul(
            get(x), get(w), get(scales), maybe(biases), transpose, maybe(group_size), maybe(bits),
            mode, get(s)));
  });
}

int mlx_arange(
    mlx_array* res, double start, double stop, double step, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::arange(start, stop, step, dtype(t), get(s))); });
}
int mlx_full(
    mlx_array* res, const int* sizes, size_t n, const mlx_array vals, mlx_dtype t,
    const mlx_stream s) {
  return guard([&] { set(res, mx::full(shape(sizes, n), get(vals), dtype(t), get(s))); });
}
int mlx_full_like(
    mlx_array* res, const mlx_array a, const mlx_array vals, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::full_like(get(a), get(vals), dtype(t), get(s))); });
}
int mlx_linspace(
    mlx_array* res, double start, double stop, int num, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::linspace(start, stop, num, dtype(t), get(s))); });
}
int mlx_ones(mlx_array* res, const int* sizes, size_t n, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::ones(shape(sizes, n), dtype(t), get(s))); });
}
int mlx_zeros(mlx_array* res, const int* sizes, size_t n, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::zeros(shape(sizes, n), dtype(t), get(s))); });
}
UNARY(ones_like)
UNARY(zeros_like)
int mlx_eye(mlx_array* res, int n, int m, int k, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::eye(n, m, k, dtype(t), get(s))); });
}

UNARY(copy)
int mlx_astype(mlx_array* res, const mlx_array a, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::astype(get(a), dtype(t), get(s))); });
}
int mlx_contiguous(mlx_array* res, const mlx_array a, bool allow_col_major, const mlx_stream s) {
  return guard([&] { set(res, mx::contiguous(get(a), allow_col_major, get(s))); });
}
int mlx_view(mlx_array* res, const mlx_array a, mlx_dtype t, const mlx_stream s) {
  return guard([&] { set(res, mx::view(get(a), dtype(t), get(s))); });
}
int mlx_depends(
    mlx_vector_array* res, const mlx_vector_array inputs, const mlx_vector_array dependencies) {
  return guard([&] { set(res, mx::depends(get(inputs), get(dependencies))); });
}

}  // extern "C"
