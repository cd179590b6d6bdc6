#ifndef MLX_RANDOM_H
#define MLX_RANDOM_H

#include <stdint.h>

#include "mlx/c/array.h"
#include "mlx/c/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

// Without a key (an empty array) the calling thread's own sequence is used.
int mlx_random_seed(uint64_t seed);
int mlx_random_key(mlx_array* res, uint64_t seed);
int mlx_random_split(mlx_array* res_0, mlx_array* res_1, const mlx_array key, const mlx_stream s);
int mlx_random_split_num(mlx_array* res, const mlx_array key, int num, const mlx_stream s);
int mlx_random_bits(
    mlx_array* res, const int* shape, size_t shape_num, int width,
    const mlx_array key /* may be null */, const mlx_stream s);
int mlx_random_uniform(
    mlx_array* res, const mlx_array low, const mlx_array high, const int* shape, size_t shape_num,
    mlx_dtype dtype, const mlx_array key /* may be null */, const mlx_stream s);
int mlx_random_normal(
    mlx_array* res, const int* shape, size_t shape_num, mlx_dtype dtype, float loc, float scale,
    const mlx_array key /* may be null */, const mlx_stream s);
int mlx_random_randint(
    mlx_array* res, const mlx_array low, const mlx_array high, const int* shape, size_t shape_num,
    mlx_dtype dtype, const mlx_array key /* may be null */, const mlx_stream s);
int mlx_random_bernoulli(
    mlx_array* res, const mlx_array p, const int* shape, size_t shape_num,
    const mlx_array key /* may be null */, const mlx_stream s);
int mlx_random_categorical(
    mlx_array* res, const mlx_array logits, int axis, const mlx_array key /* may be null */,
    const mlx_stream s);

#ifdef __cplusplus
}
#endif

#endif
