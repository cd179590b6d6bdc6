#include "numbers.h"

#include <math.h>

uint64_t seed_of(int seed, enum Which which, int layer) {
  return (uint64_t)seed * 65536 + (uint64_t)layer * 16 + which;
}

uint64_t hashed(uint64_t seed, size_t i) {
  uint64_t z = seed + (i + 1) * UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

void fill_numbers(float* numbers, size_t n, uint64_t seed, int power) {
  for (size_t i = 0; i < n; ++i) {
    const uint64_t z = hashed(seed, i);
    int sum = -131070;
    for (int shift = 0; shift < 64; shift += 16) sum += (int)(z >> shift & 0xFFFF);
    numbers[i] = ldexpf((float)sum, power - 15);
  }
}
