#include "eviction.h"

#include <algorithm>

#include "policy_view.h"
#include "selection.h"

namespace mlx_h2o {

namespace {

// What a run's rows are worth by the policy, [B, heads, N].
mx::array worth_of(
    BoundedLayer& layer, const Run& run, const Fields& fields,
    const std::optional<mx::array>& window_mass) {
  const int N = fields.at("positions").shape(2), evicted = layer.lost_beside(fields);
  // Head by head, so that float32 copies are never of more than one head's rows.
  std::vector<mx::array> priorities;
  for (int i = 0; i < run.heads(); ++i) {
    Run one = run;
    one.first = run.first + i, one.last = one.first + 1;
    std::optional<mx::array> mass;
    if (window_mass) mass = part(*window_mass, 1, i, i + 1);
    const Slots seen = slots_of(layer, one, heads_of(fields, i, i + 1), evicted);
    priorities.push_back(part(layer.settings.policy.prompt_priority(seen, mass), 2, 0, N));
  }
  return join_along(std::move(priorities), 1);
}

// The `count` rows of a run that are worth most, [B, heads, N]; those that may not go are among
// them. The others are folded.
Fields best(
    BoundedLayer& layer, const Run& run, const Fields& fields, const mx::array& worth, int count,
    const mx::array& may_go) {
  const mx::array& positions = fields.at("positions");
  const mx::array kept =
      select_kept(worth, true_positions(positions), may_go, count, layer.settings.policy.per_layer);
  if (layer.settings.remembers()) {
    const mx::array dropped =
        mx::put_along_axis(mx::ones(positions.shape()), kept, mx::zeros(kept.shape()), -1);
    for (int i = 0; i < run.heads(); ++i)
      layer.fold(heads_of(fields, i, i + 1), part(dropped, 1, i, i + 1), run.first + i);
  }
  Fields staying;
  for (const auto& [name, field] : fields) {
    mx::Shape index = kept.shape(), rows = field.shape();
    index.resize(field.ndim(), 1);
    rows[2] = count;
    staying.emplace(
        name, mx::take_along_axis(field, mx::broadcast_to(mx::reshape(kept, index), rows), 2));
  }
  return staying;
}

// The rows of a run that stay within its budget; the others are folded.
Fields reduced(
    BoundedLayer& layer, const Run& run, const Fields& fields,
    const std::optional<mx::array>& window_mass) {
  const mx::array& positions = fields.at("positions");
  if (run.budget >= positions.shape(2)) return fields;
  const mx::array worth = worth_of(layer, run, fields, window_mass);
  return best(layer, run, fields, worth, run.budget, evictable_of(layer, run, positions));
}

// The slots of a full run to overwrite next, [B, heads, evict_every].
mx::array victims_of(BoundedLayer& layer, const Run& run) {
  const Policy& policy = layer.settings.policy;
  const Slots seen = slots_of(layer, run, layer.store().views(run), layer.lost(run));
  return select_victims(
      part(policy.priority(seen), 2, 0, run.length), part(seen.positions, 2, 0, run.length),
      part(seen.evictable, 2, 0, run.length), policy.evict_every, policy.per_layer);
}

}  // namespace

void choose_victims(BoundedLayer& layer) {
  if (!layer.slots_are_next()) return;
  std::vector<bool> due;
  for (const Run& run : layer.runs()) due.push_back(run.is_full() && !run.victims);
  if (std::find(due.begin(), due.end(), true) == due.end()) return;
  const std::optional<mx::array>& named = layer.evictions().victims;
  std::vector<mx::array> chosen;
  for (size_t i = 0; i < due.size(); ++i) {
    const Run& run = layer.runs()[i];
    if (due[i])
      chosen.push_back(victims_of(layer, run));
    else if (named)
      chosen.push_back(part(*named, 1, run.first, run.last));
    else
      chosen.push_back(
          mx::zeros(
              {layer.types.batch, run.heads(), layer.settings.policy.evict_every}, mx::int32));
  }
  layer.name_victims(due, join_along(std::move(chosen), 1));
}

void settle(
    BoundedLayer& layer, const std::vector<Fields>& attended,
    const std::vector<std::optional<mx::array>>& window_masses) {
  const std::vector<Run>& runs = layer.runs();
  bool over = false;
  for (size_t i = 0; i < runs.size(); ++i)
    over = over || runs[i].budget < attended[i].at("positions").shape(2);
  if (over) {
    std::vector<Fields> kept;
    for (size_t i = 0; i < runs.size(); ++i)
      kept.push_back(reduced(layer, runs[i], attended[i], window_masses[i]));
    layer.keep(kept);
  } else if (layer.settings.policy.needs_attention()) {
    std::vector<mx::array> scores;
    for (const Fields& fields : attended) scores.push_back(fields.at("scores"));
    layer.write_scores(scores);
  }
  choose_victims(layer);
}

void resize(BoundedLayer& layer) {
  const std::optional<Fields> beyond = layer.resize_window();
  layer.regroup();
  const size_t runs = layer.runs().size();
  settle(layer, layer.attended(beyond), std::vector<std::optional<mx::array>>(runs));
  // Heads that have become alike form one run again.
  layer.regroup();
  choose_victims(layer);
}

void keep_best(BoundedLayer& layer, const std::vector<mx::array>& worths, int room) {
  layer.regroup();
  const std::vector<Fields> all = layer.attended(std::nullopt);
  std::vector<Fields> kept;
  for (size_t i = 0; i < all.size(); ++i) {
    const Run& run = layer.runs()[i];
    const mx::array& positions = all[i].at("positions");
    const int count = run.budget - room;
    if (count >= positions.shape(2)) {
      kept.push_back(all[i]);
      continue;
    }
    std::vector<mx::array> worth;
    for (int head = run.first; head < run.last; ++head)
      worth.push_back(mx::expand_dims(worths[head], 1));
    const mx::array may_go = mx::greater_equal(positions, mx::array(layer.settings.policy.sink));
    kept.push_back(best(layer, run, all[i], join_along(std::move(worth), 1), count, may_go));
  }
  layer.keep(kept);
  // Heads that hold as many rows form one run.
  layer.regroup();
  choose_victims(layer);
}

}  // namespace mlx_h2o
