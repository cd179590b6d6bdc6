#include "settings.h"

#include <algorithm>

namespace mlx_h2o {

void CacheSettings::check_all() const {
  check(!budgets.empty(), "A cache needs one number of slots per KV head.");
  check_within("undo", undo, 0, kMostSteps);
  check(
      !undo || attending,
      "undo needs attention of ours: a model that attends by itself cannot take a chunk token by "
      "token.");
  packing.check_widths();
  check(!frame || packing.k_bits, "A frame is for packed keys: it needs k_bits.");
  for (float t : saturations)
    check(
        attending || t == kSaturation,
        "A model that attends by itself has the remainder as plain rows, which saturate of "
        "themselves: omit saturation.");
  if (!attending) {
    check(
        !policy.needs_attention(),
        "Policy " + policy.name + " must see attention: for models that attend by themselves " +
            "choose keydiff, streaming, or distinct with mass_weight 0.");
    check(!packing.packs(), "A model that attends by itself cannot read packed rows.");
  }
  check_budgets(budgets);
  check_filling();
  check_rolling();
}

void CacheSettings::check_budgets(const std::vector<int>& slots) const {
  for (int budget : slots) {
    check_within("A head's budget", budget, 1, kMostTokens);
    policy.check_budget(budget - plain_rows());
    check(
        (attending && !policy.per_layer) || budget == slots[0],
        "All heads need one budget where the policy's unit is the layer, or the model attends.");
    check(
        !packing.recent_bits || policy.recent_slots(budget) >= 1,
        "recent_bits needs protected tokens: this policy protects none.");
  }
}

bool pass_stages(std::vector<Stage>& stages, int tokens, std::vector<int>& budgets) {
  const auto next = std::find_if(
      stages.begin(), stages.end(), [&](const Stage& stage) { return stage.beyond >= tokens; });
  if (next == stages.begin()) return false;
  budgets = std::move(std::prev(next)->budgets);
  stages.erase(stages.begin(), next);
  return true;
}

void CacheSettings::check_filling() const {
  check(filling.empty() || attending, "filling needs attention of ours.");
  int before = 0;
  for (const Stage& stage : filling) {
    check_within("A stage of filling", stage.beyond, 1, kMostTokens);
    check(
        stage.beyond > before,
        "The stages of filling begin at 1 token or later, each beyond the one before; got " +
            std::to_string(stage.beyond) + " after " + std::to_string(before) + ".");
    check_budgets(stage.budgets);
    before = stage.beyond;
  }
}

void CacheSettings::check_rolling() const {
  if (!rope) return;
  rope->check_all();
  check(attending, "Positions without gaps need attention of ours.");
  check(
      !remainder,
      "Positions without gaps leave evicted tokens no position, so there is no remainder: set "
      "remainder to false.");
  check(
      !packing.packs(),
      "Positions without gaps turn keys at every step, but not packed keys: set k_bits and v_bits "
      "to 0.");
}

int CacheSettings::plain_rows() const {
  if (attending || !remainder) return 0;
  if (reserved) return *reserved;
  // How many a head can afford: 8 of 128 pays, 8 of 64 does not.
  return std::max(1, std::min(8, budgets[0] / 16 / 2 * 2));
}

int CacheSettings::recent_size() const {
  if (!packing.recent_bits) return 0;
  int newest = budgets[0];
  for (int budget : budgets) newest = std::min(newest, policy.recent_slots(budget));
  return newest;
}

std::vector<int> CacheSettings::own_slots() const {
  const int taken = recent_size() + plain_rows();
  std::vector<int> slots = budgets;
  for (int& budget : slots) budget -= taken;
  return slots;
}

}  // namespace mlx_h2o
