#include "inputs.h"

#include <stdlib.h>
#include <string.h>

size_t size_of(const int* shape, int rank) {
  size_t size = 1;
  for (int i = 0; i < rank; ++i) size *= (size_t)shape[i];
  return size;
}

float* numbers_of(Case* c, enum Which which, int layer, size_t n, int power) {
  float* numbers = malloc((n ? n : 1) * sizeof *numbers);
  if (!numbers) exit(2);
  fill_numbers(numbers, n, seed_of(int_of(c, "seed"), which, layer), power);
  return numbers;
}

mlx_dtype dtype_of(const char* name) {
  if (!strcmp(name, "float16")) return MLX_FLOAT16;
  return strcmp(name, "bfloat16") ? MLX_FLOAT32 : MLX_BFLOAT16;
}

mlx_array array_of(
    const Replay* r, const float* data, const int* shape, int rank, mlx_dtype dtype) {
  mlx_array exact = mlx_array_new_data(data, shape, rank, MLX_FLOAT32), cast = mlx_array_new();
  TRY(mlx_astype(&cast, exact, dtype, r->s));
  mlx_array_free(exact);
  return cast;
}

mlx_array tensor(
    const Replay* r, enum Which which, const int* shape, int rank, mlx_dtype dtype, int power) {
  float* numbers = numbers_of(r->c, which, 0, size_of(shape, rank), power);
  mlx_array made = array_of(r, numbers, shape, rank, dtype);
  free(numbers);
  return made;
}

mlx_h2o_policy policy_of(Case* c) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  TRY(mlx_h2o_policy_named(&policy, text_of(c, "policy.name")));
  for (size_t p = 0; p < c->count; ++p) {
    Parameter* parameter = &c->parameters[p];
    if (strncmp(parameter->name, "policy.", 7) || !strcmp(parameter->name, "policy.name")) continue;
    parameter->read = true;
    TRY(mlx_h2o_policy_set(policy, parameter->name + 7, parameter->value));
  }
  return policy;
}

mlx_array rows_of(
    const Replay* r, const float* data, int batch, int heads, int rows, int width, int first,
    int count) {
  const int shape[] = {batch, heads, count, width};
  float* part = malloc(size_of(shape, 4) * sizeof *part);
  if (!part) exit(2);
  for (int i = 0; i < batch * heads; ++i)
    memcpy(
        part + (size_t)i * count * width, data + ((size_t)i * rows + first) * width,
        (size_t)count * width * sizeof *part);
  mlx_array made = array_of(r, part, shape, width == 1 ? 3 : 4, MLX_FLOAT32);
  free(part);
  return made;
}

mlx_h2o_cache_options options_of(Case* c, int kv_heads) {
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.remainder = flag_of(c, "cache.remainder");
  if (text_or_null(c, "cache.attending")) options.attending = flag_of(c, "cache.attending");
  if (text_or_null(c, "cache.bits")) options.k_bits = options.v_bits = int_of(c, "cache.bits");
  if (text_or_null(c, "cache.k_bits")) options.k_bits = int_of(c, "cache.k_bits");
  if (text_or_null(c, "cache.v_bits")) options.v_bits = int_of(c, "cache.v_bits");
  if (text_or_null(c, "cache.group_size")) options.group_size = int_of(c, "cache.group_size");
  if (text_or_null(c, "cache.recent_bits")) options.recent_bits = int_of(c, "cache.recent_bits");
  if (text_or_null(c, "cache.saturation"))
    options.saturation = fractions_of(c, "cache.saturation", (size_t)kv_heads);
  return options;
}

mlx_array part_of_frame(const Replay* r, const char* name, int layer) {
  mlx_array all = golden(r, "in", name), part = kNone, squeezed = kNone;
  if (!all.ctx) return kNone;
  const int first[] = {layer, 0, 0},
            last[] = {layer + 1, mlx_array_dim(all, 1), mlx_array_dim(all, 2)}, step[] = {1, 1, 1};
  TRY(mlx_slice(&part, all, first, 3, last, 3, step, 3, r->s));
  TRY(mlx_squeeze_axis(&squeezed, part, 0, r->s));
  mlx_array_free(all), mlx_array_free(part);
  return squeezed;
}
