// What the layers of a golden conversation get, and what they hold of the evicted.
#ifndef LAYERS_H
#define LAYERS_H

#include "inputs.h"

// A layer's queries [B, Hq, T, D], keys and values of all T tokens, and its attention sinks.
typedef struct Stream_ {
  float *q, *k, *v;
  mlx_array sinks;
} Stream;

Stream stream_of(const Replay* r, int layer, int T);
// Frees the layers' streams and caches, and both arrays.
void layers_free(Stream* streams, mlx_h2o_cache* caches, int layers);

// Compares the statistics of the evicted; golden ones are there where caches keep them.
void expect_remainders(Replay* r, const mlx_h2o_cache* caches, int layers);

#endif
