#include "terms.h"

namespace mlx_h2o {

namespace {

// Below this a key's mean mass per step counts as nothing.
constexpr double kMassFloor = 1e-6;

// z-scores by the mean and deviation among the slots marked True.
mx::array standardised(const mx::array& x, const mx::array& among) {
  mx::array weight = f32(among);
  weight = weight / mx::maximum(mx::sum(weight, -1, true), number(1));
  const mx::array mean = mx::sum(x * weight, -1, true);
  const mx::array deviation = mx::sqrt(mx::sum(mx::square(x - mean) * weight, -1, true));
  return (x - mean) / (deviation + number(1e-6));
}

}  // namespace

mx::array forgotten_mean(const Slots& slots) {
  if (slots.evicted >= kFewestForAMean) return slots.evicted_mean_key;
  return mx::mean(f32(slots.keys), 2);
}

mx::array log_distance(const Slots& slots, const mx::array& mean) {
  const mx::array apart = f32(slots.keys) - mx::expand_dims(mean, 2);
  const mx::array square = mx::sum(mx::square(apart), -1);
  // A key at the mean itself must not stretch the scale for all others.
  const mx::array least = number(1e-6) * mx::sum(mx::square(mean), -1, true) + number(1e-12);
  return standardised(mx::log(mx::maximum(square, least)), slots.evictable);
}

mx::array log_mass(const mx::array& mass, const Slots& slots) {
  return standardised(mx::log(mass + number(kMassFloor)), slots.evictable);
}

mx::array log_value_length(const Slots& slots) {
  return standardised(slots.lengths_of_values(), slots.evictable);
}

mx::array log_age(const Slots& slots) {
  return standardised(mx::log(slots.ages()), slots.evictable);
}

}  // namespace mlx_h2o
