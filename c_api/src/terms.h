// What Distinct and Salient are made of: terms [B, H, N] that are standardised over the slots that
// may go (python/mlx_h2o/policies/terms.py).
#pragma once

#include "policy.h"

namespace mlx_h2o {

// The mean key [B, H, D] of the evicted, or of the kept while too few were evicted.
mx::array forgotten_mean(const Slots& slots);

// Of log ||k - mean||^2.
mx::array log_distance(const Slots& slots, const mx::array& mean);

// Of the logarithm of attention masses [B, H, N].
mx::array log_mass(const mx::array& mass, const Slots& slots);

// Of log ||v||^2.
mx::array log_value_length(const Slots& slots);

// Of the logarithm of the ages.
mx::array log_age(const Slots& slots);

}  // namespace mlx_h2o
