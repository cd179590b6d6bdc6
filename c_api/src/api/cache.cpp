// mlx_h2o.h: a layer's cache.
#include <algorithm>

#include "../attend.h"
#include "handles.h"
#include "sized.h"

namespace mlx_h2o {

// More KV heads than any model has: a number that went wrong, as -1 does.
constexpr size_t kMostHeads = 1 << 16;
constexpr size_t kMostSpans = 1 << 16;
// Tokens double from stage to stage.
constexpr size_t kMostStages = 64;

namespace {

mlx_h2o_cache_options defaults() {
  mlx_h2o_cache_options options = {};
  options.remainder = options.attending = options.kernels = true;
  options.group_size = 64;
  return options;
}

// Of the first version, which every program knows.
constexpr size_t kLeastOptions = offsetof(mlx_h2o_cache_options, kernels) + sizeof(bool);
constexpr size_t kLeastRope = offsetof(mlx_h2o_rope, traditional) + sizeof(bool);
constexpr size_t kLeastRowTypes = offsetof(mlx_h2o_row_types, value_dtype) + sizeof(mlx_dtype);

// What a call does to a cache, by kernels or not.
template <class F>
int changing(mlx_h2o_cache cache, mlx_stream s, F&& run) {
  return guarded_on(s, [&] {
    Core& core = changed(cache);
    const KernelScope kernels(core.settings().kernels);
    run(core);
  });
}

// What a cache says of itself.
template <class T, class F>
int reading(T* res, mlx_h2o_cache cache, F&& look) {
  return guarded([&] {
    wants(res);
    *res = look(of(cache));
  });
}

std::optional<Frame> frame_of(const mlx_h2o_cache_options& options, int heads) {
  const mlx_array centre = options.frame_centre, scale = options.frame_scale;
  check(
      !centre.ctx == !scale.ctx,
      "frame_centre and frame_scale go together: one is an empty handle.");
  if (!centre.ctx) return std::nullopt;
  Operands operands;
  const mx::array of_centre = operands.take("frame_centre", centre, "Hk D", Kind::float32);
  const mx::array of_scale = operands.take("frame_scale", scale, "Hk D", Kind::float32);
  check(
      operands["Hk"] == heads,
      "The frame is of " + std::to_string(operands["Hk"]) + " KV heads, the budgets of " +
          std::to_string(heads) + ".");
  return checked_frame(of_centre, of_scale);
}

std::optional<Rope> rope_of(const mlx_h2o_rope* given) {
  if (!given) return std::nullopt;
  const mlx_h2o_rope rope = complete(*given, mlx_h2o_rope{}, kLeastRope, "rope");
  return Rope{rope.dims, rope.base, rope.scale, rope.traditional};
}

void give_if_any(mlx_array* res, const std::optional<mx::array>& value) {
  if (value) return give(res, *value);
  mlx_array_free(*res);
  *res = mlx_array_new();
}

// Numbers into a program's place for *n of them; a null place: how many there are, to *n.
void give_numbers(
    int* res, size_t* n, const std::vector<int>& numbers, int of_each, const char* what) {
  check(n, "The number of " + std::string(what) + " is missing: a pointer is null.");
  const size_t count = numbers.size() / of_each;
  if (!res) return void(*n = count);
  check(
      *n == count,
      "There are " + std::to_string(count) + " " + what + "; got place for " + std::to_string(*n) +
          ".");
  std::copy(numbers.begin(), numbers.end(), res);
}

void give_spans(int* res, size_t* n_spans, const Spans& spans) {
  std::vector<int> ends;
  for (const auto& [first, end] : spans) ends.push_back(first), ends.push_back(end);
  give_numbers(res, n_spans, ends, 2, "spans");
}

std::vector<Stage> filling_of(const int* filling, size_t n_stages, int heads) {
  check(
      n_stages <= kMostStages && (filling || !n_stages),
      "filling has at most " + std::to_string(kMostStages) + " stages; got " +
          std::to_string(n_stages) + (filling ? "." : " and a null pointer."));
  std::vector<Stage> stages;
  for (size_t i = 0; i < n_stages; ++i) {
    const int* stage = filling + i * (1 + heads);
    stages.push_back({stage[0], {stage + 1, stage + 1 + heads}});
  }
  return stages;
}

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

int mlx_h2o_cache_options_init(mlx_h2o_cache_options* res, size_t size) {
  return guarded([&] {
    wants(res);
    fill(res, size, defaults(), kLeastOptions, "options");
  });
}

mlx_h2o_cache mlx_h2o_cache_new(void) {
  return {};
}

int mlx_h2o_cache_free(mlx_h2o_cache cache) {
  delete handle_of(cache);
  return 0;
}

int mlx_h2o_cache_make(
    mlx_h2o_cache* res, const mlx_h2o_policy policy, const int* budgets, size_t n_kv_heads,
    const mlx_h2o_cache_options* given) {
  return guarded([&] {
    wants(res);
    const mlx_h2o_cache_options options =
        given ? complete(*given, defaults(), kLeastOptions, "options") : defaults();
    check(budgets, "The budgets are missing: a pointer is null.");
    check_within("The number of KV heads", int64_t(n_kv_heads), 1, kMostHeads);
    CacheSettings settings;
    settings.policy = of(policy);
    settings.budgets.assign(budgets, budgets + n_kv_heads);
    settings.remainder = options.remainder;
    settings.kernels = options.kernels;
    settings.attending = options.attending;
    settings.packing = {options.k_bits, options.v_bits, options.group_size, options.recent_bits};
    settings.undo = options.undo;
    settings.saturations = saturations_of(options.saturation, settings.heads());
    settings.frame = frame_of(options, settings.heads());
    settings.filling = filling_of(options.filling, options.n_stages, settings.heads());
    settings.rope = rope_of(options.rope);
    give(res, std::make_unique<Core>(std::move(settings)));
  });
}

int mlx_h2o_cache_get_options(mlx_h2o_cache_options* res, mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    const CacheHandle& handle = *handle_of(cache);
    const CacheSettings& settings = of(cache).settings();
    mlx_h2o_cache_options options = defaults();
    options.remainder = settings.remainder, options.attending = settings.attending;
    options.kernels = settings.kernels, options.undo = settings.undo;
    options.k_bits = settings.packing.k_bits, options.v_bits = settings.packing.v_bits;
    options.group_size = settings.packing.group_size;
    options.recent_bits = settings.packing.recent_bits;
    options.saturation = settings.saturations.data();
    if (settings.frame) {
      options.frame_centre = borrowed(settings.frame->centre);
      options.frame_scale = borrowed(settings.frame->scale);
    }
    if (const std::optional<Rope>& rope = settings.rope) {
      handle.rope = {sizeof handle.rope, rope->dims, rope->base, rope->scale, rope->traditional};
      options.rope = &handle.rope;
    }
    handle.filling.clear();
    for (const Stage& stage : settings.filling) {
      handle.filling.push_back(stage.beyond);
      handle.filling.insert(handle.filling.end(), stage.budgets.begin(), stage.budgets.end());
    }
    options.n_stages = settings.filling.size();
    if (options.n_stages) options.filling = handle.filling.data();
    fill(res, res->size, options, kLeastOptions, "options");
  });
}

int mlx_h2o_cache_budgets(int* res, size_t* n_kv_heads, const mlx_h2o_cache cache) {
  return guarded(
      [&] { give_numbers(res, n_kv_heads, of(cache).settings().budgets, 1, "KV heads"); });
}

int mlx_h2o_cache_pins(int* res, size_t* n_spans, const mlx_h2o_cache cache) {
  return guarded([&] { give_spans(res, n_spans, of(cache).settings().pins); });
}

int mlx_h2o_cache_row_types(mlx_h2o_row_types* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    const std::optional<RowTypes> types = of(cache).row_types();
    check(types.has_value(), "This cache has seen no token.", Blame::state);
    const mlx_h2o_row_types row_types = {
        sizeof row_types,
        types->batch,
        int(of(cache).heads()),
        types->key_width,
        types->value_width,
        dtype_of(types->key_dtype),
        dtype_of(types->value_dtype)};
    fill(res, res->size, row_types, kLeastRowTypes, "row_types");
  });
}

int mlx_h2o_cache_use_kernels(mlx_h2o_cache cache, bool use) {
  return guarded([&] { of(cache).use_kernels(use); });
}

int mlx_h2o_cache_update_and_attend(
    mlx_array* out, mlx_h2o_cache cache, const mlx_array q, const mlx_array keys,
    const mlx_array values, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(out);
    check_scale(scale);
    const AttentionCall call{of(q), scale, maybe(sinks), masking(mask_mode, mask_arr)};
    give(out, core.update_and_attend(call, of(keys), of(values)));
  });
}

int mlx_h2o_cache_make_mask(
    const char** res_mode, mlx_array* res, mlx_h2o_cache cache, int n, bool as_array,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res_mode, res);
    of(cache).check_whole();
    const Masking mask = of(cache).mask_for(n, as_array);
    give_if_any(res, mask.array);
    *res_mode = mask.array ? "array" : mask.causal ? "causal" : "";
  });
}

int mlx_h2o_cache_update_and_fetch(
    mlx_array* res_keys, mlx_array* res_values, mlx_array* res_mask, mlx_h2o_cache cache,
    const mlx_array keys, const mlx_array values, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(res_keys, res_values, res_mask);
    Core::FetchedRows fetched = core.update_and_fetch(of(keys), of(values));
    give(res_keys, fetched.keys);
    give(res_values, fetched.values);
    give_if_any(res_mask, fetched.mask);
  });
}

int mlx_h2o_cache_offset(int* res, const mlx_h2o_cache cache) {
  return reading(res, cache, [](const Core& core) { return core.offset(); });
}

int mlx_h2o_cache_size(int* res, const mlx_h2o_cache cache) {
  return reading(res, cache, [](const Core& core) { return core.size(); });
}

int mlx_h2o_cache_evicted(int64_t* res, const mlx_h2o_cache cache) {
  return reading(res, cache, [](const Core& core) { return core.evicted(); });
}

int mlx_h2o_cache_nbytes(size_t* res, const mlx_h2o_cache cache) {
  return reading(res, cache, [](const Core& core) { return core.nbytes(); });
}

int mlx_h2o_cache_trimmable(int* res, const mlx_h2o_cache cache) {
  return reading(res, cache, [](const Core& core) { return core.trimmable(); });
}

int mlx_h2o_cache_trim(mlx_h2o_cache cache, int n, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) { core.trim(n); });
}

int mlx_h2o_cache_copy(mlx_h2o_cache* res, mlx_h2o_cache cache, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(res);
    give(res, core.copied());
  });
}

int mlx_h2o_cache_resize(
    mlx_h2o_cache cache, const int* budgets, size_t n_kv_heads, const int* filling, size_t n_stages,
    const mlx_stream s) {
  return changing(cache, s, [&](Core& resized) {
    check(budgets, "The budgets are missing: a pointer is null.");
    check(
        n_kv_heads == resized.heads(),
        "This cache needs budgets for " + std::to_string(resized.heads()) + " KV heads; got " +
            std::to_string(n_kv_heads) + ".");
    resized.resize({budgets, budgets + n_kv_heads}, filling_of(filling, n_stages, int(n_kv_heads)));
  });
}

int mlx_h2o_cache_pin(
    int* res_missing, mlx_h2o_cache cache, const int* spans, size_t n_spans, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    check(spans, "The spans are missing: a pointer is null.");
    check_within("The number of spans", int64_t(n_spans), 1, kMostSpans);
    Spans pins;
    for (size_t i = 0; i < n_spans; ++i) {
      const int first = spans[2 * i], end = spans[2 * i + 1];
      check(
          first >= 0 && first < end && end <= kMostTokens,
          "A span is a first position and one past the last, above it and at most " +
              std::to_string(kMostTokens) + "; got " + std::to_string(first) + " and " +
              std::to_string(end) + ".");
      pins.emplace_back(first, end);
    }
    const int missing = core.pin(std::move(pins));
    if (res_missing) *res_missing = missing;
  });
}

int mlx_h2o_cache_unpin(mlx_h2o_cache cache, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) { core.unpin(); });
}

int mlx_h2o_cache_new_turn(mlx_h2o_cache cache, double carry, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) { core.new_turn(carry); });
}

int mlx_h2o_cache_kept(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(res);
    give(res, core.kept());
  });
}

int mlx_h2o_cache_scores(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(res);
    give(res, core.scores());
  });
}

int mlx_h2o_cache_rows(
    mlx_array* res_keys, mlx_array* res_values, mlx_array* res_positions, mlx_h2o_cache cache,
    const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(res_keys, res_values, res_positions);
    const auto [keys, values] = core.rows();
    const mx::array positions = core.kept();
    give(res_keys, keys);
    give(res_values, values);
    give(res_positions, positions);
  });
}

int mlx_h2o_cache_arrays(
    mlx_map_string_to_array* res, mlx_string* res_settings, mlx_h2o_cache cache,
    const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(res, res_settings);
    const auto [arrays, settings] = core.saved();
    give(res, arrays);
    give(res_settings, settings);
  });
}

int mlx_h2o_cache_restore(
    mlx_h2o_cache* res, const mlx_h2o_policy policy, const mlx_map_string_to_array arrays,
    const char* settings, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    refuse_tracing();
    check(arrays.ctx && settings, "A saved cache is arrays and settings; one is missing.");
    give(res, Core::restored(fields_of(arrays), settings, own_of(policy)));
  });
}

int mlx_h2o_cache_missing(int* res, size_t* n_spans, const mlx_h2o_cache cache) {
  return guarded([&] { give_spans(res, n_spans, of(cache).missing()); });
}

int mlx_h2o_cache_is_fused(bool* res, const mlx_h2o_cache cache) {
  return reading(res, cache, [](const Core& core) { return core.is_lent(); });
}

int mlx_h2o_cache_inner_state(mlx_vector_array* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    of(cache).check_whole();
    give(res, of(cache).newest());
  });
}

mlx_h2o_remainder mlx_h2o_remainder_new(void) {
  return {};
}

int mlx_h2o_remainder_free(mlx_h2o_remainder remainder) {
  for (mlx_array a : {remainder.count, remainder.mean_key, remainder.var_key, remainder.mean_value})
    mlx_array_free(a);
  return 0;
}

int mlx_h2o_cache_remainder(mlx_h2o_remainder* res, mlx_h2o_cache cache, const mlx_stream s) {
  return changing(cache, s, [&](Core& core) {
    wants(res);
    give(res, core.remainder());
  });
}

}  // extern "C"
