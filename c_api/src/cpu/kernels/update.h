// After attention: mass, scores, priorities of one KV head's slots.
//
// The formulas are those of python/mlx_h2o/policies; each function names its counterpart.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

constexpr float kMassFloor = 1e-6f;     // policies/terms.py: MASS_FLOOR
constexpr float kLeastSquare = 1e-12f;  // slots/packed.py: LEAST_SQUARE

// What a weight e^(s - top) is multiplied by to become e^(s - lse). Equal infinities cancel: beside
// an infinite logit all others weigh nothing.
inline float share_of(float top, float lse) {
  return top == lse ? 1 : exp(top - lse);
}

inline void add_mass(const UpdateHead& h, float factor, float* mass) {
  // A row's largest logit is the same for many tiles on end.
  float tops[kMaxRows], scales[kMaxRows];
  for (int r = 0; r < h.rows; ++r) tops[r] = -__builtin_inff(), scales[r] = 0;
  for (int first = 0, tile = 0; first < h.slots; first += kTile, ++tile) {
    const int keys = h.slots - first < kTile ? h.slots - first : kTile;
    for (int r = 0; r < h.rows; ++r) {
      const float top = h.tile_max[tile * h.rows + r];
      if (top == tops[r]) continue;
      tops[r] = top;
      scales[r] = top == -__builtin_inff() ? 0 : factor * share_of(top, h.lse[r]);
    }
    each_vector(keys, [&](int n, int count) {
      float* m = mass + first + n;
      const float* w = h.weights + first + n;
      vf total = load_some(m, count);
      for (int r = 0; r < h.rows; ++r, w += h.weights_stride)
        total += scales[r] * load_some(w, count);
      store_some(m, total, count);
    });
  }
}

// One step's evidence about a vector of slots, the mean over the query heads.
struct Evidence {
  const UpdateHead& h;
  bool of_logits;
  float mean;  // 1 / rows

  vf operator()(int n, int count) const {
    vf total{};
    const float* w = (of_logits ? h.logits : h.weights) + n;
    const int tile = n / kTile;
    for (int r = 0; r < h.rows; ++r, w += h.weights_stride) {
      const vf x = load_some(w, count);
      if (of_logits) {
        const vf size = x < 0 ? -x : x;
        total += x == -__builtin_inff() ? splat(0) : size;
      } else {
        const float top = h.tile_max[tile * h.rows + r];
        if (top != -__builtin_inff()) total += x * share_of(top, h.lse[r]);
      }
    }
    return total * mean;
  }
};

// Policy.accumulate
inline void accumulate(const UpdateHead& h, const KernelPolicy& policy) {
  if (policy.score == Score::none) return;
  const bool of_logits = policy.score == Score::ema_logits;
  if (!of_logits && policy.score == Score::sum) return add_mass(h, 1.0f / h.rows, h.scores);
  const Evidence evidence{h, of_logits, 1.0f / h.rows};
  const float keep = policy.score == Score::last ? 0 : policy.decay;
  each_vector(h.slots, [&](int n, int count) {
    const vf fresh = evidence(n, count);
    const vf old = load_some(h.scores + n, count);
    store_some(h.scores + n, keep == 0 ? fresh : keep * old + (1 - keep) * fresh, count);
  });
}

inline vi positions(const UpdateHead& h, int n, int count) {
  const void* from = h.positions.from(n).data;
  if (h.positions.narrow) {
    typedef int16_t Narrow __attribute__((vector_size(W * sizeof(int16_t))));
    Narrow some{};
    __builtin_memcpy(&some, from, count * sizeof(int16_t));
    return __builtin_convertvector(some, vi);
  }
  vi some{};
  __builtin_memcpy(&some, from, count * sizeof(int32_t));
  return some;
}

// value_lengths.value_lengths
inline vf value_lengths(const UpdateHead& h, int n, int count) {
  if (h.value_lengths)
    return load_some(reinterpret_cast<const float16*>(h.value_lengths) + n, count);
  vf square{};
  if (h.value_groups == 1) {
    const vf range = load_some(h.value_ranges + n, count);
    square = range * range;
  } else {
    const float* ranges = h.value_ranges + int64_t(n) * h.value_groups;
    for (int i = 0; i < count; ++i)
      for (int g = 0; g < h.value_groups; ++g, ++ranges) square[i] += *ranges * *ranges;
  }
  return log(max(splat(kLeastSquare), square));
}

inline vf ages(const UpdateHead& h, int n, int count) {
  // (Unsigned, so that positions of a damaged state do no more harm than a wrong age.)
  const vi at = positions(h, n, count), from = vi{} + h.aged_from, begun = at < from ? from : at;
  return __builtin_convertvector((vi)(uint32_t(h.offset) - (vu)begun), vf);
}

// 1 where a slot may go, 0 where it is protected (selection.evictable_slots); 0 beyond `count`.
inline vf may_go(const UpdateHead& h, const KernelPolicy& policy, int n, int count) {
  const vi at = positions(h, n, count);
  vi lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  const vi yes = (at >= policy.sink) & (at < h.offset - h.recent) & (lanes < count);
  return yes ? splat(1) : splat(0);
}

// One term of a priority: a number for each slot, from which `mean` is taken off and which then
// counts `factor` times.
struct Term {
  const float* x;
  float mean, factor;
};

// terms.standardised, weighted: the mean and the deviation are those of what may go. `of` gives the
// numbers of a vector of slots; they are written to `x`.
template <class F>
inline Term standardised(
    const UpdateHead& h, const KernelPolicy& policy, float weight, float* x, F of) {
  vf number{}, total{}, squares{};
  each_vector(h.slots, [&](int n, int count) {
    const vf among = may_go(h, policy, n, count), numbers = of(n, count);
    store_some(x + n, numbers, count);
    number += among;
    total += among > 0 ? numbers : splat(0);
  });
  const float share = 1 / __builtin_fmaxf(sum(number), 1), mean = sum(total) * share;
  each_vector(h.slots, [&](int n, int count) {
    const vf apart = load_some(x + n, count) - mean;
    squares += may_go(h, policy, n, count) > 0 ? apart * apart : splat(0);
  });
  return {x, mean, weight / (__builtin_sqrtf(sum(squares) * share) + 1e-6f)};
}

// Distinct.priority and Salient.priority; what has no weight costs nothing.
inline void rank_by_terms(const UpdateHead& h, const KernelPolicy& policy) {
  Term terms[kTerms];
  int used = 0;
  const auto add = [&](float weight, auto of) {
    if (!weight) return;
    terms[used] = standardised(h, policy, weight, h.terms + int64_t(used) * h.slots, of);
    ++used;
  };
  // A key at the mean itself must not stretch the scale for all others.
  const vf least = splat(h.least_distance);
  add(policy.distance_weight,
      [&](int n, int count) { return log(max(least, load_some(h.distance + n, count))); });
  add(policy.mass_weight, [&](int n, int count) {
    return log(load_some(h.scores + n, count) / ages(h, n, count) + kMassFloor);
  });
  add(policy.value_weight, [&](int n, int count) { return value_lengths(h, n, count); });
  add(-policy.age_weight, [&](int n, int count) { return log(ages(h, n, count)); });
  each_vector(h.slots, [&](int n, int count) {
    vf priority{};
    for (int t = 0; t < used; ++t)
      priority += (load_some(terms[t].x + n, count) - terms[t].mean) * terms[t].factor;
    store_some(h.priority + n, priority, count);
  });
}

// Policy.priority
inline void rank(const UpdateHead& h, const KernelPolicy& policy) {
  switch (policy.priority) {
    case Priority::distance:
    case Priority::salience: return rank_by_terms(h, policy);
    case Priority::direction:
      __builtin_memcpy(h.priority, h.distance, h.slots * sizeof(float));
      return;
    case Priority::age:
      for (int n = 0; n < h.slots; ++n) h.priority[n] = float(h.positions[n]);
      return;
    case Priority::score:
      each_vector(h.slots, [&](int n, int count) {
        const vf c = load_some(h.scores + n, count);
        store_some(h.priority + n, policy.age_normalised ? c / ages(h, n, count) : c, count);
      });
      return;
  }
}

// selection.select_victims
inline void select_victims(const UpdateHead& h, const KernelPolicy& policy, int32_t* victims) {
  // The protected come last, NaNs first; finite, so that no protected slot ties with another.
  each_vector(h.slots, [&](int n, int count) {
    const vf x = load_some(h.priority + n, count);
    const vf ranked = x == x ? min(splat(0x1.fffffep127f), x) : splat(-__builtin_inff());
    const vf out = may_go(h, policy, n, count) > 0 ? ranked : splat(__builtin_inff());
    store_some(h.priority + n, out, count);
  });
  for (int e = 0; e < policy.evict_every; ++e) {
    vf low = splat(__builtin_inff());
    each_vector(h.slots, [&](int n, int count) {
      vf x = load_some(h.priority + n, count);
      for (int i = count; i < W; ++i) x[i] = __builtin_inff();
      low = min(x, low);
    });
    float lowest = low[0];
    for (int i = 1; i < W; ++i) lowest = low[i] < lowest ? low[i] : lowest;
    int worst = -1;
    for (int n = 0; n < h.slots; ++n)
      if (h.priority[n] == lowest && (worst < 0 || h.positions[n] < h.positions[worst])) worst = n;
    victims[e] = worst;
    h.priority[worst] = __builtin_inff();
  }
}

inline void update(const UpdateHead& h, const KernelPolicy& policy) {
  accumulate(h, policy);
  if (h.priority) rank(h, policy);
}

}  // namespace mlx_h2o::MLX_H2O_ISA
