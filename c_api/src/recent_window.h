// The newest tokens of a layer, stored in a width of their own
// (python/mlx_h2o/slots/recent_window.py).
#pragma once

#include "kernel_terms.h"
#include "packed.h"
#include "policy.h"

namespace mlx_h2o {

// A ring of the same size for all heads; the oldest token leaves it for the slots proper.
class RecentWindow {
 public:
  RecentWindow(int size, const Packing& kept, const Policy& policy)
      : size_(size),
        kept_(kept),
        recent_(*kept.recent()),
        scored_(policy.needs_attention()),
        measured_(policy.keeps_value_lengths(kept)) {}

  // As it was, with these fields.
  RecentWindow(
      int size, const Packing& kept, const Policy& policy, int length, int oldest, Fields fields)
      : RecentWindow(size, kept, policy) {
    length_ = length, oldest_ = oldest, fields_ = std::move(fields);
  }

  int oldest() const {
    return oldest_;
  }
  int length() const {
    return length_;
  }
  // Whether the next token pushes an older one out.
  bool full() const {
    return length_ == size_;
  }
  int size() const {
    return size_;
  }
  // [B, H, size, ...]: keys, values, what packs them, scores, value_lengths. Empty while they are
  // lent.
  const Fields& fields() const {
    return fields_;
  }

  // Takes rows [B, H, L, width] in, the first at position `offset`. The rows that are recent no
  // longer, as the slots proper store them, with positions; none if there are none.
  std::optional<Fields> push(const mx::array& keys, const mx::array& values, int offset);
  // Makes room for one token, whose row a kernel writes.
  RecentStep advance();
  // Hands the fields out, with memory for all tokens that it can hold, and takes them back.
  Fields lend();
  void get_back(Fields fields);
  // The fields of heads first to last - 1, oldest first, with positions.
  Fields views(int first, int last, int offset) const;
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
  // Changes how many tokens it can hold, of those before position `offset`; the rows that leave it,
  // as `push` gives them.
  std::optional<Fields> resize(int size, int offset);
  // Forgets the newest tokens, or all; how many that were.
  int trim(int count);

 private:
  Fields oldest_first(int count) const;
  // Fields of new rows, and of rows that leave as the slots proper store them.
  Fields fields_of_new(
      const Packing& packing, const mx::array& keys, const mx::array& values) const;
  Fields fields_of_leaving(const Fields& held) const;

  int size_;
  Packing kept_, recent_;
  bool scored_, measured_;
  int length_ = 0;
  int oldest_ = 0;  // its slot; the others follow, around the end
  Fields fields_;
};

}  // namespace mlx_h2o
