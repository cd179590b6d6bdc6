// The newest tokens of a layer, stored in a width of their own (python/mlx_h2o/recent_window.py).
#pragma once

#include "primitives/decoding_layer.h"
#include "rows.h"

namespace mlx_h2o {

// A ring of the same size for all heads; the oldest token leaves it for the slots proper.
class RecentZone {
 public:
  RecentZone(int size, const Packing& kept, bool scored)
      : size(size), kept_(kept), recent_(*kept.recent()), scored_(scored) {}

  const int size;
  int length = 0;
  int oldest = 0;  // its slot; the others follow, around the end
  Fields fields;   // [B, H, size, ...]: keys, values, what packs them, scores

  // Takes rows [B, H, L, width] in, the first at position `offset`. The rows that are recent no
  // longer, as the slots proper store them, with positions; none if there are none.
  std::optional<Fields> push(const mx::array& keys, const mx::array& values, int offset);
  // Makes room for one token, whose row somebody else writes.
  RecentStep advance();
  // Has memory for all tokens that it can hold.
  void reserve();
  // The fields of heads first to last - 1, oldest first, with positions.
  Fields views(int first, int last, int offset) const;
  Stored stored(const std::string& name) const {
    return recent_.rows(name, fields);
  }
  Stored rows(const std::string& name, const Fields& views) const {
    return recent_.rows(name, views);
  }
  // New scores [B, H, length], oldest first.
  void write_scores(const mx::array& scores);

  // What a single token changes when it comes.
  struct Before {
    int length;
    Fields oldest;                    // the row that leaves, [B, H, 1, ...], unless none does
    std::optional<mx::array> scores;  // of all, [B, H, length], oldest first
  };
  Before before() const;
  // As it was before the last token came.
  void restore(const Before& before);
  // Forgets the newest tokens, or all; how many that were.
  int trim(int count);

 private:
  Fields oldest_first(int count) const;
  Fields packed_rows(
      const Packing& packing, const Stored& keys, const Stored& values,
      const std::optional<mx::array>& scores) const;

  Packing kept_, recent_;
  bool scored_;
};

}  // namespace mlx_h2o
