// Digests of a conversation's pages: the keys of the heads that ask, in 8 bits, beside the rows
// (python/mlx_h2o/spill/page_digests.py, which says more).
#pragma once

#include <stdint.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "scratch_file.h"

namespace mlx_h2o {

// Tokens of a page.
constexpr int kPage = 16;
// Pages of one head that lie together, and are compared with queries at once.
constexpr int kTract = 256;

// The digests of some pages of a head, as they are stored.
struct Digests {
  int width;
  std::vector<uint8_t> bytes;

  float scale(int page) const;
  // A page's keys divided by its scale, [kPage, width].
  const int8_t* keys(int page) const;
};

class PageDigests {
 public:
  explicit PageDigests(std::string folder) : folder_(std::move(folder)) {}
  PageDigests(const PageDigests&) = delete;

  // Gives the file up; digests are made anew if they are wanted again.
  void close();
  // How many pages of a layer have digests.
  int count(int layer) const;
  // Keeps digests of a layer's next pages, by their keys [heads, pages, kPage, width]: those of the
  // heads that ask. Raises FileError.
  void append(int layer, int heads, int width, const std::vector<float>& keys);
  // The digests of the first pages of one tract. `head` is the head's place among those that ask.
  // Raises FileError.
  Digests read(int layer, int head, int tract, int pages) const;
  // Forgets the digests of pages that reach beyond a position.
  void truncate(int layer, int position);

 private:
  struct Form {
    int heads, width;
  };

  size_t place(int layer, int tract);

  const std::string folder_;
  std::optional<ScratchFile> file_;  // none before the first digests
  size_t end_ = 0;
  std::map<std::pair<int, int>, size_t> tracts_;  // where those of a layer begin
  std::map<int, int> counts_;
  std::map<int, Form> forms_;
};

}  // namespace mlx_h2o
