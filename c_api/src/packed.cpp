#include "packed.h"

#include "attend.h"
#include "cpu_kernels.h"

namespace mlx_h2o {

namespace {

bool known_bits(int bits) {
  return bits >= 2 && bits <= 8 && bits != 7;
}

bool known_group(int size) {
  return size == 32 || size == 64 || size == 128;
}

// What is stored of each element, [..., rows, width] uint32.
mx::array levels_of(const Stored& rows) {
  const mx::array scales = mx::ones(rows.arrays[1].shape());
  return mx::astype(
      mx::dequantize(rows.arrays[0], scales, mx::zeros(scales.shape()), rows.group_size, rows.bits),
      mx::uint32);
}

mx::array unsigned_number(uint32_t x) {
  return mx::array(x, mx::uint32);
}

// A row is one stream of bits, the lowest bit of the first level first.
mx::array words_of(const mx::array& levels, int bits) {
  mx::array stream = mx::bitwise_and(
      mx::right_shift(mx::expand_dims(levels, -1), mx::astype(range(0, bits), mx::uint32)),
      unsigned_number(1));
  mx::Shape words = levels.shape();
  words.back() = words.back() * bits / 32;
  words.push_back(32);
  stream = mx::left_shift(mx::reshape(stream, words), mx::astype(range(0, 32), mx::uint32));
  return mx::sum(stream, -1);
}

// Words, scales and biases of rows, each group from its least to its greatest element.
std::vector<mx::array> packed_by_range(const mx::array& rows, int bits, int group_size) {
  const mx::array top = number((1 << bits) - 1);
  mx::Shape shape = rows.shape();
  shape.back() /= group_size;
  shape.push_back(group_size);
  const mx::array groups = mx::reshape(f32(rows), shape);
  const mx::array least = mx::min(groups, -1), greatest = mx::max(groups, -1);
  // The levels count from what is stored, so that rounding to the rows' dtype costs nothing twice.
  const mx::array scales = mx::astype((greatest - least) / top, rows.dtype());
  const mx::array biases = mx::astype(least, rows.dtype());
  const mx::array by = mx::expand_dims(f32(scales), -1), off = mx::expand_dims(f32(biases), -1);
  mx::array levels = mx::minimum(mx::round((groups - off) / by), top);
  // Neither a group without a range nor a NaN is above 0.
  const mx::array counts =
      mx::logical_and(mx::greater(by, number(0)), mx::greater(levels, number(0)));
  levels = mx::astype(mx::where(counts, levels, number(0)), mx::uint32);
  return {words_of(mx::reshape(levels, rows.shape()), bits), scales, biases};
}

}  // namespace

Fields heads_of(const Fields& fields, int first, int last) {
  Fields some;
  for (const auto& [name, field] : fields) some.emplace(name, part(field, 1, first, last));
  return some;
}

mx::array dense(const Stored& rows) {
  if (!rows.bits) return rows.arrays[0];
  return mx::dequantize(
      rows.arrays[0], f32(rows.arrays[1]), f32(rows.arrays[2]), rows.group_size, rows.bits);
}

mx::array dense(const Parts& parts) {
  if (parts.size() == 1) return dense(parts[0]);
  std::vector<mx::array> numbers;
  for (const Stored& rows : parts)
    if (count(rows)) numbers.push_back(f32(dense(rows)));
  return join_along(std::move(numbers), 2);
}

int count(const Stored& rows) {
  return rows.arrays[0].shape(-2);
}

int count(const Parts& parts) {
  int rows = 0;
  for (const Stored& kind : parts) rows += count(kind);
  return rows;
}

Parts first_rows(const Parts& parts, int wanted) {
  Parts first;
  for (const Stored& kind : parts) {
    const int of_kind = std::min(wanted, count(kind));
    Stored some{{}, kind.bits, kind.group_size};
    for (const mx::array& a : kind.arrays) some.arrays.push_back(part(a, -2, 0, of_kind));
    first.push_back(std::move(some));
    wanted -= of_kind;
  }
  return first;
}

Stored packed(const mx::array& rows, int bits, int group_size) {
  check(
      known_bits(bits) && known_group(group_size) && rows.shape(-1) % group_size == 0,
      "Rows of width " + std::to_string(rows.shape(-1)) + " cannot be packed in groups of " +
          std::to_string(group_size) + " with " + std::to_string(bits) +
          " bits: bits are 2, 3, 4, 5, 6 or 8, groups are 32, 64 or 128 and divide the width.");
  // The same bits either way, but for NaNs.
  if (backend() == Backend::cpu) return cpu_packed(rows, bits, group_size);
  return {packed_by_range(rows, bits, group_size), bits, group_size};
}

Stored with_bits(const Stored& rows, int bits) {
  if (bits == rows.bits) return rows;
  mx::array levels = levels_of(rows), scales = rows.arrays[1], biases = rows.arrays[2];
  if (bits < rows.bits) {
    const int dropped = rows.bits - bits;
    levels = mx::right_shift(levels, unsigned_number(dropped));
    // The bias moves to the middle of the numbers that now share a level.
    const mx::array middle = number(((1 << dropped) - 1) / 2.0) * f32(scales);
    biases = mx::astype(f32(biases) + middle, biases.dtype());
    scales = scales * mx::array(static_cast<float>(1 << dropped), scales.dtype());
  }
  return {{words_of(levels, bits), scales, biases}, bits, rows.group_size};
}

void Packing::check_widths() const {
  check(
      (!k_bits || known_bits(k_bits)) && (!v_bits || known_bits(v_bits)),
      "k_bits and v_bits must be 2, 3, 4, 5, 6 or 8, or 0 for rows in their own dtype.");
  check(known_group(group_size), "group_size must be 32, 64 or 128.");
  check(
      !recent_bits || recent_bits == 16 || known_bits(recent_bits),
      "recent_bits must be 2, 3, 4, 5, 6, 8 or 16 (the rows' own dtype), or 0: as all others.");
  check(!recent_bits || packs(), "recent_bits needs k_bits or v_bits for the other tokens.");
}

std::optional<Packing> Packing::recent() const {
  if (!recent_bits) return std::nullopt;
  const int bits = recent_bits == 16 ? 0 : recent_bits;
  return Packing{k_bits ? bits : 0, v_bits ? bits : 0, group_size};
}

void Packing::put(Fields& fields, const std::string& name, const Stored& rows) const {
  if (!bits(name)) {
    fields.insert_or_assign(name, dense(rows));
    return;
  }
  const Stored stored =
      rows.bits ? with_bits(rows, bits(name)) : packed(rows.arrays[0], bits(name), group_size);
  fields.insert_or_assign(name, stored.arrays[0]);
  fields.insert_or_assign(name + ".scales", stored.arrays[1]);
  fields.insert_or_assign(name + ".biases", stored.arrays[2]);
}

Stored Packing::rows(const std::string& name, const Fields& fields) const {
  if (!bits(name)) return {{fields.at(name)}};
  return {
      {fields.at(name), fields.at(name + ".scales"), fields.at(name + ".biases")},
      bits(name),
      group_size};
}

}  // namespace mlx_h2o
