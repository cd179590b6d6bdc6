#include "compared.h"

#include <random>
#include <sstream>

#include "../evaluation.h"

namespace mlx_h2o {

namespace {

// The deviation of one output.
Deviation deviation(const Compared& output, const mx::array& found, const mx::array& expected) {
  if (found.shape() != expected.shape())
    return {
        kInfinity,
        output.name + " has the shape " + text(found.shape()) + ", not " + text(expected.shape())};
  const float *ours = found.data<float>(), *theirs = expected.data<float>();
  double largest = 0, apart = 0, tolerated = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    if (std::isnan(ours[i])) return {kInfinity, output.name + " has a NaN"};
    if (ours[i] == theirs[i]) continue;
    const double off = std::abs(double(ours[i]) - theirs[i]);
    const double may =
        output.tolerance.absolute + output.tolerance.relative * std::abs(double(theirs[i]));
    const double size = std::isfinite(off) ? off / may : kInfinity;
    if (size > largest) largest = size, apart = off, tolerated = may;
  }
  if (!largest) return {};
  std::ostringstream words;
  words.precision(2);
  words << output.name << " differs by " << apart << " where " << tolerated << " is tolerated";
  return {largest, words.str()};
}

}  // namespace

Tolerance tolerance_of(mx::Dtype dtype) {
  if (dtype == mx::float16) return {1e-3, 2e-3};
  if (dtype == mx::bfloat16) return {8e-3, 1.6e-2};
  return {1e-4, 1e-4};
}

Deviation worst(const std::vector<Compared>& outputs) {
  std::vector<mx::array> all;
  {
    const OnCPU cpu;
    for (const Compared& output : outputs)
      for (const mx::array* one : {&output.found, &output.expected})
        all.push_back(mx::contiguous(f32(*one)));
    evaluate(all);
  }
  Deviation found;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Deviation one = deviation(outputs[i], all[2 * i], all[2 * i + 1]);
    if (one.size > found.size) found = one;
  }
  return found;
}

mx::array normal_numbers(unsigned seed, const mx::Shape& shape) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  size_t count = 1;
  for (const int length : shape) count *= length;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(engine);
  return mx::array(numbers.begin(), shape, mx::float32);
}

}  // namespace mlx_h2o
