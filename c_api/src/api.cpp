// The functions of mlx_h2o.h: handles in, handles out; the work is done elsewhere.
#include "bridge.h"
#include "cache.h"

namespace mlx_h2o {

static Policy& of(mlx_h2o_policy handle) {
  check(handle.ctx, "The policy is missing: a handle is empty.");
  return *static_cast<Policy*>(handle.ctx);
}

static Cache& of(mlx_h2o_cache handle) {
  check(handle.ctx, "The cache is missing: a handle is empty.");
  return *static_cast<Cache*>(handle.ctx);
}

static Remainder of(mlx_h2o_remainder handles) {
  const Remainder remainder{
      of(handles.count), of(handles.mean_key), of(handles.var_key), of(handles.mean_value)};
  const mx::Shape& heads = remainder.count.shape();
  check(
      heads.size() == 2 && remainder.mean_key.ndim() == 3 && remainder.mean_value.ndim() == 3 &&
          remainder.mean_key.shape() == remainder.var_key.shape(),
      "A remainder is count [B, H], mean_key and var_key [B, H, D], mean_value [B, H, Dv].");
  return remainder;
}

static void give(mlx_h2o_remainder* res, const Remainder& value) {
  check(res, "A result is missing: a pointer is null.");
  give(&res->count, value.count);
  give(&res->mean_key, value.mean_key);
  give(&res->var_key, value.var_key);
  give(&res->mean_value, value.mean_value);
}

static Masking masking(const char* mode, mlx_array mask) {
  const std::string text = mode ? mode : "";
  check(
      text == "" || text == "causal" || text == "array",
      "mask_mode must be \"\", \"causal\" or \"array\"; got \"" + text + "\".");
  check(text != "causal" || !mask.ctx, "A causal mask takes no mask array.");
  check(text != "array" || mask.ctx, "mask_mode \"array\" needs a mask array.");
  return {text == "causal", maybe(mask)};
}

static Stored stored(mlx_array w, mlx_array scales, mlx_array biases, int bits, int group_size) {
  return {{of(w), of(scales), of(biases)}, bits, group_size};
}

static Slots of(const mlx_h2o_slots& slots, const Policy& policy) {
  const mx::array &keys = of(slots.keys), &values = of(slots.values);
  const mx::array &positions = of(slots.positions), &evictable = of(slots.evictable);
  const mx::array& mean = of(slots.evicted_mean_key);
  check(
      keys.ndim() == 4 && values.ndim() == 4 && positions.ndim() == 3 && mean.ndim() == 3,
      "Slots are keys [B, H, N, D], values [B, H, N, Dv], positions [B, H, N] and a mean key "
      "[B, H, D].");
  const mx::Shape rows{keys.shape(0), keys.shape(1), keys.shape(2)};
  const auto scores = maybe(slots.scores);
  check(
      positions.shape() == rows && evictable.shape() == rows &&
          (!scores || scores->shape() == rows) &&
          mean.shape() == mx::Shape{rows[0], rows[1], keys.shape(3)},
      "The arrays of these slots do not fit together.");
  check(scores || !policy.needs_attention(), "Policy " + policy.name + " needs scores.");
  return {keys,         values,    positions,     scores ? *scores : mx::zeros(rows),
          slots.offset, evictable, slots.evicted, mean};
}

// An operation that may work in place: `value` is taken out of the result's handle if it is there.
static mx::array taken(mlx_array* res, mlx_array given) {
  mx::array value = of(given);
  if (res && res->ctx == given.ctx) give(res, mx::array(0));
  return value;
}

}  // namespace mlx_h2o

using namespace mlx_h2o;

extern "C" {

// -- the library ----------------------------------------------------------------------------------

const char* mlx_h2o_version(void) {
  return MLX_H2O_VERSION;
}

const char* mlx_h2o_last_error(void) {
  return last_error().c_str();
}

int mlx_h2o_use_kernels(bool use) {
  use_kernels(use);
  return 0;
}

// -- attention ------------------------------------------------------------------------------------

int mlx_h2o_attention_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, const mlx_array q, const mlx_array k,
    const mlx_array v, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s) {
  return guarded_on(s, [&] {
    const Attended found = attend(
        of(q), {{{of(k)}}}, {{{of(v)}}}, scale, masking(mask_mode, mask_arr), maybe(sinks),
        std::nullopt, Export::logits);
    give(out, found.out);
    give(scores, *found.logits);
    give(lse, found.lse);
  });
}

int mlx_h2o_attention_with_mass(
    mlx_array* out, mlx_array* mass, mlx_array* lse, const mlx_array q, const mlx_array k,
    const mlx_array v, float scale, const char* mask_mode, const mlx_array mask_arr,
    const mlx_array sinks, const mlx_stream s) {
  return guarded_on(s, [&] {
    const Attended found = attend(
        of(q), {{{of(k)}}}, {{{of(v)}}}, scale, masking(mask_mode, mask_arr), maybe(sinks),
        std::nullopt, Export::mass);
    give(out, found.out);
    give(mass, *found.mass);
    give(lse, found.lse);
  });
}

int mlx_h2o_attention_quantized_with_scores(
    mlx_array* out, mlx_array* scores, mlx_array* lse, const mlx_array q, const mlx_array k_w,
    const mlx_array k_scales, const mlx_array k_biases, const mlx_array v_w,
    const mlx_array v_scales, const mlx_array v_biases, float scale, int k_bits, int v_bits,
    int group_size, const char* mask_mode, const mlx_array mask_arr, const mlx_array sinks,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    check(k_bits > 0 && v_bits > 0, "k_bits and v_bits must be 2, 3, 4, 5, 6 or 8.");
    Packing{k_bits, v_bits, group_size}.check_widths();
    const Attended found = attend(
        of(q), {stored(k_w, k_scales, k_biases, k_bits, group_size)},
        {stored(v_w, v_scales, v_biases, v_bits, group_size)}, scale, masking(mask_mode, mask_arr),
        maybe(sinks), std::nullopt, Export::logits);
    give(out, found.out);
    give(scores, *found.logits);
    give(lse, found.lse);
  });
}

int mlx_h2o_attention_mass(
    mlx_array* res, const mlx_array scores, const mlx_array lse, int n_kv_heads,
    const mlx_stream s) {
  return guarded_on(s, [&] { give(res, attention_mass(of(scores), of(lse), n_kv_heads)); });
}

// -- the remainder --------------------------------------------------------------------------------

mlx_h2o_remainder mlx_h2o_remainder_new(void) {
  return {};
}

int mlx_h2o_remainder_free(mlx_h2o_remainder remainder) {
  for (mlx_array a : {remainder.count, remainder.mean_key, remainder.var_key, remainder.mean_value})
    mlx_array_free(a);
  return 0;
}

int mlx_h2o_remainder_empty(
    mlx_h2o_remainder* res, int batch, int n_kv_heads, int key_width, int value_width,
    const mlx_stream s) {
  return guarded_on(
      s, [&] { give(res, Remainder::empty(batch, n_kv_heads, key_width, value_width)); });
}

int mlx_h2o_remainder_fold(
    mlx_h2o_remainder* res, const mlx_h2o_remainder remainder, const mlx_array keys,
    const mlx_array values, const mlx_array weights, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(
        of(keys).ndim() == 4 && of(values).ndim() == 4,
        "Rows are keys [B, H, M, D] and values [B, H, M, Dv].");
    give(res, of(remainder).fold(of(keys), of(values), maybe(weights)));
  });
}

int mlx_h2o_remainder_column(
    mlx_array* res, const mlx_h2o_remainder remainder, const mlx_array q, float scale,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    check(of(q).ndim() == 4, "q must be [B, Hq, L, D].");
    give(res, of(remainder).column(of(q), scale));
  });
}

int mlx_h2o_remainder_join(
    mlx_array* res_out, mlx_array* res_lse, const mlx_array out, const mlx_array lse,
    const mlx_array logits, const mlx_array values, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(
        of(out).ndim() == 4 && of(lse).ndim() == 3 && of(lse).shape() == of(logits).shape() &&
            of(values).ndim() == 3 && of(values).shape(1) > 0 &&
            of(out).shape(1) % of(values).shape(1) == 0,
        "out is [B, Hq, L, Dv], lse and logits [B, Hq, L], values [B, Hk, Dv].");
    const auto [joint_out, joint_lse] = join(of(out), of(lse), of(logits), of(values));
    give(res_out, joint_out);
    give(res_lse, joint_lse);
  });
}

int mlx_h2o_remainder_rows(
    mlx_array* keys, mlx_array* values, const mlx_h2o_remainder remainder, int rows,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    const auto [plain_keys, plain_values] = of(remainder).plain_rows(rows);
    give(keys, plain_keys);
    give(values, plain_values);
  });
}

// -- policies -------------------------------------------------------------------------------------

mlx_h2o_policy mlx_h2o_policy_new(void) {
  return {};
}

int mlx_h2o_policy_free(mlx_h2o_policy policy) {
  delete static_cast<Policy*>(policy.ctx);
  return 0;
}

int mlx_h2o_policy_named(mlx_h2o_policy* res, const char* name) {
  return guarded([&] {
    check(res && name, "A policy's result or name is missing.");
    Policy policy = Policy::named(name);
    if (res->ctx)
      of(*res) = std::move(policy);
    else
      res->ctx = new Policy(std::move(policy));
  });
}

int mlx_h2o_policy_set(mlx_h2o_policy policy, const char* setting, const char* value) {
  return guarded([&] {
    check(setting && value, "A setting is a name and a value.");
    of(policy).set(setting, value);
  });
}

int mlx_h2o_policy_needs_attention(bool* res, const mlx_h2o_policy policy) {
  return guarded([&] { *res = of(policy).needs_attention(); });
}

int mlx_h2o_policy_recent_slots(int* res, const mlx_h2o_policy policy, int budget) {
  return guarded([&] { *res = of(policy).recent_slots(budget); });
}

int mlx_h2o_accumulate(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_array scores, const mlx_array logits,
    const mlx_array lse, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(
        of(scores).ndim() == 3 && of(logits).ndim() == 4 && of(lse).ndim() == 3 &&
            of(scores).shape(2) == of(logits).shape(3),
        "scores are [B, Hk, N], logits [B, Hq, L, N], lse [B, Hq, L].");
    const Observation seen{of(logits), of(lse), of(scores).shape(1), std::nullopt, std::nullopt};
    give(res, of(policy).accumulate(of(scores), seen));
  });
}

int mlx_h2o_evictable(
    mlx_array* res, const mlx_array positions, int offset, int sink, int recent,
    const mlx_stream s) {
  return guarded_on(s, [&] { give(res, evictable_slots(of(positions), offset, sink, recent)); });
}

int mlx_h2o_priority(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots slots, const mlx_stream s) {
  return guarded_on(s, [&] { give(res, of(policy).priority(of(slots, of(policy)))); });
}

int mlx_h2o_prompt_priority(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots slots,
    const mlx_array window_mass, const mlx_stream s) {
  return guarded_on(
      s, [&] { give(res, of(policy).prompt_priority(of(slots, of(policy)), maybe(window_mass))); });
}

int mlx_h2o_select_victims(
    mlx_array* res, const mlx_array priority, const mlx_array positions, const mlx_array evictable,
    int count, bool per_layer, const mlx_stream s) {
  return guarded_on(s, [&] {
    give(res, select_victims(of(priority), of(positions), of(evictable), count, per_layer));
  });
}

int mlx_h2o_select_kept(
    mlx_array* res, const mlx_array priority, const mlx_array positions, const mlx_array evictable,
    int count, bool per_layer, const mlx_stream s) {
  return guarded_on(s, [&] {
    give(res, select_kept(of(priority), of(positions), of(evictable), count, per_layer));
  });
}

int mlx_h2o_compress_prompt(
    mlx_array* res, const mlx_h2o_policy policy, const mlx_h2o_slots slots,
    const mlx_array window_mass, int count, const mlx_stream s) {
  return guarded_on(s, [&] {
    const Slots seen = of(slots, of(policy));
    const mx::array priority = of(policy).prompt_priority(seen, maybe(window_mass));
    give(res, select_kept(priority, seen.positions, seen.evictable, count, of(policy).per_layer));
  });
}

// -- slots ----------------------------------------------------------------------------------------

int mlx_h2o_write_rows(
    mlx_array* res, const mlx_array buffer, const mlx_array index, const mlx_array rows,
    const mlx_stream s) {
  return guarded_on(s, [&] {
    check_rows_fit(of(buffer), of(index), of(rows));
    const mx::array at = of(index), fresh = of(rows);
    const mx::array written = with_rows(taken(res, buffer), at, fresh);
    give(res, written);
  });
}

int mlx_h2o_quantize_append(
    mlx_array* res_w, mlx_array* res_scales, mlx_array* res_biases, const mlx_array w,
    const mlx_array scales, const mlx_array biases, const mlx_array index, const mlx_array rows,
    int bits, int group_size, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(of(rows).ndim() == 3, "rows must be [B, M, width].");
    const Stored fresh = packed(of(rows), bits, group_size);
    const mlx_array buffers[] = {w, scales, biases};
    mlx_array* results[] = {res_w, res_scales, res_biases};
    for (int i = 0; i < 3; ++i) check_rows_fit(of(buffers[i]), of(index), fresh.arrays[i]);
    const mx::array at = of(index);
    for (int i = 0; i < 3; ++i) {
      const mx::array written = with_rows(taken(results[i], buffers[i]), at, fresh.arrays[i]);
      give(results[i], written);
    }
  });
}

// -- a layer's cache ------------------------------------------------------------------------------

mlx_h2o_cache_options mlx_h2o_cache_options_default(void) {
  return {true, true, 0, 0, 64, 0};
}

mlx_h2o_cache mlx_h2o_cache_new(void) {
  return {};
}

int mlx_h2o_cache_free(mlx_h2o_cache cache) {
  delete static_cast<Cache*>(cache.ctx);
  return 0;
}

int mlx_h2o_cache_make(
    mlx_h2o_cache* res, const mlx_h2o_policy policy, const int* budgets, size_t n_kv_heads,
    const mlx_h2o_cache_options options) {
  return guarded([&] {
    check(res && budgets, "A cache's result or budgets are missing.");
    const Packing packing{options.k_bits, options.v_bits, options.group_size, options.recent_bits};
    auto cache = std::make_unique<Cache>(
        of(policy), std::vector<int>(budgets, budgets + n_kv_heads), options.remainder,
        options.attending, packing);
    delete static_cast<Cache*>(res->ctx);
    res->ctx = cache.release();
  });
}

int mlx_h2o_cache_update_and_attend(
    mlx_array* out, mlx_h2o_cache cache, const mlx_array q, const mlx_array keys,
    const mlx_array values, float scale, const mlx_array sinks, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(out, "A result is missing: a pointer is null.");
    give(out, of(cache).update_and_attend(of(q), of(keys), of(values), scale, maybe(sinks)));
  });
}

int mlx_h2o_cache_update_and_fetch(
    mlx_array* res_keys, mlx_array* res_values, mlx_array* res_mask, mlx_h2o_cache cache,
    const mlx_array keys, const mlx_array values, const mlx_stream s) {
  return guarded_on(s, [&] {
    check(res_keys && res_values && res_mask, "A result is missing: a pointer is null.");
    Cache::Fetched fetched = of(cache).update_and_fetch(of(keys), of(values));
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
  return guarded([&] { *res = of(cache).offset(); });
}

int mlx_h2o_cache_size(int* res, const mlx_h2o_cache cache) {
  return guarded([&] { *res = of(cache).size(); });
}

int mlx_h2o_cache_evicted(int64_t* res, const mlx_h2o_cache cache) {
  return guarded([&] { *res = of(cache).evicted(); });
}

int mlx_h2o_cache_nbytes(size_t* res, const mlx_h2o_cache cache) {
  return guarded([&] { *res = of(cache).nbytes(); });
}

int mlx_h2o_cache_kept(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s) {
  return guarded_on(s, [&] { give(res, of(cache).kept()); });
}

int mlx_h2o_cache_scores(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s) {
  return guarded_on(s, [&] { give(res, of(cache).scores()); });
}

int mlx_h2o_cache_remainder(mlx_h2o_remainder* res, mlx_h2o_cache cache, const mlx_stream s) {
  return guarded_on(s, [&] { give(res, of(cache).remainder()); });
}

}  // extern "C"
