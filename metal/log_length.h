// Lengths as the salient policy compares them (python/mlx_h2o/policies/salient.py).

namespace h2o {

// Of a squared length: keeps the logarithm of a zero vector from stretching the scale of all.
#define LEAST_SQUARE 1e-12f

// The logarithm of a squared length.
inline float log_length(float square) {
  return log(max(square, LEAST_SQUARE));
}

}  // namespace h2o
