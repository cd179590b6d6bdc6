#include "views.h"

#include "selection.h"

namespace mlx_h2o {

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
  if (layer.settings.policy.needs_attention()) ranked.emplace("scores", fields.at("scores"));
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
  const mx::array& positions = ranked.at("positions");
  const auto [keys, values] = rows_of(layer, run, fields);
  const bool scored = layer.settings.policy.needs_attention();
  return {dense(keys),    dense(values),
          positions,      scored ? ranked.at("scores") : mx::zeros(positions.shape()),
          layer.offset(), evictable_of(layer, run, positions),
          evicted,        part(layer.evictions().remainder.mean_key, 1, run.first, run.last)};
}

mx::array by_position(BoundedLayer& layer, const std::string& name, float unused) {
  std::vector<mx::array> parts;
  for (const Run& run : layer.runs()) {
    const Fields fields = ranked_of(layer, run, layer.store().views(run));
    const mx::array& positions = fields.at("positions");
    const mx::array field = mx::take_along_axis(fields.at(name), mx::argsort(positions, -1), -1);
    const int missing = layer.held() - field.shape(-1);
    parts.push_back(
        mx::pad(field, {{0, 0}, {0, 0}, {0, missing}}, mx::astype(number(unused), field.dtype())));
  }
  return join_along(std::move(parts), 1);
}

}  // namespace mlx_h2o
