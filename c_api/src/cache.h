// The bounded KV cache of one layer: attention -> scores -> policy -> slots.
#pragma once

#include "attend.h"
#include "decoding.h"
#include "policy.h"
#include "recent.h"
#include "remainder.h"
#include "store.h"
#include "undo.h"

namespace mlx_h2o {

// python/mlx_h2o/cache.py, for models whose attention is ours.
class Cache {
 public:
  // Slots of each KV head; whether the evicted go on answering; whether attention is ours; how many
  // single-token steps can be taken back. Raises for budgets without room.
  Cache(
      Policy policy, std::vector<int> budgets, bool remainder, bool attending, Packing packing,
      int undo);

  // Takes rows [B, Hk, L, width] in, attends to all (causal), chooses what to forget.
  mx::array update_and_attend(
      const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
      const std::optional<mx::array>& sinks);

  // For models that attend by themselves: takes rows in, gives out what to attend to, the evicted
  // as plain rows, with what to add to the logits (none: nothing before a decode step, and a causal
  // mask aligned at the end before a chunk).
  struct Fetched {
    mx::array keys, values;         // [B, Hk, N, D] and [B, Hk, N, Dv]
    std::optional<mx::array> mask;  // [1, 1, L, N] in the keys' dtype
  };
  Fetched update_and_fetch(const mx::array& keys, const mx::array& values);

  int offset() const {
    return offset_;
  }
  int size() const;
  int64_t evicted() const;
  size_t nbytes() const;
  // How many of the newest tokens can be taken back, and taking them back.
  int trimmable() const;
  void trim(int n);
  // Positions held, ascending per head, or their scores: [B, Hk, size()], unused -1 or 0.
  mx::array kept();
  mx::array scores();
  const Remainder& remainder();

 private:
  bool remembers() const {
    return answers_ || policy_.uses_evicted_mean();
  }
  void start(const mx::array& keys, const mx::array& values);
  void check_rows(const mx::array& keys, const mx::array& values) const;
  bool fuses(const mx::array& q, const mx::array& keys, const mx::array& values) const;
  mx::array attend_now(
      const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
      const std::optional<mx::array>& sinks);
  mx::array decode(
      const mx::array& q, const mx::array& keys, const mx::array& values, float scale,
      const std::optional<mx::array>& sinks);
  void start_decoding();
  void take_back();

  bool steps_singly(int L) const;
  void note_step();
  void restore(const StepBefore& step);
  void cut(int n);
  void clear();

  Fields new_rows(const mx::array& keys, const mx::array& values, int first) const;
  void take_in(const mx::array& keys, const mx::array& values);
  void write_one(const Fields& rows);
  void append(const Fields& rows);
  Fields attended(const Run& run) const;
  // The same of positions and scores, the newest tokens' too.
  Fields positions_and_scores(const Run& run, const Fields& fields) const;
  std::pair<Parts, Parts> keys_and_values(const Run& run, const Fields& fields) const;
  struct OfRun {
    mx::array out;
    std::optional<mx::array> scores, window_mass;
  };
  OfRun attend_run(
      const Run& run, const Fields& fields, const mx::array& q, float scale,
      const std::optional<mx::array>& sinks) const;
  void settle(
      const std::vector<Fields>& attended,
      const std::vector<std::optional<mx::array>>& window_masses);
  Fields reduced(
      const Run& run, const Fields& fields, const std::optional<mx::array>& window_mass,
      int evicted);
  void forget_victims();
  void choose_victims();
  Slots slots(const Run& run, const Fields& fields, int evicted) const;
  int evicted_of(const Run& run) const;
  int most_evicted() const;
  int recently_held() const {
    return recent_ ? recent_->length : 0;
  }
  int recent_slots(const Run& run) const {
    return policy_.recent_slots(run.budget + (recent_ ? recent_->size : 0));
  }
  std::vector<mx::array> arrays() const;
  std::vector<mx::array> changed() const;
  mx::array by_position(const std::string& name, float unused);

  const Policy policy_;
  const std::vector<int> budgets_;
  const bool answers_;
  const bool attending_;
  const Packing packing_;
  int offset_ = 0;
  int plain_rows_ = 0;  // slots of a head's budget that the evicted take as plain rows
  std::optional<SlotStore> store_;
  std::optional<RecentZone> recent_;
  std::optional<Remainder> remainder_;
  std::optional<mx::array> victims_;  // slots to overwrite next, [B, H, evict_every]
  std::optional<Fields> pending_;     // rows of a chunk that goes over budget
  Undo undo_;
  int batch_ = 0, k_width_ = 0, v_width_ = 0;
  mx::Dtype k_dtype_ = mx::float32, v_dtype_ = mx::float32;
  // Where all these arrays are while the fused step decodes.
  std::unique_ptr<Decoding> decoding_;
  Backend decoding_on_ = Backend::plain;
  size_t decoding_bytes_ = 0;
};

}  // namespace mlx_h2o
