// The file of rows of a golden case's conversation (group "returning").
#ifndef SPILLED_H
#define SPILLED_H

#include "compare.h"

typedef struct Spilled_ {
  mlx_h2o_spill spill;
  char folder[64];
  int* returning;  // for each KV head of each layer; NULL: the case has no file
  int layers, kv_heads;
} Spilled;

// In a new folder, for so many layers.
Spilled spilled_of(Case* c, int layers, int kv_heads);
// Has a cache be a layer's.
void spill_layer(const Spilled* all, mlx_h2o_cache cache, int layer);
// As many rows came back as in the golden case, and nothing failed.
void expect_returned(Replay* r, const Spilled* all, const mlx_h2o_cache* caches);
// Removes file and folder.
void spilled_free(Spilled all);

#endif
