#include "rope.h"

#include <cmath>

namespace mlx_h2o {

namespace {

// Far above any model's head width.
constexpr int kMostDims = 1 << 16;

}  // namespace

void Rope::check_all() const {
  check(
      dims >= 2 && dims % 2 == 0 && dims <= kMostDims && std::isfinite(base) && base > 0 &&
          std::isfinite(scale),
      "A rope turns an even number of channels, at most " + std::to_string(kMostDims) +
          ", by a base above 0 and a finite scale; got dims " + std::to_string(dims) + ", base " +
          std::to_string(base) + ", scale " + std::to_string(scale) + ".");
}

mx::array Rope::turned(const mx::array& keys, const mx::array& by) const {
  const int half = dims / 2, D = keys.shape(-1);
  std::vector<float> steps(half);
  for (int i = 0; i < half; ++i) steps[i] = scale * std::pow(base, -2.0f * i / dims);
  const mx::array frequencies(steps.begin(), mx::Shape{half}, mx::float32);
  const mx::array angles = mx::expand_dims(f32(by), -1) * frequencies;
  const mx::array cos = mx::cos(angles), sin = mx::sin(angles);
  // [..., half, 2] or [..., 2, half]: a pair lies along one axis of its own.
  mx::Shape paired = keys.shape();
  paired.back() = traditional ? half : 2;
  paired.push_back(traditional ? 2 : half);
  const int axis = traditional ? 4 : 3;
  const mx::array pairs = mx::reshape(f32(part(keys, 3, 0, dims)), paired);
  const mx::array first = mx::squeeze(part(pairs, axis, 0, 1), axis);
  const mx::array second = mx::squeeze(part(pairs, axis, 1, 2), axis);
  const mx::array both = mx::concatenate(
      {mx::expand_dims(first * cos - second * sin, axis),
       mx::expand_dims(first * sin + second * cos, axis)},
      axis);
  mx::Shape whole = keys.shape();
  whole.back() = dims;
  const mx::array turned = mx::astype(mx::reshape(both, whole), keys.dtype());
  return dims < D ? mx::concatenate({turned, part(keys, 3, dims, D)}, 3) : turned;
}

Json Rope::config() const {
  return Json::Object{
      {"dims", dims},
      {"base", double(base)},
      {"scale", double(scale)},
      {"traditional", traditional}};
}

Rope Rope::of_config(const Json& config) {
  const Json::Object& all = config.object("rope");
  check(all.size() == 4, "A rope has dims, base, scale and traditional.");
  const Rope rope{
      member(all, "dims").whole("rope.dims", 2, kMostDims),
      float(member(all, "base").number("rope.base")),
      float(member(all, "scale").number("rope.scale")),
      member(all, "traditional").truth("rope.traditional")};
  rope.check_all();
  return rope;
}

mx::array forgotten_after(const mx::array& positions, int offset) {
  const mx::array held_before = mx::astype(mx::argsort(mx::argsort(positions, -1), -1), mx::int32);
  const int forgotten = offset - positions.shape(-1);
  return mx::array(forgotten) - (positions - held_before);
}

mx::array without_gaps(
    const mx::array& keys, const mx::array& positions, int offset, const Rope& rope) {
  return rope.turned(keys, forgotten_after(positions, offset));
}

}  // namespace mlx_h2o
