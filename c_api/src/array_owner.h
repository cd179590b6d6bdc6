// Who has a layer's arrays: the layer itself, or a decoder that changes them in place
// (python/mlx_h2o/layer/layer.py).
#pragma once

#include "decoder.h"
#include "recent_window.h"
#include "slot_store.h"

namespace mlx_h2o {

// What went, and what goes next.
struct Evictions {
  Remainder remainder;
  std::optional<mx::array> victims;  // slots to overwrite next, [B, H, evict_every]
};

// A layer's slots, newest tokens, remainder and victims.
//
// During fused decode steps a decoder has the arrays. `store`, `window` and `evictions` take them
// back first; `plan` and `recently_held` tell layout and lengths at any time.
class Memory {
 public:
  // Without tokens, for rows like these. The settings must outlive it.
  Memory(const CacheSettings& settings, const mx::array& keys, const mx::array& values);
  // With what was saved.
  Memory(
      const CacheSettings& settings, SlotStore store, std::optional<RecentWindow> window,
      Evictions evictions)
      : settings_(settings),
        store_(std::move(store)),
        window_(std::move(window)),
        evictions_(std::move(evictions)) {}
  // With what another holds, which takes its arrays back first. They are shared until one of the
  // two changes them.
  Memory(Memory& other, const CacheSettings& settings);

  // With what the other's decoder lets be looked at (`being_looked_at`).
  Memory(const Memory& other, const CacheSettings& settings, Lent seen);
  // What can be looked at where it is with a decoder; none: it is here, or must be taken back.
  std::optional<Lent> being_looked_at() const {
    return decoder_ ? decoder_->look() : std::nullopt;
  }

  // Whether a decoder has the arrays.
  bool is_lent() const {
    return bool(decoder_);
  }
  const SlotStore& plan() const {
    return store_;
  }
  const RecentWindow* window_plan() const {
    return window_ ? &*window_ : nullptr;
  }
  int recently_held() const {
    return window_ ? window_->length() : 0;
  }
  // Whether the next token takes a slot, or makes an older one take it.
  bool slots_are_next() const {
    return !window_ || window_->full();
  }
  SlotStore& store();
  // The newest tokens, where they are stored in another width than the slots; else null.
  RecentWindow* window();
  Evictions& evictions();

  // Every array held; none while they are lent.
  std::vector<mx::array> arrays() const;
  // The same; while they are lent, what is ready when they are.
  std::vector<mx::array> newest() const {
    return decoder_ ? decoder_->last() : arrays();
  }
  size_t nbytes() const;
  // Per run all fields of its slots, and of rows [B, H, L, ...] that are beyond the budget.
  std::vector<Fields> attended(const std::optional<Fields>& beyond);

  // Has positions as wide as those of so many tokens.
  void fit_positions(int tokens);

  // What a fused step does next: the decoder, which has the arrays and room for these rows, and
  // the plans of slots and window that it follows.
  Decoder& lent(const mx::array& keys, const mx::array& values);
  SlotStore& followed_plan() {
    return store_;
  }
  std::optional<RecentStep> advance_window();

 private:
  void take_back();

  const CacheSettings& settings_;
  SlotStore store_;
  std::optional<RecentWindow> window_;
  std::optional<Evictions> evictions_;  // none while they are lent
  std::unique_ptr<Decoder> decoder_;
  Backend lent_to_ = Backend::plain;
  size_t lent_bytes_ = 0;
};

// New rows [B, H, L, ...] by field, for the positions from `first` on.
Fields fields_of(
    const CacheSettings& settings, const mx::array& keys, const mx::array& values, int first);

}  // namespace mlx_h2o
