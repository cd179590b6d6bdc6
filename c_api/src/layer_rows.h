// The way of one layer's rows into the file, and back (python/mlx_h2o/spill/layer_rows.py).
//
// Rows come dense from a decode step, or as stored from a chunk. Those of a block are held as they
// came and packed together when they fill it, by the same function as those in the slots, so that
// they are the same bit for bit.
#pragma once

#include "conversation_rows.h"
#include "settings.h"

namespace mlx_h2o {

// What a step brings: keys and values before key scaling; after it; after it, and of tokens that
// newer ones of their chunk push through the recent window, so that they are packed once; or fields
// as slots store them.
enum class RowKind { plain, entered, passing, stored };

class LayerRows {
 public:
  // The settings must outlive it.
  LayerRows(
      std::shared_ptr<ConversationRows> conversation, int layer, const CacheSettings& settings)
      : conversation_(std::move(conversation)), layer_(layer), settings_(settings) {}
  ~LayerRows() {
    conversation_->gone(this);
  }
  LayerRows(const LayerRows&) = default;

  ConversationRows& conversation() const {
    return *conversation_;
  }
  std::vector<std::string> names() const;
  // Positions whose rows `rows` can give: whole blocks, while all is well.
  int64_t available();
  // Bytes of the rows in memory: those that wait here, and those in the file's blocks.
  size_t nbytes() const;
  // Arrays that the last step made for the file, to be evaluated with its output.
  const std::vector<mx::array>& fresh() const {
    return fresh_;
  }
  // All arrays that were made for the file were evaluated, but for those that wait here.
  void settled() {
    fresh_.clear();
  }
  // The arrays of rows that wait here.
  std::vector<mx::array> waiting() const;

  // Takes rows [1, H, L, width]: "keys" and "values", or of stored ones all fields.
  void take(int64_t first, RowKind kind, const Fields& rows);
  // The same of dense rows that go into a recent window of so many tokens, after key scaling.
  void take_chunk(int64_t first, const mx::array& keys, const mx::array& values, int window);
  // Gives the rows of whole blocks to the file, if it is there.
  void give();
  // Forgets the rows from a position on.
  void trim(int64_t offset);

  // Rows of one head at positions below `available`. Raises FileError.
  RowBytes rows(int head, const std::vector<int64_t>& positions) {
    return conversation_->file()->rows(layer_, head, positions);
  }
  // Pages of this layer that have digests; making those of the next ones; and those of some pages
  // (`PageDigests`).
  int digested() {
    return conversation_->digests.count(layer_);
  }
  void digest(int heads, int width, const std::vector<float>& keys) {
    conversation_->digests.append(layer_, heads, width, keys);
  }
  Digests digests(int head, int tract, int pages) {
    return conversation_->digests.read(layer_, head, tract, pages);
  }
  // A file's fields as arrays of the store's dtypes: rows of some heads, [1, heads, M, width].
  Fields in_mlx(const std::vector<RowBytes>& of_heads) const;

 private:
  // Rows that wait until a block is full.
  struct Chunk {
    RowKind kind;
    int count;
    Fields rows;
  };

  void come(int64_t first, RowKind kind, const Fields& rows);
  void stop(const std::string& why);
  Fields packed_first(int count);
  Fields stored(RowKind kind, const Fields& rows) const;
  LayerForm form_of(const Chunk& chunk) const;

  std::shared_ptr<ConversationRows> conversation_;
  const int layer_;
  const CacheSettings& settings_;
  int64_t first_ = 0, offset_ = 0;  // positions before the first were given to the file
  std::deque<Chunk> waiting_;
  std::vector<mx::array> fresh_;
};

}  // namespace mlx_h2o
