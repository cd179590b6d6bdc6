// A layer's slots, newest tokens, remainder and next victims: the only place that changes them
// (python/mlx_h2o/layer/layer.py).
#pragma once

#include "array_owner.h"
#include "journal.h"

namespace mlx_h2o {

class LayerRows;
class Returning;

// What the rows of a layer are like; others are refused.
struct RowTypes {
  int batch, key_width, value_width;
  mx::Dtype key_dtype, value_dtype;

  // Those of rows [B, H, L, D] and [B, H, L, Dv].
  static RowTypes of(const mx::array& keys, const mx::array& values);
  bool operator==(const RowTypes&) const = default;
};

// The bounded memory of one layer, once its first rows have told their types.
class BoundedLayer {
 public:
  // Without tokens, for rows like these. The settings must outlive it.
  BoundedLayer(const CacheSettings& settings, const mx::array& keys, const mx::array& values);

  // With what was saved.
  BoundedLayer(
      const CacheSettings& settings, const RowTypes& types, Memory memory, int offset,
      int aged_from)
      : settings(settings),
        types(types),
        memory_(std::move(memory)),
        journal_(settings.undo),
        offset_(offset),
        aged_from_(aged_from) {}

  // The same as another, to go on from where it is.
  BoundedLayer(BoundedLayer& other, const CacheSettings& settings)
      : settings(settings),
        types(other.types),
        memory_(other.memory_, settings),
        journal_(other.journal_),
        offset_(other.offset_),
        aged_from_(other.aged_from_) {}

  // What its decoder lets be looked at, as a layer of its own; none where the rows are here, or
  // must be taken back. What is made of it must be evaluated before the next step.
  std::optional<BoundedLayer> being_looked_at() const {
    std::optional<Lent> seen = memory_.being_looked_at();
    if (!seen) return std::nullopt;
    return BoundedLayer(*this, std::move(*seen));
  }

  const CacheSettings& settings;
  const RowTypes types;
  // The way of its rows into a file, and what they need to come back from it; null: there is none.
  // A copy has none.
  LayerRows* spill = nullptr;
  Returning* back = nullptr;

  // -- what is held -------------------------------------------------------------------------------

  // The next logical position.
  int offset() const {
    return offset_;
  }
  // Neighbouring heads with equal budgets.
  const std::vector<Run>& runs() const {
    return memory_.plan().runs();
  }
  // Whether a decoder has the arrays.
  bool is_lent() const {
    return memory_.is_lent();
  }
  // Where the rows lie, here and not with a decoder; and so the next two.
  const SlotStore& store() {
    return memory_.store();
  }
  // The newest tokens, where they are stored in another width than the slots; else null.
  const RecentWindow* window() {
    return memory_.window();
  }
  // The same, for its numbers alone.
  const RecentWindow* window_plan() const {
    return memory_.window_plan();
  }
  const Evictions& evictions() {
    return memory_.evictions();
  }
  size_t nbytes() const {
    return memory_.nbytes() + journal_.nbytes();
  }
  // The position from which scores speak (python/mlx_h2o/layer/pins_and_turns.py).
  int aged_from() const {
    return aged_from_;
  }
  // Whether the next token brings a pinned one into the slots.
  bool next_is_pinned() const {
    return is_pinned(settings.pins, offset_ - settings.recent_size());
  }
  // Tokens held by the head that holds most.
  int held() const;
  // Tokens that each head of a run has lost.
  int lost(const Run& run) const {
    return offset_ - run.length - memory_.recently_held();
  }
  // The same where a run attends to slots with these fields, some beyond its budget.
  int lost_beside(const Fields& attended) const {
    return offset_ - memory_.recently_held() - attended.at("positions").shape(2);
  }
  // Whether the next token takes a slot, or makes an older one take it.
  bool slots_are_next() const {
    return memory_.slots_are_next();
  }
  // How many of the last positions each head of a run protects.
  int protected_recent(const Run& run) const {
    return settings.policy.recent_slots(run.budget + settings.recent_size());
  }
  // Arrays that must be evaluated with the output, or the graph grows from step to step.
  std::vector<mx::array> side_state() const;
  // Of these, what the last step made for the file and for rows to come back from it.
  std::vector<mx::array> of_file() const;
  // The same between steps, also while a decoder has the rows.
  std::vector<mx::array> newest() const {
    return memory_.newest();
  }

  // -- a step -------------------------------------------------------------------------------------

  // Stores new rows [B, H, L, ...]; those beyond the budget are held until attention has seen what
  // must go. Per run the fields of all slots to attend to, [B, heads, N, ...], the new ones last;
  // where N is over the run's budget, they are to be reduced (`keep`).
  std::vector<Fields> take_in(const mx::array& keys, const mx::array& values);
  // Folds rows [B, heads, M, ...] into the remainder of the heads from `first` on, each as often as
  // its weight, which broadcasts to [B, heads, M].
  void fold(const Fields& rows, const mx::array& weights, int first);
  // Takes rows [B, heads, M, ...] that come back out of the remainder of the heads from `first` on,
  // into which they were folded.
  void unfold(const Fields& rows, int first);
  // New scores of the slots in use: per run [B, heads, length].
  void write_scores(const std::vector<mx::array>& parts) {
    memory_.store().write("scores", parts);
  }
  // New values of the slots in use: per run [B, heads, length, Dv].
  void write_values(const std::vector<mx::array>& parts);
  // Scores of the recent window, [B, H, length].
  void write_newest_scores(const mx::array& scores) {
    memory_.window()->write_scores(scores);
  }
  // Writes the remainder's plain rows into their slots; keys and values with them,
  // [B, H, rows + N, width], as views of the slots.
  std::pair<mx::array, mx::array> with_plain_rows();
  // Steps before this cannot be taken back any more.
  void forget_steps() {
    journal_.clear();
  }
  // Replaces all slots: per run by fields [B, heads, length, ...].
  void keep(const std::vector<Fields>& kept);
  // Which slots are overwritten next [B, H, evict_every]; those of the runs that are `due` are new.
  void name_victims(const std::vector<bool>& due, const mx::array& victims);

  // One token in one fused step, which `accepts` it. Out [B, Hq, 1, Dv].
  mx::array decode(const AttentionCall& call, const mx::array& keys, const mx::array& values);

  // -- between steps ------------------------------------------------------------------------------

  // Has the recent window, if there is one, as large as the settings say; the rows that leave it.
  std::optional<Fields> resize_window();
  // Has the runs that the settings' budgets make, which they may exceed. Steps before this cannot
  // be taken back any more.
  void regroup();
  // As `take_in`, of rows that are beyond the budget already.
  std::vector<Fields> attended(const std::optional<Fields>& beyond) {
    return memory_.attended(beyond);
  }
  // Has the positions marked that the settings pin, and every full run choose anew. Steps before
  // this cannot be taken back any more, and neither those before the next.
  void mark_pins();
  // Begins a turn, of which `carry` of the past counts, from 0 to 1.
  void new_turn(double carry);

  // -- taking tokens back -------------------------------------------------------------------------

  // How many of the newest tokens `trim` can take back now.
  int trimmable() const;
  // Whether no drafted tokens are under way (journal.h).
  bool settled() const {
    return journal_.settled();
  }
  // Notes that none are.
  void settle() {
    journal_.settle();
  }
  // Takes the newest n tokens back, at most `trimmable`.
  void trim(int n);

 private:
  BoundedLayer(const BoundedLayer& other, Lent seen)
      : settings(other.settings),
        types(other.types),
        memory_(other.memory_, other.settings, std::move(seen)),
        journal_(other.journal_),
        offset_(other.offset_),
        aged_from_(other.aged_from_) {}

  Fields marked(Fields rows) const;
  void note(int count);
  void write_one(const Fields& rows);
  void forget_victims();
  std::vector<HeadPlan> advanced(bool stays);

  Memory memory_;
  Journal journal_;
  int offset_ = 0, aged_from_ = 0;
};

}  // namespace mlx_h2o
