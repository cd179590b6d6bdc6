// After attention: mass, scores, priorities of one KV head's slots.
//
// The formulas are those of python/mlx_h2o/policies; each function names its counterpart.
#pragma once

#include "convert.h"
#include "kernels.h"
#include "simd.h"

namespace mlx_h2o::MLX_H2O_ISA {

constexpr float kMassFloor = 1e-6f;  // policies/base.py: MASS_FLOOR

// What a weight e^(s - top) is multiplied by to become e^(s - lse). Equal infinities cancel: beside
// an infinite logit all others weigh nothing.
inline float share_of(float top, float lse) {
  return top == lse ? 1 : exp(top - lse);
}

inline void add_mass(const UpdateHead& h, float factor, float* mass) {
  for (int first = 0, tile = 0; first < h.slots; first += kTile, ++tile) {
    const int keys = h.slots - first < kTile ? h.slots - first : kTile;
    for (int r = 0; r < h.rows; ++r) {
      const float top = h.tile_max[tile * h.rows + r], lse = h.lse[r];
      if (top == -__builtin_inff()) continue;
      const float scale = factor * share_of(top, lse);
      const float* w = h.weights + r * h.weights_stride + first;
      each_vector(keys, [&](int n, int count) {
        float* m = mass + first + n;
        store_some(m, load_some(m, count) + scale * load_some(w + n, count), count);
      });
    }
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
inline void accumulate(const UpdateHead& h, const PolicyForm& form) {
  if (form.score == Score::none) return;
  const bool of_logits = form.score == Score::ema_logits;
  if (!of_logits && form.score == Score::sum) return add_mass(h, 1.0f / h.rows, h.scores);
  const Evidence evidence{h, of_logits, 1.0f / h.rows};
  const float keep = form.score == Score::last ? 0 : form.decay;
  each_vector(h.slots, [&](int n, int count) {
    const vf fresh = evidence(n, count);
    const vf old = load_some(h.scores + n, count);
    store_some(h.scores + n, keep == 0 ? fresh : keep * old + (1 - keep) * fresh, count);
  });
}

inline vf ages(const UpdateHead& h, int n, int count) {
  uint32_t positions[W] = {};
  __builtin_memcpy(positions, h.positions + n, count * sizeof(int32_t));
  // (Unsigned, so that positions of a damaged state do no more harm than a wrong age.)
  return __builtin_convertvector((vi)(uint32_t(h.offset) - load_as<vu>(positions)), vf);
}

// 1 where a slot may go, 0 where it is protected (selection.evictable_slots); 0 beyond `count`.
inline vf may_go(const UpdateHead& h, const PolicyForm& form, int n, int count) {
  vi positions{};
  __builtin_memcpy(&positions, h.positions + n, count * sizeof(int32_t));
  vi lanes;
  for (int i = 0; i < W; ++i) lanes[i] = i;
  const vi yes = (positions >= form.sink) & (positions < h.offset - h.recent) & (lanes < count);
  return yes ? splat(1) : splat(0);
}

// base.standardised over what may go, times a weight, added to h.priority; `value` gives x, once.
template <class F>
void add_standardised(const UpdateHead& h, const PolicyForm& form, float weight, F value) {
  vf number{}, total{};
  each_vector(h.slots, [&](int n, int count) {
    const vf x = value(n, count), among = may_go(h, form, n, count);
    store_some(h.term + n, x, count);
    number += among;
    total += among > 0 ? x : splat(0);
  });
  const float share = 1 / __builtin_fmaxf(sum(number), 1);
  const float mean = sum(total) * share;
  vf squares{};
  each_vector(h.slots, [&](int n, int count) {
    const vf apart = load_some(h.term + n, count) - mean;
    squares += may_go(h, form, n, count) > 0 ? apart * apart : splat(0);
  });
  const float deviation = __builtin_sqrtf(sum(squares) * share);
  const float factor = weight / (deviation + 1e-6f);
  each_vector(h.slots, [&](int n, int count) {
    const vf apart = load_some(h.term + n, count) - mean;
    store_some(h.priority + n, load_some(h.priority + n, count) + apart * factor, count);
  });
}

// Distinct.priority
inline void rank_by_distance(const UpdateHead& h, const PolicyForm& form) {
  __builtin_memset(h.priority, 0, h.slots * sizeof(float));
  // A key at the mean itself must not stretch the scale for all others.
  const vf least = splat(h.least_distance);
  add_standardised(h, form, 1, [&](int n, int count) {
    return log(max(least, load_some(h.distance + n, count)));
  });
  if (form.mass_weight != 0)
    add_standardised(h, form, form.mass_weight, [&](int n, int count) {
      return log(load_some(h.scores + n, count) / ages(h, n, count) + kMassFloor);
    });
  if (form.age_weight != 0)
    add_standardised(
        h, form, -form.age_weight, [&](int n, int count) { return log(ages(h, n, count)); });
}

// Policy.priority
inline void rank(const UpdateHead& h, const PolicyForm& form) {
  switch (form.priority) {
    case Priority::distance: return rank_by_distance(h, form);
    case Priority::direction:
      __builtin_memcpy(h.priority, h.distance, h.slots * sizeof(float));
      return;
    case Priority::age:
      for (int n = 0; n < h.slots; ++n) h.priority[n] = float(h.positions[n]);
      return;
    case Priority::score:
      each_vector(h.slots, [&](int n, int count) {
        const vf c = load_some(h.scores + n, count);
        store_some(h.priority + n, form.age_normalised ? c / ages(h, n, count) : c, count);
      });
      return;
  }
}

// selection.select_victims
inline void select_victims(const UpdateHead& h, const PolicyForm& form, int32_t* victims) {
  // The protected come last, NaNs first; finite, so that no protected slot ties with another.
  each_vector(h.slots, [&](int n, int count) {
    const vf x = load_some(h.priority + n, count);
    const vf ranked = x == x ? min(splat(0x1.fffffep127f), x) : splat(-__builtin_inff());
    const vf out = may_go(h, form, n, count) > 0 ? ranked : splat(__builtin_inff());
    store_some(h.priority + n, out, count);
  });
  for (int e = 0; e < form.evict_every; ++e) {
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

inline void update(const UpdateHead& h, const PolicyForm& form) {
  accumulate(h, form);
  if (h.priority) rank(h, form);
}

}  // namespace mlx_h2o::MLX_H2O_ISA
