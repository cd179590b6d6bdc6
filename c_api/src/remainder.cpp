#include "remainder.h"

#include <bit>

namespace mlx_h2o {

namespace {

// Keep x finite whatever the queries and keys, so that the logit never becomes a NaN.
constexpr float kLargestQuery = 1e15f, kLargestTerm = 1e30f;

// Of keys up to 512 wide more rows would only repeat the signs of others.
constexpr int kMostPlainRows = 1024;

// (-1)^popcount((j + 1) & d) in pair j, and its negative.
mx::array antithetic_signs(int rows, int width) {
  if (rows == 1) return mx::zeros({1, width});
  std::vector<float> signs(rows * width);
  const int half = rows / 2;
  for (int j = 0; j < half; ++j)
    for (int d = 0; d < width; ++d) {
      const float sign = std::popcount(unsigned((j + 1) & d)) % 2 ? -1 : 1;
      signs[j * width + d] = sign;
      signs[(j + half) * width + d] = -sign;
    }
  return mx::array(signs.begin(), {rows, width}, mx::float32);
}

// The second-order term [B, H, M, 1] of x.
mx::array saturated(const mx::array& x, const Saturations& saturations) {
  const int H = static_cast<int>(saturations.size());
  const mx::array t(saturations.begin(), {H, 1, 1}, mx::float32);
  const mx::array second = mx::greater(t, number(0));
  // Not x / 0, which is no number where x is 0 too.
  const mx::array term = x * mx::rsqrt(number(1) + x / mx::where(second, t, number(1)));
  return mx::where(second, term, number(0));
}

}  // namespace

Remainder Remainder::empty(int batch, int heads, int key_width, int value_width) {
  return {
      mx::zeros({batch, heads}), mx::zeros({batch, heads, key_width}),
      mx::zeros({batch, heads, key_width}), mx::zeros({batch, heads, value_width})};
}

Remainder Remainder::heads(int first, int last) const {
  return {
      part(count, 1, first, last), part(mean_key, 1, first, last), part(var_key, 1, first, last),
      part(mean_value, 1, first, last)};
}

Remainder Remainder::with_heads(int first, const Remainder& some) const {
  const int last = first + some.count.shape(1), all = count.shape(1);
  const auto merged = [&](const mx::array& whole, const mx::array& middle) {
    std::vector<mx::array> pieces;
    if (first) pieces.push_back(part(whole, 1, 0, first));
    pieces.push_back(middle);
    if (last < all) pieces.push_back(part(whole, 1, last, all));
    return join_along(std::move(pieces), 1);
  };
  return {
      merged(count, some.count), merged(mean_key, some.mean_key), merged(var_key, some.var_key),
      merged(mean_value, some.mean_value)};
}

Remainder Remainder::fold(
    const mx::array& rows_k, const mx::array& rows_v, const std::optional<mx::array>& given) const {
  const mx::array keys = f32(rows_k), values = f32(rows_v);
  const mx::Shape rows{keys.shape(0), keys.shape(1), keys.shape(2)};
  const mx::array weights = given ? mx::broadcast_to(f32(*given), rows) : mx::ones(rows);
  const mx::array added = mx::sum(weights, -1);
  // A weighted mean over the rows; 0 rows fold nothing in whatever this gives.
  const mx::array share =
      mx::expand_dims(weights / mx::expand_dims(mx::maximum(added, number(1e-30)), -1), -2);
  const mx::array new_key = mx::squeeze(mx::matmul(share, keys), 2);
  const mx::array apart = keys - mx::expand_dims(new_key, 2);
  const mx::array new_var = mx::squeeze(mx::matmul(share, mx::square(apart)), 2);
  const mx::array new_value = mx::squeeze(mx::matmul(share, values), 2);

  const mx::array total = count + added;
  const mx::array of_new = mx::expand_dims(added / mx::maximum(total, number(1e-30)), -1);
  const mx::array step = new_key - mean_key;
  return {
      total, mean_key + of_new * step,
      var_key + of_new * (new_var - var_key) + of_new * (number(1) - of_new) * mx::square(step),
      mean_value + of_new * (new_value - mean_value)};
}

Remainder Remainder::without(const mx::array& rows_k, const mx::array& rows_v) const {
  const mx::array keys = f32(rows_k), values = f32(rows_v);
  const mx::array m = number(keys.shape(2)), n = mx::expand_dims(count, -1);
  const mx::array left = mx::maximum(n - m, number(0)), some = mx::maximum(left, number(1));
  const mx::array mean = mx::mean(keys, 2);
  const mx::array var = mx::mean(mx::square(keys - mx::expand_dims(mean, 2)), 2);
  const mx::array new_key = (n * mean_key - m * mean) / some;
  const mx::array apart = left * m / mx::maximum(n, number(1)) * mx::square(new_key - mean);
  // Rounding cannot make a variance negative here.
  const mx::array new_var = mx::maximum((n * var_key - m * var - apart) / some, number(0));
  const mx::array new_value = (n * mean_value - m * mx::mean(values, 2)) / some;
  const mx::array is_left = mx::greater(left, number(0));
  const auto kept = [&](const mx::array& part) { return mx::where(is_left, part, number(0)); };
  return {mx::squeeze(left, -1), kept(new_key), kept(new_var), kept(new_value)};
}

mx::array Remainder::column(const mx::array& q, float scale, const Saturations& saturations) const {
  const int B = q.shape(0), Hq = q.shape(1), L = q.shape(2), D = q.shape(3);
  const mx::array grouped = mx::reshape(f32(q) * number(scale), {B, count.shape(1), -1, D});
  const mx::array mean = mx::matmul(grouped, mx::expand_dims(mean_key, -1));
  const mx::array square =
      mx::square(mx::clip(grouped, number(-kLargestQuery), number(kLargestQuery)));
  mx::array x = mx::matmul(square, mx::expand_dims(number(0.5) * var_key, -1));
  x = mx::minimum(x, number(kLargestTerm));
  const mx::array term = mean + saturated(x, saturations);
  return mx::reshape(mx::expand_dims(mx::log(count), -1) + mx::squeeze(term, -1), {B, Hq, L});
}

std::pair<mx::array, mx::array> Remainder::plain_rows(int rows) const {
  check(
      rows == 1 || (rows > 0 && rows % 2 == 0 && rows <= kMostPlainRows),
      "Plain rows are 1 or an even number up to " + std::to_string(kMostPlainRows) + ".");
  const mx::array signs = antithetic_signs(rows, mean_key.shape(-1));
  const mx::array keys =
      mx::expand_dims(mean_key, 2) + mx::expand_dims(mx::sqrt(var_key), 2) * signs;
  const mx::Shape shape{mean_value.shape(0), mean_value.shape(1), rows, mean_value.shape(2)};
  return {keys, mx::broadcast_to(mx::expand_dims(mean_value, 2), shape)};
}

std::pair<mx::array, mx::array> join(
    const mx::array& out, const mx::array& lse, const mx::array& logits, const mx::array& values) {
  const mx::array joint = mx::logaddexp(lse, logits);
  const mx::array finite = mx::where(joint == number(-kInfinity), number(0), joint);
  const mx::array kept = mx::expand_dims(mx::exp(lse - finite), -1);
  const mx::array added = mx::expand_dims(mx::exp(logits - finite), -1);
  const mx::array value = mx::expand_dims(mx::repeat(values, out.shape(1) / values.shape(1), 1), 2);
  return {mx::astype(f32(out) * kept + value * added, out.dtype()), joint};
}

}  // namespace mlx_h2o
