#include "stages.h"

#include <stdlib.h>
#include <string.h>

Stages stages_of(Case* c, size_t slots, int* most) {
  Stages all = {.width = 1 + slots};
  if (!text_or_null(c, "cache.filling")) return all;
  size_t count;
  all.numbers = ints_of(c, "cache.filling", &count);
  all.stages = count / all.width;
  for (size_t i = 0; i < count; ++i)
    if (i % all.width && all.numbers[i] > *most) *most = all.numbers[i];
  return all;
}

int* stages_of_layer(const Stages* all, int layer, int kv_heads) {
  const size_t heads = (size_t)kv_heads;
  int* stages = malloc((all->stages * (1 + heads) + 1) * sizeof *stages);
  for (size_t i = 0; i < all->stages; ++i) {
    const int* stage = all->numbers + i * all->width;
    stages[i * (1 + heads)] = stage[0];
    memcpy(stages + i * (1 + heads) + 1, stage + 1 + layer * heads, heads * sizeof *stages);
  }
  return stages;
}
