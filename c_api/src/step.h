// One token or one chunk of a layer: attention -> scores -> policy -> slots
// (python/mlx_h2o/layer/step.py).
#pragma once

#include <memory>

#include "returning.h"

namespace mlx_h2o {

// The bounded KV cache of one layer.
class Core {
 public:
  // Raises for what makes no cache.
  explicit Core(CacheSettings settings);
  // Raises if a function of the program failed in the middle of a change: the state is not valid.
  void check_whole() const {
    check(
        !broken_, "A function of the program failed in the middle of a step: make a new cache.",
        Blame::state);
  }
  // The layer refers to its settings.
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Takes rows [B, Hk, L, width] in, attends to all (causal), chooses what to forget.
  mx::array update_and_attend(
      const AttentionCall& call, const mx::array& keys, const mx::array& values);

  // Raises unless a call and its rows [B, Hk, L, width] fit this cache.
  void check_step(const AttentionCall& call, const mx::array& keys, const mx::array& values) const;

  // For models that attend by themselves: takes rows in, gives out what to attend to, the evicted
  // as plain rows, with what to add to the logits (none: nothing before a decode step, and a causal
  // mask aligned at the end before a chunk).
  struct FetchedRows {
    mx::array keys, values;         // [B, Hk, N, D] and [B, Hk, N, Dv]
    std::optional<mx::array> mask;  // [1, 1, L, N] in the keys' dtype
  };
  FetchedRows update_and_fetch(const mx::array& keys, const mx::array& values);

  const CacheSettings& settings() const {
    return settings_;
  }
  void use_kernels(bool use) {
    settings_.kernels = use;
  }
  // Has its rows go into a conversation's file, as those of a layer, and come back to some KV
  // heads. Raises for a cache that has seen tokens, or has a file.
  void spill_to(std::shared_ptr<ConversationRows> conversation, int layer, std::vector<bool> heads);
  // Rows that came back so far, over all heads.
  int64_t returned() const {
    return spill_ ? spill_->back.returned : 0;
  }
  // None before the first rows.
  std::optional<RowTypes> row_types() const {
    return layer_ ? std::optional(layer_->types) : std::nullopt;
  }
  // What it holds, as arrays by name and settings as JSON (saved_state.h).
  std::pair<Fields, std::string> saved();
  // A cache that holds what was saved. Raises for what no cache can have saved.
  static std::unique_ptr<Core> restored(
      const Fields& arrays, const std::string& settings, const Policy* own = nullptr);
  // KV heads.
  size_t heads() const {
    return settings_.budgets.size();
  }
  int offset() const {
    return layer_ ? layer_->offset() : 0;
  }
  int size() const {
    return layer_ ? layer_->held() : 0;
  }
  // Tokens dropped, mean over KV heads.
  int64_t evicted() const;
  // Of everything held, the frame included.
  size_t nbytes() const;
  // The same once more, which goes on by itself and without a file.
  std::unique_ptr<Core> copied();
  // Gives each head other slots, and others that follow; what no longer fits is folded, and steps
  // before it cannot be taken back. Raises, and changes nothing, for what makes no cache.
  void resize(std::vector<int> budgets, std::vector<Stage> filling = {});
  // The same where each head keeps its rows worth most, by `worths` [B, N] of each
  // (eviction.h).
  void keep_best(const std::vector<mx::array>& worths, std::vector<int> budgets, int room);
  // Raises before the first rows.
  BoundedLayer& layer_with_tokens();
  // How many of the newest tokens can be taken back, and taking them back.
  int trimmable() const;
  void trim(int n);
  // Never evicts the tokens at these positions, held or to come: how many of them some head has
  // lost already. Raises, and changes nothing, if there is no room for them.
  int pin(Spans spans);
  void unpin();
  // The positions that the last `pin` missed.
  const Spans& missing() const {
    return missing_;
  }
  // Begins a turn, of which `carry` of the past counts, from 0 to 1.
  void new_turn(double carry);
  // The mask that n new tokens will need: causal, none, or an array (booleans [n, size() + n] if
  // they are asked for; of plain rows [1, 1, n, rows + size() + n] to be added).
  Masking mask_for(int n, bool as_array);

  // Readers of what is held. They do not interrupt fused steps on a GPU.
  // Positions held, ascending per head, or their scores: [B, Hk, size()], unused -1 or 0.
  mx::array kept();
  mx::array scores();
  // Keys and values in the same order, [B, H, size(), width], in the frame if there is one.
  std::pair<mx::array, mx::array> rows();
  Remainder remainder();
  // Whether a decoder has the arrays.
  bool is_lent() const {
    return layer_ && layer_->is_lent();
  }
  // All arrays held; while kernels have them, what is ready when they are.
  std::vector<mx::array> newest() const;

 private:
  // Makes a change in which a function of the program may fail half-way.
  template <class Change>
  void change(Change make) {
    broken_ = bool(settings_.policy.own);
    make();
    broken_ = false;
  }
  // What `look` makes of the layer, as a vector of arrays.
  template <class Look>
  std::vector<mx::array> seen(Look look);
  void check_rows(const mx::array& keys, const mx::array& values) const;
  BoundedLayer& layer_for(const mx::array& keys, const mx::array& values);
  void give_slots(std::vector<int> budgets, std::vector<Stage> filling);
  FetchedRows take_in(BoundedLayer& layer, const mx::array& keys, const mx::array& values);

  // Positions in spans that some heads, and those that all have lost.
  std::pair<Spans, Spans> lost_of(const Spans& spans);
  // The same chunk without its last n tokens, in its place.
  void shorten_chunk(int n);
  void pin_all(Spans pins);
  // These slots, with room for these pins in every head.
  std::vector<int> with_room(std::vector<int> budgets, int plain_rows, const Spans& pins) const;
  // Gives the layer the budgets that a conversation has which is longer by so many tokens.
  void grow(int length);

  CacheSettings settings_;  // only pins, budgets, what is left of filling and kernels change
  std::optional<BoundedLayer> layer_;  // none before the first rows
  Spans missing_;
  bool broken_ = false;  // see check_whole

  // None: there is no file.
  struct SpillState {
    LayerRows rows;
    Returning back;
  };
  std::optional<SpillState> spill_;

  // The last chunk, and the layer before it, until the next token comes; none without undo.
  struct Chunk {
    std::optional<BoundedLayer> before;
    AttentionCall call;
    mx::array keys, values;
    std::optional<Returning> back = std::nullopt;  // as it was before
  };
  std::optional<Chunk> chunk_;
};

}  // namespace mlx_h2o
