#include "row_file.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "evaluation.h"

namespace mlx_h2o {

namespace {

// The most positions by which one layer may be before another; one that comes no more would keep
// all others' rows in memory.
constexpr int64_t kMostApart = 1 << 17;

}  // namespace

RowFile::RowFile(const std::string& folder, std::vector<LayerForm> forms)
    : file_(folder),
      layout_(std::move(forms)),
      delivered_(layout_.layers().size()),
      parts_(layout_.layers().size()) {}

RowFile::~RowFile() {
  writer_.fail("it is closed");
  writer_.take_back(0);
}

size_t RowFile::nbytes(int layer) const {
  size_t bytes =
      blocks_.size() * layout_.layers()[layer].heads * layout_.layers()[layer].segment_bytes();
  for (const Part& part : parts_[layer])
    for (const auto& [name, rows] : part.bytes) bytes += rows.nbytes();
  return bytes;
}

int64_t RowFile::complete() const {
  return *std::min_element(delivered_.begin(), delivered_.end());
}

void RowFile::fail(const std::string& why) {
  writer_.fail(why);
  writer_.take_back(0);
  for (std::deque<Part>& parts : parts_) parts.clear();
  blocks_.clear();
}

// -- rows come ------------------------------------------------------------------------------------

void RowFile::append(int layer, int64_t first, const Fields& rows) {
  Part part{first, 0, {}};
  for (const RowField& field : layout_.layers()[layer].fields) {
    const mx::array& of_field = rows.at(field.name);
    part.count = of_field.shape(2);
    part.bytes.emplace(field.name, mx::view(of_field, mx::uint8));
  }
  const int64_t before = complete();
  if (first - before > kMostApart) return fail("some layers got no more rows");
  delivered_[layer] = part.end();
  parts_[layer].push_back(std::move(part));
  if (complete() == before) return;
  forget_written();
  try {
    // Of these the step is over, so that they are evaluated.
    settle(complete() - kBlockPositions);
    if (complete() - handed_ * kBlockPositions > kBlockPositions) settle(complete());
  } catch (const FileError& error) {
    fail(error.what());
  }
}

// Puts the rows of all parts that end there or before into their blocks.
void RowFile::settle(int64_t before) {
  std::vector<std::pair<int, Part>> due;
  for (int layer = 0; layer < int(parts_.size()); ++layer)
    while (!parts_[layer].empty() && parts_[layer].front().end() <= before) {
      due.emplace_back(layer, std::move(parts_[layer].front()));
      parts_[layer].pop_front();
    }
  settle(due);
}

void RowFile::settle(const std::vector<std::pair<int, Part>>& parts) {
  if (parts.empty()) return;
  std::vector<std::pair<int, Part>> whole;
  std::vector<mx::array> arrays;
  for (const auto& [layer, part] : parts) {
    whole.emplace_back(layer, Part{part.first, part.count, {}});
    for (const auto& [name, bytes] : part.bytes) {
      const mx::array dense = mx::contiguous(bytes);
      arrays.push_back(dense);
      whole.back().second.bytes.emplace(name, dense);
    }
  }
  try {
    evaluate(arrays);
  } catch (const std::exception& error) {
    throw FileError(std::string("rows could not be evaluated: ") + error.what());
  }
  // Block by block: few wait for the disk, however long the parts are.
  const int P = kBlockPositions;
  int64_t first = whole[0].second.first, end = 0;
  for (const auto& [layer, part] : whole)
    first = std::min(first, part.first), end = std::max(end, part.end());
  for (int64_t index = first / P; index * P < end; ++index) {
    for (const auto& [layer, part] : whole)
      if (index * P >= part.first && index * P < part.end()) put(layer, part, index);
    hand_over();
  }
}

// Puts a part's rows into one of its blocks.
void RowFile::put(int layer, const Part& part, int64_t index) {
  const LayerForm& form = layout_.layers()[layer];
  const int P = kBlockPositions;
  std::shared_ptr<Block>& block = blocks_[index];
  if (!block)
    block = std::make_shared<Block>(
        Block{std::vector<uint8_t>(layout_.block_bytes()), std::vector<bool>(delivered_.size())});
  block->has[layer] = true;
  for (int head = 0; head < form.heads; ++head) {
    uint8_t* to = block->bytes.data() + layout_.segment_start(layer, head);
    for (const RowField& field : form.fields) {
      const size_t size = field.row_bytes();
      const mx::array& bytes = part.bytes.at(field.name);
      const int64_t all = bytes.shape(2);
      const uint8_t* from = bytes.data<uint8_t>() + (head * all + index * P - part.first) * size;
      std::memcpy(to, from, P * size);
      to += P * size;
    }
  }
}

// Gives the writer every block that all layers are in, one at a time.
void RowFile::hand_over() {
  for (;; ++handed_) {
    const auto it = blocks_.find(handed_);
    if (it == blocks_.end()) return;
    const std::shared_ptr<Block> block = it->second;
    if (std::find(block->has.begin(), block->has.end(), false) != block->has.end()) return;
    const int64_t index = handed_;
    writer_.hand({index, [this, index, block] { write(index, *block); }});
    writer_.wait_before(index);
    forget_written();
  }
}

// In the writer's thread.
void RowFile::write(int64_t index, const Block& block) {
  file_.write(block.bytes.data(), block.bytes.size(), size_t(index) * layout_.block_bytes());
  written_ = index + 1;
}

void RowFile::forget_written() {
  blocks_.erase(blocks_.begin(), blocks_.lower_bound(std::min<int64_t>(written_, handed_)));
}

bool RowFile::flush() {
  try {
    settle(complete());
  } catch (const FileError& error) {
    fail(error.what());
  }
  if (!writer_.wait()) return false;
  forget_written();
  return true;
}

// -- rows come back -------------------------------------------------------------------------------

RowBytes RowFile::rows(int layer, int head, const std::vector<int64_t>& positions) {
  const int P = kBlockPositions, layers = int(delivered_.size());
  if (layer < 0 || layer >= layers || head < 0 || head >= layout_.layers()[layer].heads)
    throw FileError("This file has no such layer or KV head.");
  std::set<int64_t> blocks;
  for (const int64_t position : positions) {
    if (position < 0 || position >= delivered_[layer])
      throw FileError(
          "This layer has rows of positions 0 to " + std::to_string(delivered_[layer] - 1) +
          " only.");
    blocks.insert(position / P);
  }
  if (!blocks.empty() && !parts_[layer].empty() &&
      *blocks.rbegin() * P >= parts_[layer].front().first) {
    std::vector<std::pair<int, Part>> all;
    for (Part& part : parts_[layer]) all.emplace_back(layer, std::move(part));
    parts_[layer].clear();
    settle(all);
  }
  std::map<int64_t, std::vector<uint8_t>> read;
  std::map<int64_t, const uint8_t*> segments;
  for (const int64_t block : blocks) {
    const uint8_t* segment = segment_in_memory(block, layer, head);
    if (!segment) segment = (read[block] = segment_in_file(block, layer, head)).data();
    segments[block] = segment;
  }
  RowBytes result;
  size_t start = 0;
  for (const RowField& field : layout_.layers()[layer].fields) {
    const size_t size = field.row_bytes();
    std::vector<uint8_t>& rows = result[field.name];
    rows.reserve(size * positions.size());
    for (const int64_t position : positions) {
      const uint8_t* row = segments[position / P] + start + position % P * size;
      rows.insert(rows.end(), row, row + size);
    }
    start += size * P;
  }
  return result;
}

const uint8_t* RowFile::segment_in_memory(int64_t block, int layer, int head) const {
  const auto it = blocks_.find(block);
  if (it == blocks_.end() || !it->second->has[layer]) return nullptr;
  return it->second->bytes.data() + layout_.segment_start(layer, head);
}

// One head's part of a block.
std::vector<uint8_t> RowFile::segment_in_file(int64_t block, int layer, int head) const {
  std::vector<uint8_t> segment(layout_.layers()[layer].segment_bytes());
  const size_t start = size_t(block) * layout_.block_bytes();
  file_.read(segment.data(), segment.size(), start + layout_.segment_start(layer, head));
  return segment;
}

// A whole block, to be gone on with.
std::shared_ptr<RowFile::Block> RowFile::block_in_file(int64_t index) const {
  auto whole = std::make_shared<Block>(Block{
      std::vector<uint8_t>(layout_.block_bytes()), std::vector<bool>(delivered_.size(), true)});
  file_.read(whole->bytes.data(), whole->bytes.size(), size_t(index) * layout_.block_bytes());
  return whole;
}

// -- tokens are taken back ------------------------------------------------------------------------

void RowFile::truncate(int layer, int64_t first, bool kept) {
  const int P = kBlockPositions;
  const int64_t block = first / P, end = kept ? first + P : first;
  if (block < handed_) {
    writer_.take_back(block);
    if (kept && !blocks_.contains(block)) try {
        blocks_[block] = block_in_file(block);
      } catch (const FileError& error) {
        return fail(error.what());
      }
    handed_ = block;
    written_ = std::min<int64_t>(written_, block);
  }
  blocks_.erase(blocks_.lower_bound(end / P), blocks_.end());
  for (int i = 0; i < int(delivered_.size()); ++i) {
    const int64_t stays = i == layer ? first : end;
    delivered_[i] = std::min(delivered_[i], stays);
    std::deque<Part>& parts = parts_[i];
    while (!parts.empty() && parts.back().first >= stays) parts.pop_back();
    // Parts begin and end with blocks.
    if (!parts.empty())
      parts.back().count = std::min(parts.back().end(), stays) - parts.back().first;
  }
  if (const auto it = blocks_.find(block); it != blocks_.end()) it->second->has[layer] = false;
}

}  // namespace mlx_h2o
