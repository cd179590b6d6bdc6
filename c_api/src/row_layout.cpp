#include "row_layout.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "crc32.h"
#include "json.h"
#include "ops.h"

namespace mlx_h2o {

namespace {

constexpr char kMagic[] = "MLXH2ORW";
constexpr uint32_t kVersion = 1;
// Blocks start at multiples of the pages of Linux; the header fills pages of Apple's processors.
constexpr size_t kPage = 4096, kLargePage = 16384;
constexpr size_t kStartBytes = 20;   // magic, version, length of the JSON, its checksum
constexpr size_t kRecordBytes = 24;  // index, rows in use, 0, nonce of sealed blocks
constexpr size_t kNonceAt = 16;

// Greatest values of a header's numbers.
constexpr size_t kMostJson = 1 << 22, kMostName = 64;
constexpr int64_t kMostLayers = 4096, kMostHeads = 65536, kMostFields = 16, kMostWidth = 1 << 20;
constexpr int64_t kMostPositions = 4096, kMostBlockBytes = int64_t(1) << 31;

struct NamedDtype {
  const char* name;
  mx::Dtype dtype;
};
const NamedDtype kDtypes[] = {
    {"float32", mx::float32},
    {"float16", mx::float16},
    {"bfloat16", mx::bfloat16},
    {"uint32", mx::uint32}};

std::string name_of(mx::Dtype dtype) {
  for (const NamedDtype& known : kDtypes)
    if (known.dtype == dtype) return known.name;
  throw FileError("A file of rows holds float32, float16, bfloat16 and uint32.");
}

mx::Dtype dtype_named(const std::string& name) {
  for (const NamedDtype& known : kDtypes)
    if (known.name == name) return known.dtype;
  throw FileError("A file of rows holds float32, float16, bfloat16 and uint32; got " + name + ".");
}

void check_within(const char* name, int64_t number, int64_t most) {
  if (number < 1 || number > most)
    throw FileError(
        "A file of rows has 1 to " + std::to_string(most) + " " + name + "; got " +
        std::to_string(number) + ".");
}

void check_form(const LayerForm& form) {
  check_within("KV heads", form.heads, kMostHeads);
  check_within("fields", form.fields.size(), kMostFields);
  std::set<std::string> names;
  for (const RowField& field : form.fields) {
    check_within("letters in a name", field.name.size(), kMostName);
    check_within("elements of a row", field.width, kMostWidth);
    if (!names.insert(field.name).second) throw FileError("Two fields of a row have one name.");
  }
}

size_t up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

template <class T>
T number_at(const void* data, size_t at) {
  T number;
  std::memcpy(&number, static_cast<const char*>(data) + at, sizeof number);
  return number;
}

LayerForm form_of(const Json& json) {
  const Json::List& pair = json.list("A layer");
  check(pair.size() == 2, "A layer is heads and fields.");
  LayerForm form{pair[0].whole("KV heads", 1, kMostHeads), {}};
  for (const Json& one : pair[1].list("The fields")) {
    const Json::List& field = one.list("A field");
    check(field.size() == 3, "A field is name, dtype and width.");
    form.fields.push_back(
        {field[0].words("A field"), dtype_named(field[1].words("A dtype")),
         field[2].whole("elements", 1, kMostWidth)});
  }
  return form;
}

}  // namespace

size_t LayerForm::row_bytes() const {
  size_t bytes = 0;
  for (const RowField& field : fields) bytes += field.row_bytes();
  return bytes;
}

RowLayout::RowLayout(std::vector<LayerForm> layers, int positions, std::string notes, bool sealed)
    : layers_(std::move(layers)), positions_(positions), notes_(std::move(notes)), sealed_(sealed) {
  check_within("layers", layers_.size(), kMostLayers);
  check_within("positions of a block", positions_, kMostPositions);
  first_segments_.push_back(0), layer_starts_.push_back(0);
  for (const LayerForm& form : layers_) {
    check_form(form);
    first_segments_.push_back(first_segments_.back() + form.heads);
    layer_starts_.push_back(layer_starts_.back() + form.heads * form.row_bytes() * positions_);
    check_within("bytes of a block", layer_starts_.back(), kMostBlockBytes);
  }
  make_header();
}

void RowLayout::make_header() {
  Json::List layers;
  for (const LayerForm& form : layers_) {
    Json::List fields;
    for (const RowField& field : form.fields)
      fields.push_back(Json::List{field.name, name_of(field.dtype), field.width});
    layers.push_back(Json::List{form.heads, std::move(fields)});
  }
  // Members in Python's order, which makes the header anew to know its checksum.
  const std::string text = "{\"layers\": " + Json(std::move(layers)).text() +
      ", \"positions\": " + std::to_string(positions_) + ", \"sealed\": " + Json(sealed_).text() +
      ", \"notes\": " + Json(notes_).text() + "}";
  if (text.size() > kMostJson) throw FileError("The header of a file of rows is too long.");
  const uint32_t numbers[] = {
      kVersion, uint32_t(text.size()), crc32(text.data(), text.size(), kVersion)};
  header_.assign(kMagic, 8);
  header_.append(reinterpret_cast<const char*>(numbers), sizeof numbers);
  header_ += text;
  header_.resize(up(header_.size(), kLargePage));
  checksum_ = crc32(header_.data(), header_.size());
}

size_t RowLayout::header_length(const std::string& start) {
  if (start.size() < kStartBytes || start.compare(0, 8, kMagic))
    throw FileError("This is no file of rows.");
  const uint32_t version = number_at<uint32_t>(start.data(), 8);
  if (version != kVersion)
    throw FileError(
        "This file of rows has version " + std::to_string(version) + "; this mlx-h2o reads " +
        std::to_string(kVersion) + ".");
  const uint32_t length = number_at<uint32_t>(start.data(), 12);
  if (length > kMostJson) throw FileError("The header of this file of rows is damaged.");
  return up(kStartBytes + length, kLargePage);
}

RowLayout RowLayout::read(const std::string& start) {
  const size_t length = header_length(start);
  const std::string damaged = "The header of this file of rows is damaged";
  if (start.size() < length) throw FileError(damaged + ".");
  const std::string text = start.substr(kStartBytes, number_at<uint32_t>(start.data(), 12));
  if (crc32(text.data(), text.size(), kVersion) != number_at<uint32_t>(start.data(), 16))
    throw FileError(damaged + ".");
  try {
    const Json json = Json::parsed(text);
    const Json::Object& header = json.object("The header");
    std::vector<LayerForm> layers;
    for (const Json& layer : member(header, "layers").list("layers"))
      layers.push_back(form_of(layer));
    RowLayout layout(
        std::move(layers), member(header, "positions").whole("positions", 1, kMostPositions),
        member(header, "notes").words("notes"), member(header, "sealed").truth("sealed"));
    // Its own bytes count, which another writer may have ordered otherwise.
    layout.header_ = start.substr(0, length);
    layout.checksum_ = crc32(start.data(), length);
    return layout;
  } catch (const std::exception& error) {
    throw FileError(damaged + ": " + error.what());
  }
}

size_t RowLayout::segment_start(int layer, int head) const {
  return layer_starts_[layer] + head * segment_bytes(layer);
}

size_t RowLayout::record_bytes() const {
  return kRecordBytes + (4 + (sealed_ ? kTagBytes : 0)) * size_t(segments()) + 4;
}

size_t RowLayout::block_bytes() const {
  return up(record_start() + record_bytes(), kPage);
}

void RowLayout::put_record(
    std::vector<uint8_t>& block, int64_t index, int rows, const Nonce& nonce,
    const std::vector<uint8_t>& tags) const {
  uint8_t* const record = block.data() + record_start();
  const uint64_t number = index;
  const uint32_t used[] = {uint32_t(rows), 0};
  std::memset(record, 0, record_bytes());
  std::memcpy(record, &number, 8);
  std::memcpy(record + 8, used, 8);
  std::memcpy(record + kNonceAt, nonce.data(), kNonceBytes);
  uint8_t* sums = record + kRecordBytes;
  for (size_t layer = 0; layer < layers_.size(); ++layer)
    for (int head = 0; head < layers_[layer].heads; ++head, sums += 4) {
      const uint8_t* const segment = block.data() + segment_start(int(layer), head);
      const uint32_t sum = crc32(segment, segment_bytes(int(layer)), checksum_);
      std::memcpy(sums, &sum, 4);
    }
  if (!tags.empty()) std::memcpy(sums, tags.data(), tags.size());
  sums += tags.size();
  const uint32_t of_record = crc32(record, sums - record, checksum_);
  std::memcpy(sums, &of_record, 4);
}

BlockRecord RowLayout::checked_record(int64_t index, const uint8_t* record) const {
  const size_t size = record_bytes();
  if (crc32(record, size - 4, checksum_) != number_at<uint32_t>(record, size - 4))
    throw FileError("Block " + std::to_string(index) + " was not written whole.");
  const uint32_t rows = number_at<uint32_t>(record, 8);
  if (number_at<uint64_t>(record, 0) != uint64_t(index) || !rows || rows > uint32_t(positions_) ||
      number_at<uint32_t>(record, 12))
    throw FileError("Block " + std::to_string(index) + " has the record of another.");
  BlockRecord read{int(rows), {}, std::vector<uint32_t>(segments()), {}};
  std::memcpy(read.nonce.data(), record + kNonceAt, kNonceBytes);
  std::memcpy(read.checksums.data(), record + kRecordBytes, 4 * read.checksums.size());
  read.tags.assign(record + kRecordBytes + 4 * read.checksums.size(), record + size - 4);
  return read;
}

bool RowLayout::is_intact(
    const BlockRecord& record, int segment, const uint8_t* data, size_t size) const {
  return crc32(data, size, checksum_) == record.checksums[segment];
}

}  // namespace mlx_h2o
