// One function a group of golden cases, and what else is checked.
#ifndef REPLAYS_H
#define REPLAYS_H

#include "inputs.h"

void replay_attention(Replay* r);
void replay_quantized(Replay* r);
void replay_remainder(Replay* r);
void replay_accumulate(Replay* r);
void replay_selection(Replay* r);
void replay_trajectory(Replay* r);
void replay_twice(Replay* r);

// Wrong arguments give a status and a message, and leave the cache as it was. Failures.
int check_errors(const Replay* r);
int check_write_rows(const Replay* r);
// Decodes so many tokens in one layer: memory must not grow once the budgets are full.
int check_flat_memory(const Replay* r, int steps);

#endif
