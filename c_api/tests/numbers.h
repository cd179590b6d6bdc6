// Inputs of golden cases: hashed integers, exact in float32 (docs/reference/golden.md).
#ifndef NUMBERS_H
#define NUMBERS_H

#include <stddef.h>
#include <stdint.h>

enum Which { Q, K, V, SINKS, MASK, LSE, LOGIT, MEAN_KEY, MEAN_VALUE, VARIANCE, WEIGHT, WORTH };

uint64_t seed_of(int seed, enum Which which, int layer);
uint64_t hashed(uint64_t seed, size_t i);
// Fills `n` numbers, each times 2^power. Row-major.
void fill_numbers(float* numbers, size_t n, uint64_t seed, int power);

#endif
