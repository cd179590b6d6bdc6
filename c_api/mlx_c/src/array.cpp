#include <cstring>
#include <sstream>

#include "handles.h"

using namespace mlxc;

namespace mlxc {

// In the order of mlx_dtype.
static const mx::Dtype dtypes[] = {
    mx::bool_, mx::uint8, mx::uint16,  mx::uint32,  mx::uint64,  mx::int8,     mx::int16,
    mx::int32, mx::int64, mx::float16, mx::float32, mx::float64, mx::bfloat16, mx::complex64};

mx::Dtype dtype(mlx_dtype t) {
  return dtypes[t];
}

static mlx_dtype dtype(mx::Dtype t) {
  for (int i = 0;; ++i)
    if (dtypes[i] == t) return static_cast<mlx_dtype>(i);
}

static mx::array from_bytes(const void* data, mx::Shape shape, mx::Dtype type) {
  mx::array out(0, type);
  size_t bytes = type.size();
  for (int n : shape) bytes *= n;
  auto storage = mx::allocator::malloc(bytes);
  std::memcpy(storage.buffer().raw_ptr(), data, bytes);
  return mx::array(std::move(storage), std::move(shape), type);
}

template <class T>
static int item(T* res, mlx_array arr) {
  return guard([&] {
    auto& a = get(arr);
    if (a.size() != 1) throw std::invalid_argument("item() needs an array of one element");
    evaluate({a});
    *res = *a.data<T>();
  });
}

template <class T>
static const T* data(mlx_array arr) {
  return guarded<const T*>(nullptr, [&]() -> const T* {
    return get(arr).is_available() ? get(arr).data<T>() : nullptr;
  });
}

}  // namespace mlxc

extern "C" {

mlx_string mlx_string_new(void) {
  return {nullptr};
}
mlx_string mlx_string_new_data(const char* str) {
  return make<mlx_string>(str);
}
int mlx_string_set(mlx_string* str, const mlx_string src) {
  return guard([&] { set(str, get(src)); });
}
const char* mlx_string_data(mlx_string str) {
  return guarded<const char*>(nullptr, [&] { return get(str).c_str(); });
}
int mlx_string_free(mlx_string str) {
  release(str);
  return 0;
}

size_t mlx_dtype_size(mlx_dtype t) {
  return dtype(t).size();
}

mlx_array mlx_array_new(void) {
  return {nullptr};
}
mlx_array mlx_array_new_bool(bool val) {
  return make<mlx_array>(mx::array(val));
}
mlx_array mlx_array_new_int(int val) {
  return make<mlx_array>(mx::array(val));
}
mlx_array mlx_array_new_float32(float val) {
  return make<mlx_array>(mx::array(val));
}
mlx_array mlx_array_new_float(float val) {
  return make<mlx_array>(mx::array(val));
}
mlx_array mlx_array_new_float64(double val) {
  return make<mlx_array>(mx::array(val, mx::float64));
}
mlx_array mlx_array_new_data(const void* data, const int* sizes, int dim, mlx_dtype t) {
  return guarded<mlx_array>(
      {nullptr}, [&] { return make<mlx_array>(from_bytes(data, shape(sizes, dim), dtype(t))); });
}
mlx_array mlx_array_new_data_managed(
    void* data, const int* sizes, int dim, mlx_dtype t, void (*dtor)(void*)) {
  return guarded<mlx_array>({nullptr}, [&] {
    return make<mlx_array>(mx::array(data, shape(sizes, dim), dtype(t), dtor));
  });
}
int mlx_array_set(mlx_array* arr, const mlx_array src) {
  return guard([&] { set(arr, get(src)); });
}
int mlx_array_free(mlx_array arr) {
  release(arr);
  return 0;
}

int mlx_array_tostring(mlx_string* str, const mlx_array arr) {
  return guard([&] {
    evaluate({get(arr)});
    std::ostringstream text;
    text << get(arr);
    set(str, text.str());
  });
}
size_t mlx_array_itemsize(const mlx_array arr) {
  return guarded<size_t>(0, [&] { return get(arr).itemsize(); });
}
size_t mlx_array_size(const mlx_array arr) {
  return guarded<size_t>(0, [&] { return get(arr).size(); });
}
size_t mlx_array_nbytes(const mlx_array arr) {
  return guarded<size_t>(0, [&] { return get(arr).nbytes(); });
}
size_t mlx_array_ndim(const mlx_array arr) {
  return guarded<size_t>(0, [&] { return get(arr).ndim(); });
}
const int* mlx_array_shape(const mlx_array arr) {
  return guarded<const int*>(nullptr, [&] { return get(arr).shape().data(); });
}
const size_t* mlx_array_strides(const mlx_array arr) {
  return guarded<const size_t*>(
      nullptr, [&] { return reinterpret_cast<const size_t*>(get(arr).strides().data()); });
}
int mlx_array_dim(const mlx_array arr, int dim) {
  return guarded<int>(0, [&] { return get(arr).shape(dim); });
}
mlx_dtype mlx_array_dtype(const mlx_array arr) {
  return guarded<mlx_dtype>(MLX_BOOL, [&] { return dtype(get(arr).dtype()); });
}
int mlx_array_eval(mlx_array arr) {
  return guard([&] { evaluate({get(arr)}); });
}

#define ELEMENT(name, type)                                   \
  int mlx_array_item_##name(type* res, const mlx_array arr) { \
    return item(res, arr);                                    \
  }                                                           \
  const type* mlx_array_data_##name(const mlx_array arr) {    \
    return data<type>(arr);                                   \
  }
ELEMENT(bool, bool)
ELEMENT(uint8, uint8_t)
ELEMENT(uint16, uint16_t)
ELEMENT(uint32, uint32_t)
ELEMENT(uint64, uint64_t)
ELEMENT(int8, int8_t)
ELEMENT(int16, int16_t)
ELEMENT(int32, int32_t)
ELEMENT(int64, int64_t)
ELEMENT(float32, float)
ELEMENT(float64, double)
#undef ELEMENT

int _mlx_array_is_available(bool* res, const mlx_array arr) {
  return guard([&] { *res = get(arr).is_available(); });
}
int _mlx_array_wait(const mlx_array arr) {
  return guard([&] { get(arr).wait(); });
}
int _mlx_array_is_contiguous(bool* res, const mlx_array arr) {
  return guard([&] { *res = get(arr).flags().contiguous; });
}
int _mlx_array_is_row_contiguous(bool* res, const mlx_array arr) {
  return guard([&] { *res = get(arr).flags().row_contiguous; });
}

}  // extern "C"
