// What policies make of attention and of slots: scores and priorities.
#include "attend.h"
#include "policy.h"
#include "terms.h"
#include "value_lengths.h"

namespace mlx_h2o {

namespace {

mx::array value_weighted_by(const mx::array& scores, const Slots& slots) {
  return scores * mx::sqrt(mx::sum(mx::square(f32(slots.values)), -1));
}

// Sums over each `width` neighbours of the last axis, [..., N] to [..., N - width + 1].
//
// Sums over 1, 2, 4, ... neighbours are made of each other, and those in `width` added up: log
// width additions of arrays, and as many roundings.
mx::array window_sums(const mx::array& x, int width) {
  const int kept = x.shape(-1) - width + 1;
  mx::array sums = x;
  std::optional<mx::array> total;
  for (int step = 1, done = 0; step <= width; step *= 2) {
    const int held = sums.shape(-1);
    if (width & step) {
      const mx::array of_step = part(sums, -1, done, done + kept);
      total = total ? *total + of_step : of_step;
      done += step;
    }
    if (2 * step <= width) sums = part(sums, -1, 0, held - step) + part(sums, -1, step, held);
  }
  return *total;
}

// Mean over `width` neighbours in order of position, zeros beyond the ends.
mx::array average_pool(const mx::array& mass, const mx::array& positions, int width) {
  const mx::array order = mx::argsort(positions, -1);
  const int N = mass.shape(-1);
  const int half = std::min(width / 2, N - 1);  // farther neighbours are zeros
  const mx::array padded =
      mx::pad(mx::take_along_axis(mass, order, -1), {{0, 0}, {0, 0}, {half, half}}, number(0));
  const mx::array pooled = window_sums(padded, 2 * half + 1);
  return mx::take_along_axis(pooled / number(width), mx::argsort(order, -1), -1);
}

}  // namespace

mx::array Observation::total_mass() const {
  return mass ? *mass : attention_mass(*logits, *lse, heads);
}

Observation Observation::query(int i) const {
  return {part(*logits, 2, i, i + 1), part(*lse, 2, i, i + 1), heads, std::nullopt, std::nullopt};
}

mx::array Slots::ages() const {
  return f32(mx::array(offset) - mx::maximum(positions, mx::array(aged_from)));
}

mx::array Slots::lengths_of_values() const {
  return f32(value_lengths ? *value_lengths : mlx_h2o::value_lengths(values));
}

mx::array Policy::accumulate(const mx::array& scores, const Observation& seen) const {
  check(needs_attention(), "Policy " + name + " accumulates no scores.");
  if (own && own->accumulates()) return own->accumulate(scores, seen);
  if (sums_mass()) {
    const mx::array mass = seen.total_mass();
    return scores + (seen.stands_for ? mass * *seen.stands_for : mass);
  }
  const int L = seen.logits->shape(2);
  if (kind == PolicyKind::tova) return seen.query(L - 1).total_mass();
  mx::array after = scores;
  for (int i = 0; i < L; ++i) {
    const Observation query = seen.query(i);
    mx::array evidence = scores;
    if (kind == PolicyKind::ema) {
      evidence = query.total_mass();
    } else {
      const mx::array& logits = *query.logits;
      const int B = logits.shape(0), Hq = logits.shape(1), N = logits.shape(3);
      const mx::array size = mx::where(logits == number(-kInfinity), number(0), mx::abs(logits));
      evidence =
          mx::sum(mx::reshape(size, {B, seen.heads, -1, N}), 2) * number(double(seen.heads) / Hq);
    }
    after = number(decay) * after + number(1 - decay) * evidence;
  }
  return after;
}

mx::array Policy::carried(
    const mx::array& scores, const mx::array& ages, const mx::array& ages_after,
    double carry) const {
  return sums_mass() ? scores * (ages_after / ages) : scores * number(carry);
}

mx::array Policy::mean_mass(const mx::array& scores, const mx::array& ages) const {
  return sums_mass() ? scores / ages : scores;
}

mx::array Policy::distinct_mass(const mx::array& mass, const Slots& slots) const {
  return log_mass(value_weighted ? value_weighted_by(mass, slots) : mass, slots);
}

mx::array Policy::salience(const mx::array& mass, const Slots& slots) const {
  return log_mass(mass, slots) +
      number(distance_weight) * log_distance(slots, forgotten_mean(slots)) +
      number(value_weight) * log_value_length(slots) - number(age_weight) * log_age(slots);
}

mx::array Policy::priority(const Slots& slots) const {
  if (own) return own->priority(slots);
  if (kind == PolicyKind::streaming) return f32(slots.positions);
  if (kind == PolicyKind::keydiff) {
    const mx::array keys = f32(slots.keys), least = number(1e-12);
    const auto unit = [&](const mx::array& x) {
      return x * mx::rsqrt(mx::sum(mx::square(x), -1, true) + least);
    };
    const mx::array directions = unit(keys);
    const mx::array anchor = unit(mx::mean(directions, 2));
    return number(1) - mx::squeeze(mx::matmul(directions, mx::expand_dims(anchor, -1)), -1);
  }
  if (kind == PolicyKind::distinct) {
    mx::array worth = log_distance(slots, forgotten_mean(slots));
    if (needs_attention())
      worth = worth + number(mass_weight) * distinct_mass(slots.scores / slots.ages(), slots);
    return worth - number(age_weight) * log_age(slots);
  }
  if (kind == PolicyKind::salient) return salience(slots.scores / slots.ages(), slots);
  const mx::array scores = age_normalised ? slots.scores / slots.ages() : slots.scores;
  return value_weighted ? value_weighted_by(scores, slots) : scores;
}

mx::array Policy::prompt_priority(
    const Slots& slots, const std::optional<mx::array>& window_mass) const {
  if (kind == PolicyKind::distinct) {
    const mx::array may_go = f32(slots.evictable);
    const mx::array those =
        mx::squeeze(mx::matmul(mx::expand_dims(may_go, -2), f32(slots.keys)), 2);
    const mx::array total = those + number(slots.evicted) * slots.evicted_mean_key;
    const mx::array count = mx::sum(may_go, -1, true) + number(slots.evicted);
    mx::array worth = log_distance(slots, total / mx::maximum(count, number(1)));
    if (needs_attention()) {
      const mx::array mass = window_mass ? *window_mass : slots.scores / slots.ages();
      worth = worth + number(mass_weight) * distinct_mass(mass, slots);
    }
    return worth;
  }
  if (!window_mass) return priority(slots);
  if (kind == PolicyKind::salient) return salience(*window_mass, slots);
  const mx::array pooled = average_pool(*window_mass, slots.positions, pool);
  return value_weighted ? value_weighted_by(pooled, slots) : pooled;
}

}  // namespace mlx_h2o
