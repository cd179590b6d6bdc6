#include "row_buffers.h"

namespace mlx_h2o {

std::vector<std::string> buffer_names(const std::string& field) {
  const std::string one = field.substr(0, field.size() - 1);
  return {field, one + "_scales", one + "_biases"};
}

void add_buffers(Buffers& buffers, const std::string& field, const Stored& rows) {
  const auto names = buffer_names(field);
  for (size_t i = 0; i < rows.arrays.size(); ++i) buffers.emplace(names[i], rows.arrays[i]);
}

Template packing_of(const std::string& field, const Stored& rows) {
  const std::string letter = field == "keys" ? "K" : "V";
  return {{letter + "_BITS", rows.bits}, {letter + "_GROUP", rows.bits ? rows.group_size : 1}};
}

int row_bytes(const Stored& rows) {
  int bytes = 0;
  for (const mx::array& a : rows.arrays) bytes += a.shape(-1) * static_cast<int>(a.itemsize());
  return bytes;
}

mx::Dtype row_dtype(const Stored& rows) {
  return rows.arrays.back().dtype();
}

Stored as_one_head(const Stored& rows) {
  Stored one{{}, rows.bits, rows.group_size};
  for (const mx::array& a : rows.arrays) one.arrays.push_back(mx::expand_dims(a, 1));
  return one;
}

}  // namespace mlx_h2o
