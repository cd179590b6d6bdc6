#include "state_record.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "crc32.h"
#include "evaluation.h"

namespace mlx_h2o {

namespace {

constexpr char kMagic[] = "MLXH2OST";
constexpr uint32_t kVersion = 1;
// Magic, version, the JSON's bytes, all bytes behind this, their checksum, a nonce and a tag.
constexpr size_t kJsonAt = 12, kSizeAt = 16, kSumAt = 24, kNonceAt = 28, kTagAt = 36, kHead = 52;

// Greatest values of a record's numbers. A state has some 20 bytes for each slot, and 2^28 slots of
// all heads are more than any memory holds rows for.
constexpr size_t kMostJson = size_t(1) << 26, kMostBytes = size_t(1) << 33;
constexpr size_t kMostArrays = size_t(1) << 18, kMostAxes = 8, kMostCaches = 4096;
constexpr int64_t kMostAxis = (int64_t(1) << 31) - 1;

struct NamedDtype {
  const char* name;
  mx::Dtype dtype;
};
const NamedDtype kDtypes[] = {{"float32", mx::float32},   {"float16", mx::float16},
                              {"bfloat16", mx::bfloat16}, {"uint32", mx::uint32},
                              {"int32", mx::int32},       {"int16", mx::int16}};

const NamedDtype& known(bool (*is)(const NamedDtype&, const void*), const void* what) {
  for (const NamedDtype& one : kDtypes)
    if (is(one, what)) return one;
  throw FileError("A record of a state has an array of another dtype.");
}

const char* name_of(mx::Dtype dtype) {
  return known(
             [](const auto& one, const void* d) {
               return one.dtype == *static_cast<const mx::Dtype*>(d);
             },
             &dtype)
      .name;
}

mx::Dtype dtype_named(const std::string& name) {
  return known(
             [](const auto& one, const void* n) {
               return *static_cast<const std::string*>(n) == one.name;
             },
             &name)
      .dtype;
}

int64_t whole_of(const Json& json, int64_t most) {
  const int64_t* const number = std::get_if<int64_t>(&json.value);
  if (!number || *number < 0 || *number > most)
    throw FileError("A record of a state has a number that it cannot have.");
  return *number;
}

Json json_of(int64_t number) {
  Json json;
  json.value = number;
  return json;
}

// One array of `rest`, of which its bytes are taken off.
mx::array array_of(const mx::Shape& shape, mx::Dtype dtype, const char*& rest, size_t& left) {
  size_t size = mx::size_of(dtype);
  bool empty = false;
  for (const int axis : shape) {
    empty = empty || !axis;
    // Also of an empty one, whose strides are products of the others.
    if (size_t(std::max(axis, 1)) > size_t(kMostAxis) / size)
      throw FileError("an array of more bytes than there can be");
    size *= size_t(std::max(axis, 1));
  }
  if (empty) return mx::zeros(shape, dtype);
  if (size > left) throw FileError("an array beyond the end");
  const mx::array raw(reinterpret_cast<const uint8_t*>(rest), mx::Shape{int(size)}, mx::uint8);
  rest += size, left -= size;
  return mx::reshape(mx::view(raw, dtype), shape);
}

StateRecord parsed(const Json& json, const char* rest, size_t left) {
  const Json::Object& told = json.object("A record");
  StateRecord record{
      whole_of(member(told, "position"), kMostTokensOfFile),
      uint32_t(whole_of(member(told, "block"), UINT32_MAX)),
      member(told, "configs").list("configs"),
      {}};
  if (record.configs.size() > kMostCaches) throw FileError("too many caches");
  record.arrays.resize(record.configs.size());
  const Json::List& index = member(told, "arrays").list("arrays");
  if (index.size() > kMostArrays) throw FileError("too many arrays");
  for (const Json& one : index) {
    const Json::List& about = one.list("An array");
    check(about.size() == 4, "An array is cache, name, dtype and shape.");
    const int64_t cache = whole_of(about[0], int64_t(record.arrays.size()) - 1);
    const Json::List& axes = about[3].list("A shape");
    check(axes.size() <= kMostAxes, "An array has too many axes.");
    mx::Shape shape;
    for (const Json& axis : axes) shape.push_back(int(whole_of(axis, kMostAxis)));
    const mx::Dtype dtype = dtype_named(about[2].words("A dtype"));
    record.arrays[size_t(cache)].insert_or_assign(
        about[1].words("A name"), array_of(shape, dtype, rest, left));
  }
  return record;
}

}  // namespace

std::string StateRecord::bytes(uint32_t checksum, const Seal* seal) const {
  Json::List index;
  std::vector<mx::array> parts;
  for (size_t i = 0; i < arrays.size(); ++i)
    for (const auto& [name, array] : arrays[i]) {
      const mx::Shape shape = array.shape();
      index.push_back(
          Json::List{
              int(i), name, name_of(array.dtype()),
              Json(std::vector<int>(shape.begin(), shape.end()))});
      if (array.size()) parts.push_back(mx::contiguous(mx::view(mx::contiguous(array), mx::uint8)));
    }
  evaluate(parts);
  std::string body = Json(
                         Json::Object{
                             {"position", json_of(position)},
                             {"block", json_of(block)},
                             {"configs", configs},
                             {"arrays", std::move(index)},
                             {"told", {}}})
                         .text();
  const uint32_t version = kVersion, length = uint32_t(body.size());
  for (const mx::array& part : parts)
    body.append(reinterpret_cast<const char*>(part.data<uint8_t>()), part.size());
  const uint64_t size = body.size();
  if (length > kMostJson || size > kMostBytes) throw FileError("The state is too large.");
  std::string head(kHead, '\0');
  if (seal) {
    const Nonce nonce = new_nonce();
    const auto tag = seal->encrypt(
        reinterpret_cast<uint8_t*>(body.data()), body.size(), nonce, {0, checksum, 0},
        kSealedAsRecord);
    std::memcpy(head.data() + kNonceAt, nonce.data(), nonce.size());
    std::memcpy(head.data() + kTagAt, tag.data(), tag.size());
  }
  const uint32_t sum = crc32(body.data(), body.size(), checksum);
  std::memcpy(head.data(), kMagic, 8);
  std::memcpy(head.data() + 8, &version, 4);
  std::memcpy(head.data() + kJsonAt, &length, 4);
  std::memcpy(head.data() + kSizeAt, &size, 8);
  std::memcpy(head.data() + kSumAt, &sum, 4);
  return head + body;
}

StateRecord StateRecord::read(const std::string& path, uint32_t checksum, const Seal* seal) {
  std::error_code error;
  const std::filesystem::file_status about = std::filesystem::symlink_status(path, error);
  if (error || !std::filesystem::is_regular_file(about)) throw FileError("There is no record.");
  const uintmax_t there = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  char head[kHead] = {};
  uint32_t version = 0, length = 0, sum = 0;
  uint64_t size = 0;
  if (!error && file.read(head, kHead)) {
    std::memcpy(&version, head + 8, 4);
    std::memcpy(&length, head + kJsonAt, 4);
    std::memcpy(&size, head + kSizeAt, 8);
    std::memcpy(&sum, head + kSumAt, 4);
  }
  if (error || !file || std::memcmp(head, kMagic, 8) || version != kVersion || size > kMostBytes ||
      there != size + kHead || length > size || length > kMostJson)
    throw FileError("This is no record of a state, or it was not written whole.");
  std::string body(size, '\0');
  if (!file.read(body.data(), std::streamsize(size)) || crc32(body.data(), size, checksum) != sum)
    throw FileError("A record of a state is damaged.");
  if (seal) {
    Nonce nonce;
    std::memcpy(nonce.data(), head + kNonceAt, nonce.size());
    seal->decrypt(
        reinterpret_cast<uint8_t*>(body.data()), size,
        reinterpret_cast<const uint8_t*>(head + kTagAt), nonce, {0, checksum, 0}, kSealedAsRecord);
  }
  try {
    return parsed(Json::parsed(body.substr(0, length)), body.data() + length, size - length);
  } catch (const std::exception& error) {
    throw FileError(std::string("A record of a state is damaged: ") + error.what());
  }
}

std::array<std::string, 2> record_paths(const std::string& rows) {
  return {rows + ".state-a", rows + ".state-b"};
}

}  // namespace mlx_h2o
