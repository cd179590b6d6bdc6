#include "before.h"

#include <algorithm>

namespace mlx_h2o {

void keep(const Layer& layer, const LayerState& state, const Step& step, const Before& before) {
  const int64_t heads = int64_t(layer.B) * layer.Hk;
  for (int64_t i = 0; i < heads; ++i) {
    const int b = i / layer.Hk, h = i % layer.Hk;
    if (before.slots) {
      const int slot = free_slot(layer, state, step, b, h);
      const int64_t where = b * layer.S + step.heads[h].start + slot;
      before.slots[i] = slot;
      before.keys.copy(i, state.keys, where);
      before.values.copy(i, state.values, where);
      before.positions.set(i, state.positions[where]);
      if (before.value_lengths) before.value_lengths[i] = state.value_lengths[where];
    }
    if (before.recent_keys.data) {
      const int64_t where = i * state.recent.size + step.recent_slot;
      before.recent_keys.copy(i, state.recent.keys, where);
      before.recent_values.copy(i, state.recent.values, where);
      if (before.recent_value_lengths)
        before.recent_value_lengths[i] = state.recent.value_lengths[where];
    }
  }
  const auto all = [](const auto* from, int64_t count, auto* to) {
    if (to) std::copy_n(from, count, to);
  };
  all(state.scores, layer.B * layer.S, before.scores);
  all(state.count, heads, before.count);
  all(state.mean_key, heads * layer.D, before.mean_key);
  all(state.var_key, heads * layer.D, before.var_key);
  all(state.mean_value, heads * layer.Dv, before.mean_value);
  all(state.victims, heads * layer.policy.evict_every, before.victims);
  all(state.recent.scores, heads * state.recent.size, before.recent_scores);
}

}  // namespace mlx_h2o
