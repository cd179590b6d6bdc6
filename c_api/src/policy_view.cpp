#include "policy_view.h"

#include "selection.h"
#include "value_lengths.h"

namespace mlx_h2o {

namespace {

// Rows [B, heads, M, ...] in an order [B, heads, M], with `unused` behind them up to `held`.
mx::array in_order(const mx::array& rows, const mx::array& order, int held, float unused) {
  const mx::array sorted = mx::take_along_axis(rows, spread(order, rows.shape()), 2);
  std::vector<std::pair<int, int>> widths(rows.ndim(), {0, 0});
  widths[2].second = held - rows.shape(2);
  return mx::pad(sorted, widths, mx::astype(number(unused), rows.dtype()));
}

}  // namespace

std::pair<Parts, Parts> rows_of(BoundedLayer& layer, const Run& run, const Fields& fields) {
  const Packing& packing = layer.settings.packing;
  Parts keys{packing.rows("keys", fields)}, values{packing.rows("values", fields)};
  if (const RecentWindow* window = layer.window()) {
    const Fields views = window->views(run.first, run.last, layer.offset());
    keys.push_back(window->rows("keys", views));
    values.push_back(window->rows("values", views));
  }
  return {keys, values};
}

Fields ranked_of(BoundedLayer& layer, const Run& run, const Fields& fields) {
  Fields ranked{{"positions", fields.at("positions")}};
  for (const char* name : {"scores", "value_lengths"})
    if (const auto it = fields.find(name); it != fields.end()) ranked.insert(*it);
  const RecentWindow* window = layer.window();
  if (!window) return ranked;
  const Fields views = window->views(run.first, run.last, layer.offset());
  for (auto& [name, field] : ranked) field = mx::concatenate({field, views.at(name)}, 2);
  return ranked;
}

mx::array evictable_of(BoundedLayer& layer, const Run& run, const mx::array& positions) {
  const int sink = layer.settings.policy.sink;
  return evictable_slots(positions, layer.offset(), sink, layer.protected_recent(run));
}

Slots slots_of(BoundedLayer& layer, const Run& run, const Fields& fields, int evicted) {
  const Fields ranked = ranked_of(layer, run, fields);
  const mx::array& stored = ranked.at("positions");
  const mx::array positions = true_positions(stored);
  const auto [keys, values] = rows_of(layer, run, fields);
  const auto scores = ranked.find("scores"), lengths = ranked.find("value_lengths");
  Slots slots{
      dense(keys),    dense(values),
      positions,      scores == ranked.end() ? mx::zeros(positions.shape()) : scores->second,
      layer.offset(), evictable_of(layer, run, stored),
      evicted,        part(layer.evictions().remainder.mean_key, 1, run.first, run.last)};
  if (lengths != ranked.end())
    slots.value_lengths = lengths->second;
  else if (layer.settings.policy.uses_value_lengths())
    slots.value_lengths = value_lengths(values);
  slots.aged_from = layer.aged_from();
  return slots;
}

std::pair<mx::array, mx::array> rows_by_position(BoundedLayer& layer) {
  std::vector<mx::array> all[2];
  for (const Run& run : layer.runs()) {
    const Fields fields = layer.store().views(run);
    const mx::array order =
        mx::argsort(true_positions(ranked_of(layer, run, fields).at("positions")), -1);
    const auto [keys, values] = rows_of(layer, run, fields);
    all[0].push_back(in_order(dense(keys), order, layer.held(), 0));
    all[1].push_back(in_order(dense(values), order, layer.held(), 0));
  }
  return {join_along(std::move(all[0]), 1), join_along(std::move(all[1]), 1)};
}

mx::array by_position(BoundedLayer& layer, const std::string& name, float unused) {
  std::vector<mx::array> parts;
  for (const Run& run : layer.runs()) {
    Fields fields = ranked_of(layer, run, layer.store().views(run));
    fields.insert_or_assign("positions", true_positions(fields.at("positions")));
    const mx::array order = mx::argsort(fields.at("positions"), -1);
    parts.push_back(in_order(fields.at(name), order, layer.held(), unused));
  }
  return join_along(std::move(parts), 1);
}

}  // namespace mlx_h2o
