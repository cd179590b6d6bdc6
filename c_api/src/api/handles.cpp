#include "handles.h"

#include "sized.h"

namespace mlx_h2o {

Policy& of(mlx_h2o_policy handle) {
  check(handle.ctx, "The policy is missing: a handle is empty.");
  return *static_cast<Policy*>(handle.ctx);
}

const Policy* own_of(mlx_h2o_policy handle) {
  if (!handle.ctx) return nullptr;
  const Policy& policy = of(handle);
  check(
      bool(policy.own),
      "Policy " + policy.name +
          " is of the library, which the settings name: a policy is given only where it is of the "
          "program's own.");
  return &policy;
}

Core& of(mlx_h2o_cache handle) {
  check(handle.ctx, "The cache is missing: a handle is empty.");
  return *handle_of(handle)->core;
}

void give(mlx_h2o_cache* res, std::unique_ptr<Core> cache) {
  if (res->ctx)
    *handle_of(*res) = {std::move(cache), {}};
  else
    res->ctx = new CacheHandle{std::move(cache), {}};
}

void give(mlx_h2o_policy* res, Policy policy) {
  if (res->ctx)
    of(*res) = std::move(policy);
  else
    res->ctx = new Policy(std::move(policy));
}

void give(mlx_string* res, const std::string& words) {
  const mlx_string text = mlx_string_new_data(words.c_str());
  const int status = mlx_string_set(res, text);
  mlx_string_free(text);
  check(!status, "MLX could not hand over a text.", Blame::internal);
}

void give(mlx_map_string_to_array* res, const Fields& arrays) {
  const mlx_map_string_to_array all = mlx_map_string_to_array_new();
  int status = 0;
  for (const auto& [name, array] : arrays)
    status = status || mlx_map_string_to_array_insert(all, name.c_str(), borrowed(array));
  status = status || mlx_map_string_to_array_set(res, all);
  mlx_map_string_to_array_free(all);
  check(!status, "MLX could not list the arrays.", Blame::internal);
}

void give(mlx_vector_array* res, const std::vector<mx::array>& arrays) {
  const mlx_vector_array all = listed(arrays);
  const int status = mlx_vector_array_set(res, all);
  mlx_vector_array_free(all);
  check(!status, "MLX could not list the arrays.", Blame::internal);
}

Fields fields_of(const mlx_map_string_to_array arrays) {
  Fields all;
  const mlx_map_string_to_array_iterator it = mlx_map_string_to_array_iterator_new(arrays);
  const char* name = nullptr;
  mlx_array array = mlx_array_new();
  while (!mlx_map_string_to_array_iterator_next(&name, &array, it)) all.emplace(name, of(array));
  mlx_array_free(array);
  mlx_map_string_to_array_iterator_free(it);
  return all;
}

Core& changed(mlx_h2o_cache handle) {
  refuse_tracing();
  Core& cache = of(handle);
  cache.check_whole();
  return cache;
}

Remainder of(mlx_h2o_remainder handles, Operands& operands) {
  return {
      operands.take("count", handles.count, "B Hk", Kind::float32),
      operands.take("mean_key", handles.mean_key, "B Hk D", Kind::float32),
      operands.take("var_key", handles.var_key, "B Hk D", Kind::float32),
      operands.take("mean_value", handles.mean_value, "B Hk Dv", Kind::float32)};
}

Saturations saturations_of(const float* given, int n_kv_heads) {
  if (!given) return Saturations(n_kv_heads, kSaturation);
  const Saturations saturations(given, given + n_kv_heads);
  for (float t : saturations)
    check(std::isfinite(t) && t >= 0, "saturation must be finite numbers of at least 0.");
  return saturations;
}

void give(mlx_h2o_remainder* res, const Remainder& value) {
  wants(res);
  give(&res->count, value.count);
  give(&res->mean_key, value.mean_key);
  give(&res->var_key, value.var_key);
  give(&res->mean_value, value.mean_value);
}

Slots of(const mlx_h2o_slots* given, const Policy& policy, Operands& operands) {
  check(given, "The slots are missing: a pointer is null.");
  constexpr size_t least = offsetof(mlx_h2o_slots, evicted) + sizeof(int);
  const mlx_h2o_slots slots = complete(*given, mlx_h2o_slots{}, least, "slots");
  const mx::array keys = operands.take("keys", slots.keys, "B Hk N D", Kind::floating);
  const mx::array values = operands.take("values", slots.values, "B Hk N Dv", Kind::floating);
  const mx::array positions = operands.take("positions", slots.positions, "B Hk N", Kind::int32);
  const auto scores = operands.take_if_any("scores", slots.scores, "B Hk N", Kind::float32);
  const mx::array evictable = operands.take("evictable", slots.evictable, "B Hk N", Kind::boolean);
  const mx::array mean =
      operands.take("evicted_mean_key", slots.evicted_mean_key, "B Hk D", Kind::float32);
  check(scores || !policy.needs_attention(), "Policy " + policy.name + " needs scores.");
  check(slots.offset >= 0 && slots.evicted >= 0, "offset and evicted must be at least 0.");
  return {keys,         values,    positions,     scores ? *scores : mx::zeros(positions.shape()),
          slots.offset, evictable, slots.evicted, mean};
}

mx::array prompt_priority(
    const Policy& policy, const Slots& seen, mlx_array window_mass, Operands& operands) {
  return policy.prompt_priority(
      seen, operands.take_if_any("window_mass", window_mass, "B Hk N", Kind::float32));
}

}  // namespace mlx_h2o
