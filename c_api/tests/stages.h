// Slots that follow as a golden case's conversation grows.
#ifndef STAGES_H
#define STAGES_H

#include "cases.h"

// Of all layers, run flat: (tokens, slots of each KV head of each layer).
typedef struct Stages_ {
  int* numbers;  // to be freed
  size_t stages, width;
} Stages;

// None where the case has none; *most becomes the most slots of any.
Stages stages_of(Case* c, size_t slots, int* most);
// Those of one layer, as options have them; to be freed.
int* stages_of_layer(const Stages* all, int layer, int kv_heads);

#endif
