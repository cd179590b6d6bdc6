#include "layer_rows.h"

#include <algorithm>

namespace mlx_h2o {

namespace {

// The most times that rows may come before the file is made: once for each token of a first chunk
// that is processed token by token.
constexpr size_t kMostChunks = 1 << 12;

Fields rows_of(const Fields& rows, int first, int last) {
  Fields some;
  for (const auto& [name, array] : rows) some.emplace(name, part(array, 2, first, last));
  return some;
}

Fields joined(const std::vector<Fields>& parts) {
  Fields whole;
  for (const auto& [name, first] : parts[0]) {
    std::vector<mx::array> arrays;
    for (const Fields& rows : parts) arrays.push_back(rows.at(name));
    whole.emplace(name, join_along(std::move(arrays), 2));
  }
  return whole;
}

}  // namespace

int64_t LayerRows::available() {
  if (!conversation_->well()) return 0;
  give();  // rows that came before the file was made
  return conversation_->well() ? first_ : 0;
}

size_t LayerRows::nbytes() const {
  const RowFile* const file = conversation_->file();
  size_t bytes = file ? file->nbytes(layer_) : 0;
  for (const Chunk& chunk : waiting_)
    for (const auto& [name, rows] : chunk.rows) bytes += rows.nbytes();
  return bytes;
}

std::vector<mx::array> LayerRows::waiting() const {
  std::vector<mx::array> all;
  for (const Chunk& chunk : waiting_)
    for (const auto& [name, rows] : chunk.rows) all.push_back(rows);
  return all;
}

// -- rows come ------------------------------------------------------------------------------------

void LayerRows::take(int64_t first, RowKind kind, const Fields& rows) {
  fresh_.clear();
  come(first, kind, rows);
}

void LayerRows::come(int64_t first, RowKind kind, const Fields& rows) {
  if (!conversation_->well()) return waiting_.clear();
  if (rows.at("keys").shape(0) > 1) return stop("a cache of several sequences at once has none");
  if (first != offset_) return stop("tokens came in another order");
  if (!conversation_->file() && waiting_.size() > kMostChunks)
    return stop("some layers got no rows");
  Chunk chunk{kind, rows.at("keys").shape(2), {}};
  for (const std::string& name :
       kind == RowKind::stored ? names() : std::vector<std::string>{"keys", "values"})
    chunk.rows.emplace(name, rows.at(name));
  offset_ += chunk.count;
  waiting_.push_back(std::move(chunk));
  conversation_->reads(layer_, this);
  if (!conversation_->file()) conversation_->come(layer_, form_of(waiting_.back()));
  give();
}

void LayerRows::take_chunk(
    int64_t first, const mx::array& keys, const mx::array& values, int window) {
  const int L = keys.shape(2), passing = std::max(L - window, 0);
  const Fields rows{{"keys", keys}, {"values", values}};
  fresh_.clear();
  if (passing) come(first, RowKind::passing, rows_of(rows, 0, passing));
  come(first + passing, RowKind::entered, passing ? rows_of(rows, passing, L) : rows);
}

void LayerRows::stop(const std::string& why) {
  waiting_.clear();
  conversation_->fail(why);
}

void LayerRows::give() {
  RowFile* const file = conversation_->file();
  const int count = int(offset_ / kBlockPositions * kBlockPositions - first_);
  if (!file || !count || !conversation_->well()) return;
  if (file->delivered(layer_) != first_) return stop("layers took back other tokens");
  const Fields rows = packed_first(count);
  for (const auto& [name, array] : rows) fresh_.push_back(array);
  file->append(layer_, first_, rows);
  first_ += count;
  // Rows of a chunk are in the file now; the last ones of it must not keep all in memory.
  if (count > kBlockPositions && file->complete() == first_) conversation_->evaluate_held();
}

// The first rows chunk, as slots store them; they are held no longer.
Fields LayerRows::packed_first(int count) {
  std::vector<Fields> done, alike;
  std::optional<RowKind> kind;
  const auto pack_alike = [&] {
    if (!alike.empty()) done.push_back(stored(*kind, joined(alike)));
    alike.clear();
  };
  while (count) {
    Chunk& chunk = waiting_.front();
    const int here = std::min(chunk.count, count);
    if (kind != chunk.kind) pack_alike();
    kind = chunk.kind;
    alike.push_back(here < chunk.count ? rows_of(chunk.rows, 0, here) : chunk.rows);
    if (here < chunk.count) {
      chunk.rows = rows_of(chunk.rows, here, chunk.count);
      for (auto& [name, left] : chunk.rows) left = mx::contiguous(left);  // without the others
      chunk.count -= here;
    } else {
      waiting_.pop_front();
    }
    count -= here;
  }
  pack_alike();
  return joined(done);
}

// Packed as rows are when they come or leave the window.
Fields LayerRows::stored(RowKind kind, const Fields& rows) const {
  if (kind == RowKind::stored) return rows;
  const Packing& packing = settings_.packing;
  const std::optional<Packing> recent = packing.recent();
  Fields all;
  for (const char* name : {"keys", "values"}) {
    mx::array dense = rows.at(name);
    if (kind == RowKind::plain && settings_.frame && name == std::string("keys"))
      dense = enter(*settings_.frame, dense);
    Stored newest{{dense}};
    if (recent && kind != RowKind::passing) {
      Fields of_window;
      recent->put(of_window, name, newest);
      newest = recent->rows(name, of_window);
    }
    packing.put(all, name, newest);
  }
  return all;
}

std::vector<std::string> LayerRows::names() const {
  std::vector<std::string> all;
  for (const std::string name : {"keys", "values"}) {
    all.push_back(name);
    if (!settings_.packing.bits(name)) continue;
    all.push_back(name + ".scales"), all.push_back(name + ".biases");
  }
  return all;
}

LayerForm LayerRows::form_of(const Chunk& chunk) const {
  const Fields one = stored(chunk.kind, rows_of(chunk.rows, 0, 1));
  LayerForm form{one.at("keys").shape(1), {}};
  for (const std::string& name : names())
    form.fields.push_back({name, one.at(name).dtype(), one.at(name).shape(3)});
  return form;
}

// -- tokens are taken back ------------------------------------------------------------------------

void LayerRows::trim(int64_t offset) {
  fresh_.clear();
  if (!conversation_->well()) return waiting_.clear();
  while (!waiting_.empty() && offset_ > offset) {
    Chunk& last = waiting_.back();
    const int left = int(std::max<int64_t>(offset - (offset_ - last.count), 0));
    offset_ -= last.count - left;
    if (left)
      last.rows = rows_of(last.rows, 0, left), last.count = left;
    else
      waiting_.pop_back();
  }
  if (offset >= first_) return;
  conversation_->digests.truncate(layer_, int(offset));
  RowFile* const file = conversation_->file();
  const int64_t begin = offset / kBlockPositions * kBlockPositions;
  const int count = int(offset - begin);
  try {
    if (file->delivered(layer_) < offset) throw FileError("layers took back other tokens");
    if (count) {
      std::vector<int64_t> positions;
      for (int i = 0; i < count; ++i) positions.push_back(begin + i);
      std::vector<RowBytes> of_heads;
      for (int head = 0; head < settings_.heads(); ++head)
        of_heads.push_back(rows(head, positions));
      waiting_.push_back({RowKind::stored, count, in_mlx(of_heads)});
    }
  } catch (const FileError& error) {
    return stop(error.what());
  }
  file->truncate(layer_, begin, count > 0);
  first_ = begin, offset_ = offset;
}

// -- rows come back -------------------------------------------------------------------------------

Fields LayerRows::in_mlx(const std::vector<RowBytes>& of_heads) const {
  Fields all;
  for (const RowField& field : conversation_->file()->layout().layers()[layer_].fields) {
    std::vector<uint8_t> bytes;
    for (const RowBytes& rows : of_heads) {
      const std::vector<uint8_t>& of_field = rows.at(field.name);
      bytes.insert(bytes.end(), of_field.begin(), of_field.end());
    }
    const int heads = int(of_heads.size()), width = int(field.row_bytes());
    const int count = int(bytes.size() / size_t(width) / heads);
    const mx::array raw(bytes.data(), mx::Shape{1, heads, count, width}, mx::uint8);
    all.emplace(field.name, mx::view(raw, field.dtype));
  }
  return all;
}

}  // namespace mlx_h2o
