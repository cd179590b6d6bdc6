#define _POSIX_C_SOURCE 200809L
#include "spilled.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void make_folder(Spilled* all) {
  strcpy(all->folder, "/tmp/mlx-h2o-rows-XXXXXX");
  if (mkdtemp(all->folder)) return;
  perror("replay: a folder");
  exit(2);
}

Spilled spilled_of(Case* c, int layers, int kv_heads) {
  Spilled all = {.spill = mlx_h2o_spill_new(), .layers = layers, .kv_heads = kv_heads};
  if (!text_or_null(c, "returning")) return all;
  text_or_null(c, "framed");  // the frame's arrays tell
  size_t count;
  all.returning = ints_of(c, "returning", &count);
  if (count != (size_t)(layers * kv_heads)) exit(2);
  mlx_h2o_returns returns = mlx_h2o_returns_default();
  returns.every = int_of(c, "returns.every"), returns.window = int_of(c, "returns.window");
  returns.pages = int_of(c, "returns.pages"), returns.rows = int_of(c, "returns.rows");
  returns.room = number_of(c, "returns.room"), returns.ahead = int_of(c, "returns.ahead");
  make_folder(&all);
  TRY(mlx_h2o_spill_make(&all.spill, all.folder, (size_t)layers, &returns));
  return all;
}

void spill_layer(const Spilled* all, mlx_h2o_cache cache, int layer) {
  if (!all->returning) return;
  bool* heads = malloc((size_t)all->kv_heads * sizeof *heads);
  for (int i = 0; i < all->kv_heads; ++i) heads[i] = all->returning[layer * all->kv_heads + i];
  TRY(mlx_h2o_cache_spill_to(cache, all->spill, (size_t)layer, heads, (size_t)all->kv_heads));
  free(heads);
}

void expect_returned(Replay* r, const Spilled* all, const mlx_h2o_cache* caches) {
  if (!all->returning) return;
  int32_t* returned = malloc((size_t)all->layers * sizeof *returned);
  for (int i = 0; i < all->layers; ++i) {
    int64_t count;
    TRY(mlx_h2o_cache_returned(&count, caches[i]));
    returned[i] = (int32_t)count;
  }
  expect_int32s(r, "returned", returned, (size_t)all->layers);
  free(returned);
  const char* failure;
  TRY(mlx_h2o_spill_failure(&failure, all->spill));
  if (*failure) differs(r, "returned", failure);
}

void spilled_free(Spilled all) {
  if (!all.returning) return;
  mlx_h2o_spill_free(all.spill);
  free(all.returning);
  // Not if anything is left in it.
  if (rmdir(all.folder)) perror("replay: a folder"), exit(2);
}
