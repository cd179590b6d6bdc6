// A softmax that grows column by column: the largest logit so far, the sum of exponentials relative
// to it, and what the values add up to with these weights. Each lane holds a share of the values
// and a part of the sum, so that only the end has to add up lanes.

namespace h2o {

// Lower than any logit that counts, and finite, so that differences stay numbers.
#define LOWEST_LOGIT -3.40282347e38f

template <int WV>
struct OnlineSoftmax {
  float top, sum;
  float values[WV];
};

template <int WV>
inline void start(thread OnlineSoftmax<WV>& row) {
  row.top = LOWEST_LOGIT;
  row.sum = 0.0f;
  UNROLL
  for (int i = 0; i < WV; i++) {
    row.values[i] = 0.0f;
  }
}

// exp(logit - top), 0 for a masked logit whatever the top is.
inline float weight_of(float logit, float top) {
  return logit == -INFINITY ? 0.0f : fast::exp(logit - top);
}

// Makes everything so far relative to a new largest logit.
template <int WV>
inline void raise(thread OnlineSoftmax<WV>& row, float top) {
  const float fade = fast::exp(row.top - top);
  row.top = top;
  row.sum *= fade;
  UNROLL
  for (int i = 0; i < WV; i++) {
    row.values[i] *= fade;
  }
}

// One column whose logit every lane knows; `value` is its lane's share.
template <int WV>
inline void join(thread OnlineSoftmax<WV>& row, float logit, const thread float* value, int lane) {
  raise(row, max(row.top, logit));
  const float weight = weight_of(logit, row.top);
  row.sum += lane == 0 ? weight : 0.0f;
  UNROLL
  for (int i = 0; i < WV; i++) {
    row.values[i] += weight * value[i];
  }
}

// Up to 32 columns, one a lane; returns this lane's weight, with which its value is to be added.
template <int WV>
inline float join_lanes(thread OnlineSoftmax<WV>& row, float logit) {
  raise(row, max(row.top, simd_max(logit)));
  const float weight = weight_of(logit, row.top);
  row.sum += weight;
  return weight;
}

}  // namespace h2o
