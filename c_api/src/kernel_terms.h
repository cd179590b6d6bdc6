// What the engine says to kernels, the CPU's and a GPU's: a policy in their terms, and what a fused
// step does. It knows nothing of MLX.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace mlx_h2o {

// Query rows of a KV head in one call at most; they and their outputs stay in a CPU's second-level
// cache.
constexpr int kMaxRows = 32;

constexpr int kFewTokens = 1 << 15;  // whose positions fit into 16 bits

// What a policy accumulates per slot.
enum class Score { none, sum, ema, ema_logits, last };
// What it ranks slots by.
enum class Priority { score, age, distance, direction, salience };

// A policy in the kernels' terms (Policy.kernel_policy in Python).
struct KernelPolicy {
  Score score = Score::none;
  Priority priority = Priority::age;
  bool per_layer = false;
  bool age_normalised = false;
  int sink = 0;
  int evict_every = 1;
  float decay = 0;
  // Of Priority::distance and salience.
  float distance_weight = 1;
  float mass_weight = 0;
  float value_weight = 0;
  float age_weight = 0;

  // Whether keys' distances from the mean key are asked for.
  bool measures() const {
    return (priority == Priority::distance || priority == Priority::salience) && distance_weight;
  }
};

// What changes from step to step, for each KV head.
struct HeadPlan {
  int64_t start;  // its first slot in the flat buffers
  int length;     // slots in use, the new one included
  int victim;     // which of its victims makes room, or -1 for the next unused slot
  int recent;     // last positions that are protected
  int evicted;    // tokens lost, this step's victim included
  bool choose;    // name the next victims
};

// What a step does with the newest tokens: the new token's slot, the tokens held after it, and
// whether one leaves.
struct RecentStep {
  int slot, length;
  bool leaving;
};

// What a layer does with one token.
struct TokenPlan {
  int offset;                        // the next logical position; the new token's is one less
  std::vector<HeadPlan> heads;       // one plan for each KV head
  std::optional<RecentStep> recent;  // where the newest tokens are stored apart
  int aged_from = 0;                 // the position from which ages count

  // Whether any head has evicted a token.
  bool evicts() const {
    return std::any_of(heads.begin(), heads.end(), [](auto& head) { return head.evicted > 0; });
  }
  // Whether any head is to name its next victims.
  bool chooses() const {
    return std::any_of(heads.begin(), heads.end(), [](auto& head) { return head.choose; });
  }
};

}  // namespace mlx_h2o
