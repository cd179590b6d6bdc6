// Where the rows of a layer's kept tokens lie (python/mlx_h2o/slots/slot_store.py).
#pragma once

#include "kernel_terms.h"
#include "packed.h"

namespace mlx_h2o {

// Neighbouring KV heads with the same budget.
struct Run {
  int first, last;  // KV heads first to last - 1
  int budget;       // slots each may use
  int length = 0;   // slots each uses
  int allocated = 0;
  int start = 0;    // where the first head's range begins in the flat buffers
  int victims = 0;  // slots that are named to be overwritten next and were not yet

  int heads() const {
    return last - first;
  }
  bool is_full() const {
    return length == budget;
  }
};

// Flat buffers [B, S, ...] of a layer's slots, by field name.
class SlotStore {
 public:
  // `reserved` slots at the head of each range hold no token (the remainder's plain rows).
  explicit SlotStore(const std::vector<int>& budgets, int reserved = 0);
  // With these runs and fields, which go together.
  SlotStore(std::vector<Run> runs, int reserved, Fields fields);

  const std::vector<Run>& runs() const {
    return runs_;
  }
  // Empty before the first rows, and while they are lent.
  const Fields& fields() const {
    return fields_;
  }
  int heads() const {
    return runs_.back().last;
  }
  // Whether the next token needs more memory.
  bool needs_room() const;

  // A run's slots in use, [B, heads, length, ...], of a flat field; or of one that is held,
  // positions as int32.
  mx::array view(const Run& run, const mx::array& field) const;
  mx::array view(const Run& run, const std::string& name) const;
  // The same of a field, the reserved slots first.
  mx::array with_reserved(const Run& run, const std::string& name) const;
  Fields views(const Run& run) const;
  // Flat indices [B or 1, H] of one slot of each head: per run [B or 1, heads], counted within it.
  mx::array flat_index_of_heads(const std::vector<mx::array>& slots) const;

  // Makes room for `extra` more slots a head, in steps, up to the budgets.
  void reserve(int extra, const Fields& like);
  // Adds rows [B, H, L, ...] to all heads.
  void append(const Fields& rows);
  // Overwrites the slots at flat indices [B or 1, M] with rows [B, M, ...].
  void put(const mx::array& index, const Fields& rows);
  // Writes rows [B, H, reserved, ...] into the reserved slots, of one run.
  void put_reserved(const Fields& rows);
  mx::array take(const mx::array& index, const std::string& name) const;
  // Replaces all slots: per run its rows, [B, heads, length, ...].
  void replace(const std::vector<Fields>& rows);
  // Gives the heads, which have rows, new budgets and forms runs anew; a run may then exceed its
  // budget.
  void regroup(const std::vector<int>& budgets, int reserved = 0);
  // Replaces a field's slots in use.
  void write(const std::string& name, const std::vector<mx::array>& parts);

  // Positions are kept in 16 bits while the conversation has no more of them
  // (python/mlx_h2o/slots/slot_store.py): whether they are as wide as those of so many tokens,
  // and what makes them so.
  bool positions_fit(int tokens) const {
    return wide_ == (tokens > kFewTokens);
  }
  void fit_positions(int tokens);

  // Uses up the next slot of each head of a run: which of its `named` victims that is, or -1 for an
  // unused one.
  int advance(size_t run, int named);
  // The same of all heads: per run [B, heads], and whether a row is in it, per head.
  struct NextSlots {
    std::vector<mx::array> slots;
    std::vector<float> overwritten;
  };
  NextSlots take_slots(const std::optional<mx::array>& victims, int batch);
  void name_victims(size_t run, int count) {
    runs_[run].victims = count;
  }
  void forget_victims();
  // Forgets the last `count` slots of each head.
  void shorten(int count);
  // Has the lengths and victims of other runs of the same heads.
  void return_to(const std::vector<Run>& runs);

  // Hands the buffers out, and takes them back.
  Fields lend();
  void get_back(Fields fields);

 private:
  // Rows of a field as they are kept.
  mx::array kept(const std::string& name, const mx::array& rows) const;
  mx::array range_of(const mx::array& field, const Run& run) const;
  // Rows [B, heads, M, ...] behind the reserved slots, and before `tail` unused ones.
  mx::array padded(const mx::array& rows, int tail) const;
  // Flat indices [..., heads, M] of a run's slots.
  mx::array flat_index(const Run& run, const mx::array& slots) const;
  static mx::array flattened(std::vector<mx::array> parts);
  void set(Fields fields, const std::vector<int>& allocated);

  std::vector<Run> runs_;
  int reserved_ = 0;
  Fields fields_;
  bool wide_ = false;  // positions are
};

// Raises unless rows [B, M, ...] can be written into a buffer [B, S, ...] at an index [B or 1, M],
// whatever its numbers.
void check_rows_fit(const mx::array& buffer, const mx::array& index, const mx::array& rows);

// Indices [..., M] spread over rows [..., M, ...].
mx::array spread(const mx::array& index, const mx::Shape& rows);

// Overwrites rows of a flat buffer [B, S, ...] at indices [B or 1, M] with rows [B, M, ...].
mx::array with_rows(const mx::array& buffer, const mx::array& index, const mx::array& rows);

}  // namespace mlx_h2o
