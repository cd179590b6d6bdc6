// Masks: none, causal (aligned at the end), or an array of booleans (true is visible) or of numbers
// to add, where the lowest number of the type stands for "masked" as minus infinity does.

#include "work.h"

namespace h2o {

#define NO_MASK 0
#define CAUSAL 1
#define ARRAY_MASK 2

inline bool hides(bool visible) {
  return !visible;
}
inline bool hides(half x) {
  return float(x) <= -65504.0f;
}
inline bool hides(bfloat x) {
  return float(x) <= -3.38953139e38f;
}
inline bool hides(float x) {
  return x <= -3.40282347e38f;
}

inline float addend(bool) {
  return 0.0f;
}
inline float addend(half x) {
  return float(x);
}
inline float addend(bfloat x) {
  return float(x);
}
inline float addend(float x) {
  return x;
}

// What the mask adds to a query's logit of a slot: minus infinity hides it. An array's last column
// is the last slot's; slots before its first were there before the queries, and are visible.
template <int MASK, typename Elements>
inline float bias_of(int slot, int query, Launch launch, Work work, Elements row, int64_t step) {
  if (MASK == CAUSAL) {
    return slot <= work.length - launch.queries + query ? 0.0f : -INFINITY;
  }
  const int column = slot - (work.length - launch.mask_columns);
  if (MASK == NO_MASK || column < 0) {
    return 0.0f;
  }
  const auto x = row[column * step];
  return hides(x) ? -INFINITY : addend(x);
}

}  // namespace h2o
