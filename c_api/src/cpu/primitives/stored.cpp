#include "stored.h"

#include <tuple>

#include "primitive.h"

namespace mlx_h2o {

SlotLayout layout_of(const Stored& k, const Stored& v) {
  return {k.bits, k.group_size, v.bits, v.group_size};
}

void check_packing(int bits, int group_size) {
  if (bits < 2 || bits > 8 || bits == 7)
    refuse("bits must be 2, 3, 4, 5, 6 or 8, not " + std::to_string(bits));
  if (group_size != 32 && group_size != 64 && group_size != 128)
    refuse("group_size must be 32, 64 or 128, not " + std::to_string(group_size));
}

void check_stored(const Stored& x) {
  const size_t wanted = x.bits ? 3 : 1;
  if (x.arrays.size() != wanted)
    refuse("Dense rows are one array, packed rows three, not " + std::to_string(x.arrays.size()));
  require(
      is_float(x.arrays.back()), "Keys and values must be float32, float16 or bfloat16",
      {{"they are", x.arrays.back()}});
  if (!x.bits) return;
  const auto& [words, scales, biases] = std::tie(x.arrays[0], x.arrays[1], x.arrays[2]);
  check_packing(x.bits, x.group_size);
  require(words.dtype() == mx::uint32, "Packed rows are uint32", {{"words", words}});
  bool fits = words.ndim() == scales.ndim() && x.width() % x.group_size == 0 &&
      scales.shape(-1) == x.width() / x.group_size && scales.shape() == biases.shape() &&
      scales.dtype() == biases.dtype();
  for (size_t axis = 0; fits && axis + 1 < words.ndim(); ++axis)
    fits = words.shape(axis) == scales.shape(axis);
  require(
      fits, "Scales and biases do not fit the packed rows",
      {{"words", words}, {"scales", scales}, {"biases", biases}});
}

}  // namespace mlx_h2o
