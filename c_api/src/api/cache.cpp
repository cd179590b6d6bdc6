// mlx_h2o.h: a layer's cache.
#include "handles.h"

namespace mlx_h2o {

// More KV heads than any model has: a number that went wrong, as -1 does.
constexpr size_t kMostHeads = 1 << 16;
constexpr size_t kMostSpans = 1 << 16;
// Tokens double from stage to stage.
constexpr size_t kMostStages = 64;

namespace {

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

std::vector<Stage> filling_of(const mlx_h2o_cache_options& options, int heads) {
  check(
      options.n_stages <= kMostStages && (options.filling || !options.n_stages),
      "filling has at most " + std::to_string(kMostStages) + " stages; got " +
          std::to_string(options.n_stages) + (options.filling ? "." : " and a null pointer."));
  std::vector<Stage> stages;
  for (size_t i = 0; i < options.n_stages; ++i) {
    const int* stage = options.filling + i * (1 + heads);
    stages.push_back({stage[0], {stage + 1, stage + 1 + heads}});
  }
  return stages;
}

}  // namespace

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

mlx_h2o_cache_options mlx_h2o_cache_options_default(void) {
  mlx_h2o_cache_options options = {};
  options.remainder = options.attending = true;
  options.group_size = 64;
  return options;
}

mlx_h2o_cache mlx_h2o_cache_new(void) {
  return {};
}

int mlx_h2o_cache_free(mlx_h2o_cache cache) {
  delete static_cast<Core*>(cache.ctx);
  return 0;
}

int mlx_h2o_cache_make(
    mlx_h2o_cache* res, const mlx_h2o_policy policy, const int* budgets, size_t n_kv_heads,
    const mlx_h2o_cache_options options) {
  return guarded([&] {
    wants(res);
    check(
        budgets && n_kv_heads > 0 && n_kv_heads <= kMostHeads,
        "A cache needs budgets for 1 to " + std::to_string(kMostHeads) + " KV heads.");
    CacheSettings settings;
    settings.policy = of(policy);
    settings.budgets.assign(budgets, budgets + n_kv_heads);
    settings.remainder = options.remainder;
    settings.attending = options.attending;
    settings.packing = {options.k_bits, options.v_bits, options.group_size, options.recent_bits};
    settings.undo = options.undo;
    settings.saturations = saturations_of(options.saturation, settings.heads());
    settings.frame = frame_of(options, settings.heads());
    settings.filling = filling_of(options, settings.heads());
    auto cache = std::make_unique<Core>(std::move(settings));
    delete static_cast<Core*>(res->ctx);
    res->ctx = cache.release();
  });
}

int mlx_h2o_cache_update_and_attend(
    mlx_array* out, mlx_h2o_cache cache, const mlx_array q, const mlx_array keys,
    const mlx_array values, float scale, const mlx_array sinks, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(out);
    check_scale(scale);
    const AttentionCall call{of(q), scale, maybe(sinks)};
    give(out, changed(cache).update_and_attend(call, of(keys), of(values)));
  });
}

int mlx_h2o_cache_update_and_fetch(
    mlx_array* res_keys, mlx_array* res_values, mlx_array* res_mask, mlx_h2o_cache cache,
    const mlx_array keys, const mlx_array values, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res_keys, res_values, res_mask);
    Core::Fetched fetched = changed(cache).update_and_fetch(of(keys), of(values));
    give(res_keys, fetched.keys);
    give(res_values, fetched.values);
    if (fetched.mask) {
      give(res_mask, *fetched.mask);
    } else {
      mlx_array_free(*res_mask);
      *res_mask = mlx_array_new();
    }
  });
}

int mlx_h2o_cache_offset(int* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    *res = of(cache).offset();
  });
}

int mlx_h2o_cache_size(int* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    *res = of(cache).size();
  });
}

int mlx_h2o_cache_evicted(int64_t* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    *res = of(cache).evicted();
  });
}

int mlx_h2o_cache_nbytes(size_t* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    *res = of(cache).nbytes();
  });
}

int mlx_h2o_cache_trimmable(int* res, const mlx_h2o_cache cache) {
  return guarded([&] {
    wants(res);
    *res = of(cache).trimmable();
  });
}

int mlx_h2o_cache_trim(mlx_h2o_cache cache, int n, const mlx_stream s) {
  return guarded_on(s, [&] { changed(cache).trim(n); });
}

int mlx_h2o_cache_copy(mlx_h2o_cache* res, mlx_h2o_cache cache, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    auto copy = changed(cache).copied();
    delete static_cast<Core*>(res->ctx);
    res->ctx = copy.release();
  });
}

int mlx_h2o_cache_resize(
    mlx_h2o_cache cache, const int* budgets, size_t n_kv_heads, const mlx_stream s) {
  return guarded_on(s, [&] {
    Core& resized = changed(cache);
    check(
        budgets && n_kv_heads == resized.heads(),
        "This cache needs budgets for " + std::to_string(resized.heads()) + " KV heads; got " +
            std::to_string(n_kv_heads) + (budgets ? "." : " and a null pointer."));
    resized.resize({budgets, budgets + n_kv_heads});
  });
}

int mlx_h2o_cache_pin(
    int* res_missing, mlx_h2o_cache cache, const int* spans, size_t n_spans, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(spans && n_spans > 0 && n_spans <= kMostSpans, "Pins are 1 to 65536 spans.");
    Spans pins;
    for (size_t i = 0; i < n_spans; ++i) {
      const int first = spans[2 * i], end = spans[2 * i + 1];
      check(
          first >= 0 && first < end && end <= kMostTokens,
          "A span is a first position and one past the last, above it; got " +
              std::to_string(first) + " and " + std::to_string(end) + ".");
      pins.emplace_back(first, end);
    }
    const int missing = changed(cache).pin(std::move(pins));
    if (res_missing) *res_missing = missing;
  });
}

int mlx_h2o_cache_unpin(mlx_h2o_cache cache, const mlx_stream s) {
  return guarded_on(s, [&] { changed(cache).unpin(); });
}

int mlx_h2o_cache_new_turn(mlx_h2o_cache cache, double carry, const mlx_stream s) {
  return guarded_on(s, [&] { changed(cache).new_turn(carry); });
}

int mlx_h2o_cache_kept(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    give(res, changed(cache).kept());
  });
}

int mlx_h2o_cache_scores(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s) {
  return guarded_on(s, [&] {
    wants(res);
    give(res, changed(cache).scores());
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
  return guarded_on(s, [&] {
    wants(res);
    give(res, changed(cache).remainder());
  });
}

}  // extern "C"
