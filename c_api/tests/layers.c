#include "layers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Stream stream_of(const Replay* r, int layer, int T) {
  Case* c = r->c;
  const int Hq = int_of(c, "query_heads"), Hk = int_of(c, "kv_heads");
  const int D = int_of(c, "key_width"), Dv = int_of(c, "value_width");
  const size_t rows = (size_t)int_of(c, "batch") * T;
  Stream stream = {
      numbers_of(c, Q, layer, rows * Hq * D, 0), numbers_of(c, K, layer, rows * Hk * D, 0),
      numbers_of(c, V, layer, rows * Hk * Dv, 0), mlx_array_new()};
  if (flag_of(c, "sinks")) {
    float* numbers = numbers_of(c, SINKS, layer, (size_t)Hq, 0);
    stream.sinks = array_of(r, numbers, &Hq, 1, MLX_FLOAT32);
    free(numbers);
  }
  return stream;
}

void layers_free(Stream* streams, mlx_h2o_cache* caches, int layers) {
  for (int l = 0; l < layers; ++l) {
    mlx_h2o_cache_free(caches[l]);
    mlx_array_free(streams[l].sinks);
    free(streams[l].q), free(streams[l].k), free(streams[l].v);
  }
  free(streams), free(caches);
}

void expect_remainders(Replay* r, const mlx_h2o_cache* caches, int layers) {
  const char* const names[] = {"count", "mean_key", "var_key", "mean_value"};
  mlx_h2o_remainder remainder = mlx_h2o_remainder_new();
  const bool remembers = !mlx_h2o_cache_remainder(&remainder, caches[0], r->s);
  for (int i = 0; i < 4; ++i) {
    char name[32];
    snprintf(name, sizeof name, "remainder.%s", names[i]);
    if (!remembers) {
      mlx_array has = golden(r, "out", name);
      if (has.ctx) differs(r, name, "is not kept here");
      mlx_array_free(has);
      continue;
    }
    float* all = NULL;
    size_t size = 0;
    for (int l = 0; l < layers; ++l) {
      TRY(mlx_h2o_cache_remainder(&remainder, caches[l], r->s));
      const mlx_array arrays[] = {
          remainder.count, remainder.mean_key, remainder.var_key, remainder.mean_value};
      size = mlx_array_size(arrays[i]);
      if (!all) all = malloc(layers * size * sizeof *all);
      float* of_layer = floats_of(r, arrays[i]);
      memcpy(all + l * size, of_layer, size * sizeof *all);
      free(of_layer);
    }
    expect_floats(r, name, all, layers * size);
    free(all);
  }
  mlx_h2o_remainder_free(remainder);
}
