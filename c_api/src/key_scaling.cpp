#include "key_scaling.h"

#include <algorithm>

#include "evaluation.h"

namespace mlx_h2o {

namespace {

// On the CPU, whatever the stream of the call: its numbers are looked at here.
mx::array evaluated(const mx::array& a) {
  mx::array dense = mx::contiguous(a, false, mx::Device::cpu);
  evaluate({dense});
  return dense;
}

template <class Fits>
bool all_of(const mx::array& a, Fits fits) {
  return std::all_of(a.data<float>(), a.data<float>() + a.size(), fits);
}

}  // namespace

Frame checked_frame(const mx::array& centre, const mx::array& scale) {
  const Frame frame{evaluated(centre), evaluated(scale)};
  check(
      all_of(frame.centre, [](float x) { return std::isfinite(x); }) &&
          all_of(frame.scale, [](float x) { return std::isfinite(x) && x > 0; }),
      "A frame's centre must be finite, its scale finite and above 0.");
  return frame;
}

bool moves(const Frame& frame) {
  return !all_of(frame.centre, [](float x) { return x == 0; });
}

mx::array enter(const Frame& frame, const mx::array& keys) {
  const mx::array apart = f32(keys) - mx::expand_dims(frame.centre, 1);
  return mx::astype(apart / mx::expand_dims(frame.scale, 1), keys.dtype());
}

mx::array enter_queries(const Frame& frame, const mx::array& queries) {
  const mx::array scale = mx::repeat(frame.scale, queries.shape(1) / frame.scale.shape(0), 0);
  return mx::astype(f32(queries) * mx::expand_dims(scale, 1), queries.dtype());
}

}  // namespace mlx_h2o
