#include "handles.h"

using namespace mlxc;

extern "C" {

int mlx_random_seed(uint64_t seed) {
  return guard([&] { mx::random::seed(seed); });
}
int mlx_random_key(mlx_array* res, uint64_t seed) {
  return guard([&] { set(res, mx::random::key(seed)); });
}
int mlx_random_split(mlx_array* res_0, mlx_array* res_1, const mlx_array key, const mlx_stream s) {
  return guard([&] {
    auto [first, second] = mx::random::split(get(key), get(s));
    set(res_0, first);
    set(res_1, second);
  });
}
int mlx_random_split_num(mlx_array* res, const mlx_array key, int num, const mlx_stream s) {
  return guard([&] { set(res, mx::random::split(get(key), num, get(s))); });
}
int mlx_random_bits(
    mlx_array* res, const int* sizes, size_t n, int width, const mlx_array key,
    const mlx_stream s) {
  return guard([&] { set(res, mx::random::bits(shape(sizes, n), width, maybe(key), get(s))); });
}
int mlx_random_uniform(
    mlx_array* res, const mlx_array low, const mlx_array high, const int* sizes, size_t n,
    mlx_dtype t, const mlx_array key, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::random::uniform(get(low), get(high), shape(sizes, n), dtype(t), maybe(key), get(s)));
  });
}
int mlx_random_normal(
    mlx_array* res, const int* sizes, size_t n, mlx_dtype t, float loc, float scale,
    const mlx_array key, const mlx_stream s) {
  return guard([&] {
    set(res, mx::random::normal(shape(sizes, n), dtype(t), loc, scale, maybe(key), get(s)));
  });
}
int mlx_random_randint(
    mlx_array* res, const mlx_array low, const mlx_array high, const int* sizes, size_t n,
    mlx_dtype t, const mlx_array key, const mlx_stream s) {
  return guard([&] {
    set(res,
        mx::random::randint(get(low), get(high), shape(sizes, n), dtype(t), maybe(key), get(s)));
  });
}
int mlx_random_bernoulli(
    mlx_array* res, const mlx_array p, const int* sizes, size_t n, const mlx_array key,
    const mlx_stream s) {
  return guard(
      [&] { set(res, mx::random::bernoulli(get(p), shape(sizes, n), maybe(key), get(s))); });
}
int mlx_random_categorical(
    mlx_array* res, const mlx_array logits, int axis, const mlx_array key, const mlx_stream s) {
  return guard([&] { set(res, mx::random::categorical(get(logits), axis, maybe(key), get(s))); });
}

}  // extern "C"
