// What a slot has gathered and what it is worth, by policy; each function names its counterpart in
// python/mlx_h2o/policies.

#include "decode_step.h"

namespace h2o {

// What is accumulated.
#define SCORE_NONE 0
#define SCORE_SUM 1
#define SCORE_EMA 2
#define SCORE_EMA_LOGITS 3
#define SCORE_LAST 4

// What is ranked.
#define BY_SCORE 0
#define BY_AGE 1
#define BY_DISTANCE 2
#define BY_WORTH 3
#define BY_SALIENCE 4

#define MASS_FLOOR 1e-6f  // policies/terms.py

// What attention and the layer know of one KV head's slots; index 0 is its first. A packed value has
// RANGES groups of LEVELS + 1 levels; of dense ones, RANGES 0, lengths are kept.
template <int RANGES, int LEVELS, typename Positions, typename Scales>
struct HeadSlots {
  const device float* logits;  // [G, length]
  const device float* distances;
  Positions positions;
  device float* scores;
  const device float* norms;
  const device half* value_lengths;
  Scales value_scales;  // [length, RANGES]
  int length, offset, aged_from;
  int first_free, end_free;  // positions that may go: from the first on, before the end
  float least_distance;
};

// Policy.accumulate after one query, whose evidence is the mean over G query heads.
template <int SCORE, int G, typename Head>
inline float accumulated(
    float score, Head head, int slot, const thread float* lse, float decay) {
  float total = 0.0f;
  UNROLL
  for (int g = 0; g < G; g++) {
    const float logit = head.logits[int64_t(g) * head.length + slot];
    if (logit != -INFINITY && lse[g] != -INFINITY) {
      total += SCORE == SCORE_EMA_LOGITS ? abs(logit) : exp(logit - lse[g]);
    }
  }
  const float evidence = total / float(G);
  return SCORE == SCORE_SUM ? score + evidence
      : SCORE == SCORE_LAST ? evidence
                            : decay * score + (1.0f - decay) * evidence;
}

// Slots.ages: no step counts that is before where they count from.
template <typename Head>
inline float age_of(Head head, int position) {
  return float(head.offset - max(position, head.aged_from));
}

// selection.evictable_slots; the positions of pinned tokens are below 0 (pins.py).
template <typename Head>
inline bool may_go(Head head, int position) {
  return position >= head.first_free && position < head.end_free;
}

// Policy.weighted; a score per step where AGE is set.
template <bool AGE, bool VALUES, typename Head>
inline float weighted(Head head, int slot, int position) {
  float score = head.scores[slot];
  if (AGE) {
    score /= age_of(head, position);
  }
  return VALUES ? score * head.norms[slot] : score;
}

// value_lengths.value_lengths
template <int RANGES, int LEVELS, typename Positions, typename Scales>
inline float value_length(HeadSlots<RANGES, LEVELS, Positions, Scales> head, int slot) {
  if (RANGES == 0) {
    return float(head.value_lengths[slot]);
  }
  float square = 0.0f;
  UNROLL
  for (int g = 0; g < RANGES; g++) {
    const float range = float(head.value_scales[int64_t(slot) * RANGES + g]) * float(LEVELS);
    square += range * range;
  }
  return log(max(square, LEAST_SQUARE));
}

// The terms of Distinct and Salient before they are standardised (terms.py): distance, mass, value,
// age.
#define TERMS 4
#define VALUE_TERM 2

// Only salience looks at values.
template <int PRIORITY>
inline bool has_term(int i) {
  return i != VALUE_TERM || PRIORITY == BY_SALIENCE;
}

template <int PRIORITY, bool MASS, bool VALUES, typename Head>
inline void terms_of(Head head, int slot, int position, thread float* terms) {
  terms[0] = log(max(head.distances[slot], head.least_distance));
  terms[1] = MASS ? log(weighted<true, VALUES>(head, slot, position) + MASS_FLOOR) : 0.0f;
  terms[VALUE_TERM] = PRIORITY == BY_SALIENCE ? value_length(head, slot) : 0.0f;
  terms[3] = log(age_of(head, position));
}

// Policy.priority; `standards` has the mean and the weight over the deviation of each term.
template <int SCORE, int PRIORITY, bool AGE, bool VALUES, typename Head, typename Standards>
inline float priority_of(Head head, int slot, int position, Standards standards) {
  if (PRIORITY == BY_AGE) {
    return float(position);
  }
  if (PRIORITY == BY_WORTH) {
    return head.distances[slot];
  }
  if (PRIORITY == BY_SCORE) {
    return weighted<AGE, VALUES>(head, slot, position);
  }
  float terms[TERMS], sum = 0.0f;
  terms_of<PRIORITY, SCORE != SCORE_NONE, VALUES>(head, slot, position, terms);
  UNROLL
  for (int i = 0; i < TERMS; i++) {
    if (has_term<PRIORITY>(i)) {
      sum += (terms[i] - standards[2 * i]) * standards[2 * i + 1];
    }
  }
  return sum;
}

}  // namespace h2o
