// Policies: how slots are scored, and which of them go (python/mlx_h2o/policies).
#pragma once

#include <memory>
#include <variant>

#include "kernel_terms.h"
#include "packed.h"
#include "ranges.h"

namespace mlx_h2o {

// Fewer evicted keys than this give no mean worth measuring distances from; the kept ones serve.
constexpr int kFewestForAMean = 16;

enum class PolicyKind { distinct, h2o, ema, ema_logits, tova, streaming, keydiff, salient, own };

// What one call of the attention told about N slots.
struct Observation {
  std::optional<mx::array> logits;  // [B, Hq, L, N]
  std::optional<mx::array> lse;     // [B, Hq, L]
  int heads;                        // KV heads
  std::optional<mx::array> mass;    // [B, H, N], of all queries
  // How many queries each observed one stands for, per slot [N]; none: 1.
  std::optional<mx::array> stands_for;

  mx::array total_mass() const;
  Observation query(int i) const;
};

// The slots of H KV heads as a policy sees them.
struct Slots {
  mx::array keys;              // [B, H, N, D]
  mx::array values;            // [B, H, N, Dv]
  mx::array positions;         // [B, H, N] int32
  mx::array scores;            // [B, H, N]
  int offset;                  // the next logical position
  mx::array evictable;         // [B, H, N] bool
  int evicted;                 // tokens that each head has lost
  mx::array evicted_mean_key;  // [B, H, D]
  // log ||v||^2 of the values as they came, [B, H, N]; none: of `values`.
  std::optional<mx::array> value_lengths = std::nullopt;
  int aged_from = 0;  // the position from which steps count: older tokens are as old as it

  mx::array ages() const;
  mx::array lengths_of_values() const;  // float32
};

// A setting by name, as one of the kinds that mlx_h2o_setting has.
struct Setting {
  std::string name;
  std::variant<int, double, bool, std::string> value;
};

// The functions of a program's own policy (src/api/own_policy.cpp).
struct OwnPolicy {
  virtual ~OwnPolicy() = default;
  virtual bool needs_attention() const = 0;
  // Whether `accumulate` is the program's; otherwise masses are summed.
  virtual bool accumulates() const = 0;
  // As those of Policy.
  virtual mx::array accumulate(const mx::array& scores, const Observation& seen) const = 0;
  virtual mx::array priority(const Slots& slots) const = 0;
};

struct Policy {
  std::string name;
  PolicyKind kind;
  int sink = 4;
  double recent = 0.5;
  bool recent_is_share = true;
  bool per_layer = false;
  int evict_every = 1;
  bool age_normalised = false;
  bool value_weighted = false;
  bool windowed = true;  // prompts are scored by their last `window` queries
  int window = 64;
  int pool = 5;
  double decay = 0.95;
  double mass_weight = 0.5;
  double age_weight = 0.6;
  double distance_weight = 0.3;
  double value_weight = 0.3;
  std::shared_ptr<const OwnPolicy> own = nullptr;  // of PolicyKind::own

  // Whether a name is one of the library's, Python's among them.
  static bool is_built_in(const std::string& name);
  // A policy by name, or a published preset. Raises for unknown names.
  static Policy named(const std::string& name);
  // All settings, in the order in which files have them.
  std::vector<Setting> settings() const;
  // Sets one. Raises for what makes no policy.
  void set(const Setting& setting);
  // The same from its text, as the command line does.
  void set(const std::string& field, const std::string& value);

  bool needs_attention() const;
  // Whether the mean key of the evicted is kept even when the remainder does not answer.
  bool uses_evicted_mean() const {
    return kind == PolicyKind::distinct || kind == PolicyKind::salient;
  }
  // Whether it ranks by the lengths of values.
  bool uses_value_lengths() const {
    return kind == PolicyKind::salient;
  }
  // Whether they are kept beside rows that are stored so: packed ones tell them.
  bool keeps_value_lengths(const Packing& packing) const {
    return uses_value_lengths() && !packing.v_bits;
  }
  // Whether accumulate only sums masses, so that no logits need be written for it.
  bool sums_mass() const {
    return uses_evicted_mean() || kind == PolicyKind::h2o || (own && !own->accumulates());
  }
  int recent_slots(int budget) const;
  // The fewest slots from which a head can always evict, beside so many pinned tokens.
  int least_budget(int pinned) const;
  void check_budget(int budget) const;
  // This policy in the fused kernels' terms, which may leave the weighting by ||v|| out.
  KernelPolicy kernel_policy() const;

  // Scores [B, H, N] after an observation.
  mx::array accumulate(const mx::array& scores, const Observation& seen) const;
  // Each slot's mean mass per step, as far as its score tells.
  mx::array mean_mass(const mx::array& scores, const mx::array& ages) const;
  // Scores when a turn begins, of which `carry` of the past counts: of sums the mean per step over
  // fewer steps, of averages the part that counts.
  mx::array carried(
      const mx::array& scores, const mx::array& ages, const mx::array& ages_after,
      double carry) const;
  // What each slot is worth keeping, [B, H, N]; the lowest goes first.
  mx::array priority(const Slots& slots) const;
  // The same for a prompt; window_mass is the mass of its last queries, or none.
  mx::array prompt_priority(const Slots& slots, const std::optional<mx::array>& window_mass) const;

 private:
  mx::array distinct_mass(const mx::array& mass, const Slots& slots) const;
  mx::array salience(const mx::array& mass, const Slots& slots) const;
  void check_fields() const;
};

}  // namespace mlx_h2o
