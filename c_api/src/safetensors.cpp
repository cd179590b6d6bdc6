#include "safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "evaluation.h"
#include "json.h"
#include "sha256.h"

namespace mlx_h2o {

namespace {

constexpr int64_t kMostAxes = 8;  // more than any array of a cache has
// An array of files that have no other, since MLX writes none without; no part of the digest.
const char* const kFiller = "empty";
// The format itself allows no longer header.
constexpr uint64_t kLongestHeader = 100'000'000;

struct DtypeName {
  const char *in_file, *in_python;
  mx::Dtype dtype;
};
const DtypeName kDtypes[] = {{"F32", "float32", mx::float32},    {"F16", "float16", mx::float16},
                             {"BF16", "bfloat16", mx::bfloat16}, {"U32", "uint32", mx::uint32},
                             {"I32", "int32", mx::int32},        {"I16", "int16", mx::int16},
                             {"U8", "uint8", mx::uint8},         {"BOOL", "bool_", mx::bool_}};

const DtypeName& name_of(mx::Dtype dtype) {
  for (const DtypeName& name : kDtypes)
    if (name.dtype == dtype) return name;
  throw Refusal(Blame::internal, "A cache has an array of a dtype that no file has.");
}

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw Refusal(Blame::file, path + ": " + why + ".");
}

// An open file, which is closed with it.
class OpenFile {
 public:
  OpenFile(std::string path, int flags)
      : path_(std::move(path)), descriptor_(open(path_.c_str(), flags | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) fail(path_, std::strerror(errno));
  }
  ~OpenFile() {
    close(descriptor_);
  }
  OpenFile(const OpenFile&) = delete;

  uint64_t size() const {
    const off_t end = lseek(descriptor_, 0, SEEK_END);
    if (end < 0) fail(path_, std::strerror(errno));
    return uint64_t(end);
  }
  void read(void* data, size_t size, uint64_t at) const {
    moved(static_cast<char*>(data), size, [&](char* rest, size_t left, size_t done) {
      return pread(descriptor_, rest, left, off_t(at + done));
    });
  }
  void write(const void* data, size_t size) const {
    moved(static_cast<const char*>(data), size, [&](const char* rest, size_t left, size_t) {
      return ::write(descriptor_, rest, left);
    });
  }
  void sync() const {
    if (fsync(descriptor_)) fail(path_, std::strerror(errno));
  }

 private:
  template <class Bytes, class Move>
  void moved(Bytes data, size_t size, Move move) const {
    for (size_t done = 0; done < size;) {
      const ssize_t count = move(data + done, size - done, done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) fail(path_, count ? std::strerror(errno) : "it is truncated");
      done += size_t(count);
    }
  }

  const std::string path_;
  const int descriptor_;
};

// The header of the digest: as Python prints an array's name, dtype and shape.
std::string described(const std::string& name, const char* dtype, const mx::Shape& shape) {
  std::string sides;
  for (size_t i = 0; i < shape.size(); ++i) sides += (i ? ", " : "") + std::to_string(shape[i]);
  if (shape.size() == 1) sides += ',';
  return name + " mlx.core." + dtype + " (" + sides + ")\n";
}

Sha256 digest_of(const Texts& metadata) {
  Sha256 digest;
  for (const auto& [name, value] : metadata)
    if (name != "digest") digest.update(name + '=' + value + '\n');
  return digest;
}

// What a header says of an array, where its shape and its bytes agree and lie in the file.
struct Place {
  const DtypeName* dtype;
  mx::Shape shape;
  uint64_t first, size;
};

int64_t whole_of(const Json& value, const std::string& name, int64_t most) {
  const int64_t* number = std::get_if<int64_t>(&value.value);
  check(number && *number >= 0 && *number <= most, "its array " + name + " has no shape or place.");
  return *number;
}

Place place_of(const std::string& name, const Json& value, uint64_t length) {
  const Json::Object& entry = value.object(name);
  const std::string& dtype = member(entry, "dtype").words("dtype");
  Place place{nullptr, {}, 0, 0};
  for (const DtypeName& one : kDtypes)
    if (dtype == one.in_file) place.dtype = &one;
  check(place.dtype, "its array " + name + " is " + dtype + ", which no array of a cache is.");
  const Json::List& offsets = member(entry, "data_offsets").list("data_offsets");
  check(offsets.size() == 2, "its array " + name + " has no place.");
  const int64_t most = int64_t(length), first = whole_of(offsets[0], name, most);
  place.first = uint64_t(first);
  place.size = uint64_t(whole_of(offsets[1], name, most) - first);
  const Json::List& sides = member(entry, "shape").list("shape");
  check(sides.size() <= size_t(kMostAxes), "its array " + name + " has too many axes.");
  uint64_t bytes = mx::size_of(place.dtype->dtype);
  for (const Json& side : sides) {
    const int64_t number = whole_of(side, name, std::numeric_limits<int>::max());
    check(!number || bytes <= length / uint64_t(number), "its array " + name + " is too large.");
    bytes *= uint64_t(number);
    place.shape.push_back(int(number));
  }
  check(bytes == place.size, "its array " + name + " has other bytes than its shape takes.");
  return place;
}

mx::array array_of(const Place& place, const std::vector<uint8_t>& bytes) {
  const mx::Dtype dtype = place.dtype->dtype;
  if (bytes.empty()) return mx::zeros(place.shape, dtype);
  const mx::array raw(bytes.data(), mx::Shape{int(bytes.size())}, mx::uint8);
  return mx::reshape(mx::view(raw, dtype), place.shape);
}

Safetensors read_checked(const std::string& path) {
  const OpenFile file(path, O_RDONLY);
  const uint64_t all = file.size();
  uint8_t prefix[8];
  check(all >= sizeof prefix, "it is truncated.");
  file.read(prefix, sizeof prefix, 0);
  uint64_t size = 0;
  for (int i = 7; i >= 0; --i) size = size << 8 | prefix[i];
  check(size <= all - 8 && size <= kLongestHeader, "it is truncated.");
  std::string text(size, ' ');
  file.read(text.data(), size, 8);
  const Json parsed = Json::parsed(text.substr(0, text.find_last_not_of(' ') + 1));
  const uint64_t start = 8 + size, length = all - start;
  Safetensors result;
  std::map<std::string, Place> places;
  uint64_t total = 0;
  for (const auto& [name, value] : parsed.object("its header")) {
    if (name == "__metadata__") {
      for (const auto& [key, words] : value.object(name)) result.metadata[key] = words.words(key);
      continue;
    }
    const Place& place = places.emplace(name, place_of(name, value, length)).first->second;
    // Arrays that share bytes would be more in memory than in the file.
    check(place.size <= length - total, "its arrays overlap.");
    total += place.size;
  }
  check(total == length, "it has bytes that are of no array.");
  Sha256 digest = digest_of(result.metadata);
  for (const auto& [name, place] : places) {
    if (name == kFiller) continue;
    check(place.size <= uint64_t(std::numeric_limits<int>::max()), "an array is too large.");
    std::vector<uint8_t> bytes(place.size);
    file.read(bytes.data(), bytes.size(), start + place.first);
    digest.update(described(name, place.dtype->in_python, place.shape));
    digest.update(bytes.data(), bytes.size());
    result.arrays.emplace(name, array_of(place, bytes));
  }
  const auto expected = result.metadata.find("digest");
  check(expected != result.metadata.end(), "it was not written by mlx-h2o.");
  check(expected->second == digest.hexadecimal(), "it was changed or damaged after it was saved.");
  result.metadata.erase(expected);
  return result;
}

// The bytes of arrays, evaluated at once, by name.
Fields bytes_of(const Fields& arrays) {
  Fields bytes;
  std::vector<mx::array> all;
  for (const auto& [name, array] : arrays) {
    if (!array.size()) continue;
    const mx::array flat = mx::reshape(array, {int(array.size())});
    all.push_back(mx::contiguous(mx::view(flat, mx::uint8)));
    bytes.emplace(name, all.back());
  }
  evaluate(all);
  return bytes;
}

Json header_of(const Fields& arrays, const Texts& metadata) {
  Json::Object texts, all;
  for (const auto& [name, value] : metadata) texts.emplace(name, value);
  all.emplace("__metadata__", texts);
  int64_t at = 0;
  for (const auto& [name, array] : arrays) {
    Json::List shape, offsets(2);
    for (size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(int(i)));
    offsets[0].value = at, offsets[1].value = at += int64_t(array.nbytes());
    all.emplace(
        name,
        Json::Object{
            {"dtype", name_of(array.dtype()).in_file},
            {"shape", shape},
            {"data_offsets", offsets}});
  }
  return all;
}

// A name beside a file that no other process and no other call has.
std::string beside(const std::filesystem::path& path) {
  static std::atomic<unsigned> count = 0;
  const std::string name = "." + path.filename().string() + "." + std::to_string(getpid()) + "." +
      std::to_string(++count);
  return (path.parent_path() / name).string();
}

void write_all(const std::string& path, const Fields& arrays, const Fields& bytes, Json header) {
  const OpenFile file(path, O_WRONLY | O_CREAT | O_EXCL);
  std::string text = header.text();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that arrays begin at multiples of 8 bytes
  uint8_t prefix[8];
  for (int i = 0; i < 8; ++i) prefix[i] = uint8_t(uint64_t(text.size()) >> 8 * i);
  file.write(prefix, sizeof prefix);
  file.write(text.data(), text.size());
  for (const auto& [name, array] : arrays)
    if (const auto raw = bytes.find(name); raw != bytes.end())
      file.write(raw->second.data<uint8_t>(), raw->second.size());
  file.sync();
}

}  // namespace

Safetensors read_safetensors(const std::string& path) {
  try {
    return read_checked(path);
  } catch (const Refusal& refusal) {
    if (refusal.blame != Blame::argument) throw;
    throw Refusal(Blame::saved, path + " cannot be loaded: " + refusal.what());
  }
}

void write_safetensors(const std::string& path, const Fields& arrays, Texts metadata) {
  if (arrays.empty()) return write_safetensors(path, {{kFiller, mx::zeros({1})}}, metadata);
  const Fields bytes = bytes_of(arrays);
  Sha256 digest = digest_of(metadata);
  for (const auto& [name, array] : arrays) {
    if (name == kFiller) continue;
    mx::Shape shape;
    for (size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(int(i)));
    digest.update(described(name, name_of(array.dtype()).in_python, shape));
    if (const auto raw = bytes.find(name); raw != bytes.end())
      digest.update(raw->second.data<uint8_t>(), raw->second.size());
  }
  metadata["digest"] = digest.hexadecimal();
  // A link stays a link.
  std::error_code none;
  std::filesystem::path target = std::filesystem::canonical(path, none);
  if (none) target = path;
  const std::string temporary = beside(target);
  try {
    write_all(temporary, arrays, bytes, header_of(arrays, metadata));
    if (rename(temporary.c_str(), target.c_str())) fail(path, std::strerror(errno));
  } catch (...) {
    unlink(temporary.c_str());
    throw;
  }
}

}  // namespace mlx_h2o
