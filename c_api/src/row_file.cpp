#include "row_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "evaluation.h"
#include "json.h"

namespace mlx_h2o {

namespace {

// The most positions by which one layer may be before another; one that comes no more would keep
// all others' rows in memory.
constexpr int64_t kMostApart = 1 << 17;

std::string reason() {
  return std::strerror(errno);
}

void write_all(int descriptor, const void* data, size_t size, size_t at) {
  const char* rest = static_cast<const char*>(data);
  while (size) {
    const ssize_t count = pwrite(descriptor, rest, size, off_t(at));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw FileError(count ? reason() : "nothing could be written");
    rest += count, size -= count, at += count;
  }
}

// As many bytes as there are, up to `size`.
size_t read_some(int descriptor, void* data, size_t size, size_t at) {
  char* to = static_cast<char*>(data);
  size_t got = 0;
  while (got < size) {
    const ssize_t count = pread(descriptor, to + got, size - got, off_t(at + got));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FileError(reason());
    if (!count) break;
    got += count;
  }
  return got;
}

std::string read_text(int descriptor, size_t size) {
  std::string text(size, '\0');
  text.resize(read_some(descriptor, text.data(), size, 0));
  return text;
}

// Python removes files that were not to be kept, by these notes, if their process was killed.
Json::Object new_notes(bool kept) {
  return {{"id", hex_of(random_bytes(16))}, {"kept", kept}};
}

// The cipher of a file whose header was read; null if it is not sealed.
std::unique_ptr<Seal> seal_of(const RowLayout& layout, std::shared_ptr<const Cipher> cipher) {
  if (layout.sealed() && !cipher)
    throw FileError("This file of rows is sealed with a key: give its cipher.");
  if (!layout.sealed() && cipher)
    throw FileError("This file of rows is not sealed: give no cipher.");
  if (!cipher) return nullptr;
  std::vector<uint8_t> salt;
  std::string check;
  try {
    const Json notes = Json::parsed(layout.notes());
    salt = bytes_of_hex(member(notes.object("notes"), "salt").words("salt"));
    check = member(notes.object("notes"), "check").words("check");
  } catch (const std::exception&) {
    throw FileError("The header of this file of rows is damaged.");
  }
  if (salt.size() != kSaltBytes) throw FileError("The header of this file of rows is damaged.");
  auto seal = std::make_unique<Seal>(std::move(cipher), salt);
  seal->require(check);
  return seal;
}

}  // namespace

RowFile::RowFile(
    std::string path, int descriptor, RowLayout layout, std::unique_ptr<Seal> seal, bool writable,
    bool removed)
    : path_(std::move(path)),
      descriptor_(descriptor),
      layout_(std::move(layout)),
      seal_(std::move(seal)),
      writable_(writable),
      removed_(removed),
      delivered_(layout_.layers().size()),
      parts_(layout_.layers().size()) {}

std::unique_ptr<RowFile> RowFile::create(
    const std::string& path, std::vector<LayerForm> forms, bool kept,
    std::shared_ptr<const Cipher> cipher) {
  Json::Object notes = new_notes(kept);
  std::unique_ptr<Seal> seal;
  if (cipher) {
    const std::vector<uint8_t> salt = random_bytes(kSaltBytes);
    seal = std::make_unique<Seal>(std::move(cipher), salt);
    notes["salt"] = hex_of(salt), notes["check"] = seal->check();
  }
  RowLayout layout(std::move(forms), kBlockPositions, Json(std::move(notes)).text(), !!seal);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (descriptor < 0) throw FileError(reason());
  try {
    if (flock(descriptor, LOCK_EX | LOCK_NB)) throw FileError(reason());
    write_all(descriptor, layout.header().data(), layout.header().size(), 0);
    return std::unique_ptr<RowFile>(
        new RowFile(path, descriptor, std::move(layout), std::move(seal), true, true));
  } catch (...) {
    unlink(path.c_str());
    close(descriptor);
    throw;
  }
}

std::unique_ptr<RowFile> RowFile::open(
    const std::string& path, std::shared_ptr<const Cipher> cipher) {
  return opened(path, false, std::move(cipher));
}

std::unique_ptr<RowFile> RowFile::open_to_go_on(
    const std::string& path, std::shared_ptr<const Cipher> cipher) {
  std::unique_ptr<RowFile> file = opened(path, true, std::move(cipher));
  if (file->layout().positions() != kBlockPositions)
    throw FileError("This file has blocks of another size: only Python goes on with it.");
  return file;
}

std::unique_ptr<RowFile> RowFile::opened(
    const std::string& path, bool writable, std::shared_ptr<const Cipher> cipher) {
  // A pipe must not wait for its other end.
  const int how = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  const int descriptor = ::open(path.c_str(), how);
  if (descriptor < 0) throw FileError(path + ": " + reason());
  int descriptor_of_file = descriptor;  // until the file has it
  try {
    struct stat about;
    if (fstat(descriptor, &about) || !S_ISREG(about.st_mode))
      throw FileError(path + " is no file.");
    if (flock(descriptor, (writable ? LOCK_EX : LOCK_SH) | LOCK_NB))
      throw FileError(path + " is open already, here or in another process.");
    const size_t length = RowLayout::header_length(read_text(descriptor, 64));
    RowLayout layout = RowLayout::read(read_text(descriptor, length));
    std::unique_ptr<Seal> seal = seal_of(layout, std::move(cipher));
    std::unique_ptr<RowFile> file(
        new RowFile(path, descriptor, std::move(layout), std::move(seal), writable, false));
    descriptor_of_file = -1;
    file->find_end();
    return file;
  } catch (...) {
    if (descriptor_of_file >= 0) close(descriptor_of_file);
    throw;
  }
}

RowFile::~RowFile() {
  writer_.fail("it is closed");
  writer_.take_back(0);
  if (removed_) unlink(path_.c_str());
  close(descriptor_);
}

// Finds the last block that is whole.
void RowFile::find_end() {
  struct stat about;
  if (fstat(descriptor_, &about)) throw FileError(reason());
  const int P = layout_.positions();
  int64_t blocks =
      (about.st_size - int64_t(layout_.header().size())) / int64_t(layout_.block_bytes());
  blocks = std::min(blocks, kMostTokensOfFile / P);
  std::vector<uint8_t> block(layout_.block_bytes());
  for (; blocks > 0; --blocks) {
    if (read_some(descriptor_, block.data(), block.size(), layout_.block_start(blocks - 1)) <
        block.size())
      continue;
    try {
      const BlockRecord record =
          layout_.checked_record(blocks - 1, block.data() + layout_.record_start());
      bool intact = true;
      for (int layer = 0; layer < int(delivered_.size()); ++layer)
        for (int head = 0; head < layout_.layers()[layer].heads; ++head)
          intact = intact &&
              layout_.is_intact(
                  record, layout_.segment_index(layer, head),
                  block.data() + layout_.segment_start(layer, head), layout_.segment_bytes(layer));
      if (!intact) continue;
      written_ = (blocks - 1) * P + record.rows;
      break;
    } catch (const FileError&) {  // torn: the one before it ends the file
    }
  }
  std::fill(delivered_.begin(), delivered_.end(), written_);
  handed_ = (written_ + P - 1) / P;
}

int64_t RowFile::written() const {
  const std::lock_guard lock(mutex_);
  return written_;
}

uint32_t RowFile::checksum_of(int64_t block) const {
  uint32_t sum = 0;
  const size_t end = layout_.block_start(block) + layout_.record_start() + layout_.record_bytes();
  if (read_some(descriptor_, &sum, sizeof sum, end - sizeof sum) < sizeof sum)
    throw FileError("Block " + std::to_string(block) + " was not written whole.");
  return sum;
}

void RowFile::go_on(int64_t first) {
  handed_ = first / layout_.positions();
  cut_ = true;
  std::fill(delivered_.begin(), delivered_.end(), first);
  const std::lock_guard lock(mutex_);
  written_ = first;
}

size_t RowFile::nbytes(int layer) const {
  size_t bytes = blocks_.size() * layout_.layers()[layer].heads * layout_.segment_bytes(layer);
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
  if (part.end() > kMostTokensOfFile)
    return fail("a file holds at most " + std::to_string(kMostTokensOfFile) + " tokens");
  if (cut_ && ftruncate(descriptor_, off_t(layout_.block_start(handed_)))) return fail(reason());
  cut_ = false;
  const int64_t before = complete();
  if (first - before > kMostApart) return fail("some layers got no more rows");
  delivered_[layer] = part.end();
  parts_[layer].push_back(std::move(part));
  if (complete() == before) return;
  forget_written();
  const int P = layout_.positions();
  try {
    // Of these the step is over, so that they are evaluated.
    settle(complete() - P);
    if (complete() - handed_ * P > P) settle(complete());
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
  const int P = layout_.positions();
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
  const int P = layout_.positions();
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
    const auto found = blocks_.find(handed_);
    if (found == blocks_.end()) return;
    const std::shared_ptr<Block> block = found->second;
    if (std::find(block->has.begin(), block->has.end(), false) != block->has.end()) return;
    const int64_t index = handed_;
    writer_.hand({index, [this, index, block] { write(index, *block); }});
    writer_.wait_before(index);
    forget_written();
  }
}

// In the writer's thread.
void RowFile::write(int64_t index, Block& block) {
  const size_t start = layout_.block_start(index);
  try {
    const int rows = layout_.positions();
    if (seal_) {  // a copy, since rows are read from the block until it is written
      const std::vector<uint8_t> stored = sealed(block.bytes, index, rows);
      write_all(descriptor_, stored.data(), stored.size(), start);
    } else {
      layout_.put_record(block.bytes, index, rows);
      write_all(descriptor_, block.bytes.data(), block.bytes.size(), start);
    }
  } catch (const FileError&) {
    // Nothing torn stays.
    if (ftruncate(descriptor_, off_t(start))) {
    }
    throw;
  }
  const std::lock_guard lock(mutex_);
  written_ = (index + 1) * layout_.positions();
}

// A block as it is stored sealed, with its record.
std::vector<uint8_t> RowFile::sealed(std::vector<uint8_t> block, int64_t index, int rows) const {
  const Nonce nonce = new_nonce();
  const SealedPlace place{uint64_t(index), layout_.checksum(), uint32_t(rows)};
  std::vector<uint8_t> tags;
  for (int layer = 0; layer < int(delivered_.size()); ++layer)
    for (int head = 0; head < layout_.layers()[layer].heads; ++head) {
      const auto tag = seal_->encrypt(
          block.data() + layout_.segment_start(layer, head), layout_.segment_bytes(layer), nonce,
          place, uint32_t(layout_.segment_index(layer, head)));
      tags.insert(tags.end(), tag.begin(), tag.end());
    }
  layout_.put_record(block, index, rows, nonce, tags);
  return block;
}

// Opens a segment that was read from a sealed file.
void RowFile::unseal(
    uint8_t* segment, int layer, int head, const BlockRecord& record, int64_t block) const {
  if (!seal_) return;
  const int index = layout_.segment_index(layer, head);
  const SealedPlace place{uint64_t(block), layout_.checksum(), uint32_t(record.rows)};
  seal_->decrypt(
      segment, layout_.segment_bytes(layer), record.tag(index), record.nonce, place,
      uint32_t(index));
}

void RowFile::forget_written() {
  const int64_t blocks = written() / layout_.positions();
  blocks_.erase(blocks_.begin(), blocks_.lower_bound(std::min(blocks, handed_)));
}

bool RowFile::flush() {
  try {
    settle(complete());
  } catch (const FileError& error) {
    fail(error.what());
  }
  if (!writer_.wait()) return false;
  forget_written();
  if (!writable_ || !fsync(descriptor_)) return true;
  fail("it could not be written: " + reason());
  return false;
}

// -- rows come back -------------------------------------------------------------------------------

RowBytes RowFile::rows(int layer, int head, const std::vector<int64_t>& positions) {
  const int P = layout_.positions(), layers = int(delivered_.size());
  if (layer < 0 || layer >= layers || head < 0 || head >= layout_.layers()[layer].heads)
    throw FileError("This file has no such layer or KV head.");
  std::map<int64_t, int> blocks;  // and the last row that is read of each
  for (const int64_t position : positions) {
    if (position < 0 || position >= delivered_[layer])
      throw FileError(
          "This layer has rows of positions 0 to " + std::to_string(delivered_[layer] - 1) +
          " only.");
    int& last = blocks[position / P];
    last = std::max(last, int(position % P));
  }
  if (!blocks.empty() && !parts_[layer].empty() &&
      blocks.rbegin()->first * P >= parts_[layer].front().first) {
    std::vector<std::pair<int, Part>> all;
    for (Part& part : parts_[layer]) all.emplace_back(layer, std::move(part));
    parts_[layer].clear();
    settle(all);
  }
  std::map<int64_t, std::vector<uint8_t>> read;
  std::map<int64_t, const uint8_t*> segments;
  for (const auto& [block, last] : blocks) {
    const uint8_t* segment = segment_in_memory(block, layer, head);
    if (!segment) segment = (read[block] = segment_in_file(block, layer, head, last)).data();
    segments[block] = segment;
  }
  RowBytes found;
  size_t start = 0;
  for (const RowField& field : layout_.layers()[layer].fields) {
    const size_t size = field.row_bytes();
    std::vector<uint8_t>& rows = found[field.name];
    rows.reserve(size * positions.size());
    for (const int64_t position : positions) {
      const uint8_t* row = segments[position / P] + start + position % P * size;
      rows.insert(rows.end(), row, row + size);
    }
    start += size * P;
  }
  return found;
}

const uint8_t* RowFile::segment_in_memory(int64_t block, int layer, int head) const {
  const auto found = blocks_.find(block);
  if (found == blocks_.end() || !found->second->has[layer]) return nullptr;
  return found->second->bytes.data() + layout_.segment_start(layer, head);
}

// One head's part of a block, checked.
std::vector<uint8_t> RowFile::segment_in_file(int64_t block, int layer, int head, int last) const {
  const size_t start = layout_.block_start(block);
  std::vector<uint8_t> record(layout_.record_bytes()), segment(layout_.segment_bytes(layer));
  const auto fill = [&](std::vector<uint8_t>& bytes, size_t at) {
    if (read_some(descriptor_, bytes.data(), bytes.size(), start + at) < bytes.size())
      throw FileError("Block " + std::to_string(block) + " was not written whole.");
  };
  fill(record, layout_.record_start());
  const BlockRecord checked = layout_.checked_record(block, record.data());
  if (last >= checked.rows)
    throw FileError(
        "Block " + std::to_string(block) + " ends before row " + std::to_string(last) + ".");
  fill(segment, layout_.segment_start(layer, head));
  if (!layout_.is_intact(
          checked, layout_.segment_index(layer, head), segment.data(), segment.size()))
    throw FileError(
        "Block " + std::to_string(block) + " was changed or damaged after it was written.");
  unseal(segment.data(), layer, head, checked, block);
  return segment;
}

// A whole block, to be gone on with.
std::shared_ptr<RowFile::Block> RowFile::block_in_file(int64_t index) const {
  auto whole = std::make_shared<Block>(Block{
      std::vector<uint8_t>(layout_.block_bytes()), std::vector<bool>(delivered_.size(), true)});
  std::vector<uint8_t>& bytes = whole->bytes;
  if (read_some(descriptor_, bytes.data(), bytes.size(), layout_.block_start(index)) < bytes.size())
    throw FileError("a block could not be read");
  if (!seal_) return whole;
  const BlockRecord record = layout_.checked_record(index, bytes.data() + layout_.record_start());
  for (int layer = 0; layer < int(delivered_.size()); ++layer)
    for (int head = 0; head < layout_.layers()[layer].heads; ++head)
      unseal(bytes.data() + layout_.segment_start(layer, head), layer, head, record, index);
  return whole;
}

// -- tokens are taken back ------------------------------------------------------------------------

void RowFile::truncate(int layer, int64_t first, bool kept) {
  const int P = layout_.positions();
  const int64_t block = first / P, end = kept ? first + P : first;
  if (block < handed_) {
    writer_.take_back(block);
    if (kept && !blocks_.contains(block)) try {
        blocks_[block] = block_in_file(block);
      } catch (const FileError& error) {
        return fail(error.what());
      }
    handed_ = block;
    const std::lock_guard lock(mutex_);
    if (written_ > first) {
      written_ = first;
      if (ftruncate(descriptor_, off_t(layout_.block_start(block)))) {
        // What stays behind is overwritten, block by block.
      }
    }
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
  if (const auto found = blocks_.find(block); found != blocks_.end())
    found->second->has[layer] = false;
}

}  // namespace mlx_h2o
