// The file behind all layers of one conversation, made when every layer's form is known
// (python/mlx_h2o/spill/conversation_rows.py). If anything goes wrong with it the conversation goes
// on without, and `failure` tells why.
#pragma once

#include <memory>
#include <optional>

#include "page_digests.h"
#include "row_file.h"

namespace mlx_h2o {

class LayerRows;

// How evicted rows come back from the file (`Returns` in python/mlx_h2o/spill/setting.py).
struct Returns {
  int every = 32;     // tokens from one return to the next while decoding
  int window = 8;     // of the last queries say what is wanted
  int pages = 12;     // whose rows are read for a KV head at each return, and as many behind them
  int rows = 64;      // that come back to a KV head at each return, at most
  double room = 0.5;  // the part of a head's evictable slots that these may take
  int ahead = 16;     // of the following rows a wanted row makes wanted, too

  // Raises for numbers out of range.
  void check_all() const;
};

class ConversationRows {
 public:
  // Nothing is made on disk yet.
  ConversationRows(std::string folder, int layers, const Returns& returns);

  const Returns returns;
  PageDigests digests;

  // The file; null before the first rows of all layers, and after a failure without one.
  RowFile* file() {
    return file_.get();
  }
  int layers() const {
    return int(forms_.size());
  }
  // Notes that a cache is a layer's. Raises for a layer that there is not, or that has one.
  void attach(int layer);
  // A layer's rows have this form; the file is made when all layers' are known.
  void come(int layer, LayerForm form);
  // Notes whose rows a layer's are; and that it is no more.
  void reads(int layer, LayerRows* rows) {
    rows_[size_t(layer)] = rows;
  }
  void gone(const LayerRows* rows);
  // Evaluates the rows that the layers hold, and all others were: their chunk may go from memory.
  void evaluate_held();
  // Goes on without the file.
  void fail(const std::string& why);
  // Whether nothing has failed.
  bool well();
  // Why there is no file, or why it holds no more rows; "" while all is well.
  std::string failure() const;
  // Closes the file; the caches go on without.
  void close();

 private:
  const std::string folder_;
  std::string failure_;
  std::vector<std::optional<LayerForm>> forms_;
  std::vector<bool> attached_;
  std::vector<LayerRows*> rows_;  // null before a layer's first
  std::unique_ptr<RowFile> file_;
};

}  // namespace mlx_h2o
