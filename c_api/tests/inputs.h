// Arrays and policies as a case's parameters describe them.
#ifndef INPUTS_H
#define INPUTS_H

#include "compare.h"
#include "numbers.h"

static const mlx_array kNone = {NULL};

size_t size_of(const int* shape, int rank);
// A generated tensor's numbers. To be freed.
float* numbers_of(Case* c, enum Which which, int layer, size_t n, int power);
mlx_dtype dtype_of(const char* name);
// An array of these numbers, rounded to a dtype.
mlx_array array_of(const Replay* r, const float* data, const int* shape, int rank, mlx_dtype dtype);
// A generated tensor of the case, in layer 0.
mlx_array tensor(
    const Replay* r, enum Which which, const int* shape, int rank, mlx_dtype dtype, int power);
// Rows first to first + count - 1 of data [batch, heads, rows, width]; [batch, heads, count] where
// the width is 1.
mlx_array rows_of(
    const Replay* r, const float* data, int batch, int heads, int rows, int width, int first,
    int count);
mlx_h2o_policy policy_of(Case* c);
// A case's cache.*; saturation is to be freed.
mlx_h2o_cache_options options_of(Case* c, int kv_heads);
// Of a layer's frame "frame.centre" or "frame.scale" [layers, Hk, D], where the case has one.
mlx_array part_of_frame(const Replay* r, const char* name, int layer);

#endif
