// What no golden case shows: errors, slots, memory.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replays.h"

int check_errors(const Replay* r) {
  int failures = 0;
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  const int budgets[] = {12, 12}, few[] = {3, 3};
  const int shape[] = {1, 2, 4, 32}, other[] = {1, 2, 4, 16};
  mlx_array rows = kNone, narrow = kNone, out = kNone;
  TRY(mlx_zeros(&rows, shape, 4, MLX_FLOAT32, r->s));
  TRY(mlx_zeros(&narrow, other, 4, MLX_FLOAT32, r->s));
  const mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
#define MUST_FAIL(call)                                                 \
  if (!(call) || !*mlx_h2o_last_error()) {                              \
    fprintf(stderr, "replay: %s did not fail with a message\n", #call); \
    ++failures;                                                         \
  }
  MUST_FAIL(mlx_h2o_policy_named(&policy, "unheard-of"));
  MUST_FAIL(mlx_h2o_policy_set(policy, "sink", "1"));
  TRY(mlx_h2o_policy_named(&policy, "h2o"));
  MUST_FAIL(mlx_h2o_policy_set(policy, "decay", "0.5"));
  MUST_FAIL(mlx_h2o_policy_set(policy, "sink", "four"));
  MUST_FAIL(mlx_h2o_policy_set(policy, "pool", "4"));
  MUST_FAIL(mlx_h2o_cache_make(&cache, policy, few, 2, &options));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(
      &out, cache, rows, rows, rows, 1, "causal", kNone, kNone, r->s));
  TRY(mlx_h2o_cache_make(&cache, policy, budgets, 2, &options));
  MUST_FAIL(mlx_h2o_cache_kept(&out, cache, r->s));
  TRY(mlx_h2o_cache_update_and_attend(
      &out, cache, rows, rows, rows, 1, "causal", kNone, kNone, r->s));
  MUST_FAIL(mlx_h2o_cache_update_and_fetch(&out, &out, &out, cache, rows, rows, r->s));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(
      &out, cache, narrow, narrow, narrow, 1, "causal", kNone, kNone, r->s));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(
      &out, cache, rows, rows, rows, 1, "causal", kNone, rows, r->s));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(
      &out, cache, rows, rows, kNone, 1, "causal", kNone, kNone, r->s));
  MUST_FAIL(mlx_h2o_attention_with_scores(
      &out, &out, &out, rows, narrow, rows, 1, "", kNone, kNone, r->s));
  MUST_FAIL(mlx_h2o_attention_with_scores(
      &out, &out, &out, rows, rows, rows, 1, "upside down", kNone, kNone, r->s));
#undef MUST_FAIL
  int offset;
  TRY(mlx_h2o_cache_offset(&offset, cache));
  if (offset != 4) ++failures, fprintf(stderr, "replay: a failed call moved the offset\n");
  mlx_array_free(rows), mlx_array_free(narrow), mlx_array_free(out);
  mlx_h2o_policy_free(policy);
  mlx_h2o_cache_free(cache);
  return failures;
}

int check_write_rows(const Replay* r) {
  const int shape[] = {2, 4, 3}, index_shape[] = {2, 2}, rows_shape[] = {2, 2, 3};
  const int32_t index[] = {3, 0, 1, 2};
  const float rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const float want[] = {4, 5, 6, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0, 0};
  mlx_array buffer = kNone, at = mlx_array_new_data(index, index_shape, 2, MLX_INT32);
  mlx_array fresh = mlx_array_new_data(rows, rows_shape, 3, MLX_FLOAT32);
  TRY(mlx_zeros(&buffer, shape, 3, MLX_FLOAT32, r->s));
  TRY(mlx_h2o_write_rows(&buffer, buffer, at, fresh, r->s));
  float* got = floats_of(r, buffer);
  const int failed = memcmp(got, want, sizeof want) != 0;
  if (failed) fprintf(stderr, "replay: mlx_h2o_write_rows wrote elsewhere\n");
  free(got);
  mlx_array_free(buffer), mlx_array_free(at), mlx_array_free(fresh);
  return failed;
}

int check_flat_memory(const Replay* r, int steps) {
  enum { Hq = 4, Hk = 2, D = 32, SETTLED = 500 };
  const int budgets[] = {40, 100}, q_shape[] = {1, Hq, 1, D}, k_shape[] = {1, Hk, 1, D};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  TRY(mlx_h2o_policy_named(&policy, "distinct"));
  TRY(mlx_h2o_cache_make(&cache, policy, budgets, Hk, NULL));
  float numbers[(Hq + 2 * Hk) * D];
  size_t settled = 0, now = 0, settled_bytes = 0, bytes = 0;
  for (int step = 0; step < steps; ++step) {
    fill_numbers(numbers, sizeof numbers / sizeof *numbers, (uint64_t)step << 20, 0);
    mlx_array q = array_of(r, numbers, q_shape, 4, MLX_FLOAT32), out = kNone;
    mlx_array k = array_of(r, numbers + Hq * D, k_shape, 4, MLX_FLOAT32);
    mlx_array v = array_of(r, numbers + (Hq + Hk) * D, k_shape, 4, MLX_FLOAT32);
    TRY(mlx_h2o_cache_update_and_attend(
        &out, cache, q, k, v, 0.1875f, "causal", kNone, kNone, r->s));
    TRY(mlx_array_eval(out));
    mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
    TRY(mlx_get_active_memory(&now));
    TRY(mlx_h2o_cache_nbytes(&bytes, cache));
    if (step < SETTLED)
      settled = now > settled ? now : settled, settled_bytes = bytes;
    else if (now > settled || bytes != settled_bytes)
      break;
  }
  int offset;
  TRY(mlx_h2o_cache_offset(&offset, cache));
  const bool flat = offset == steps && bytes == settled_bytes;
  printf(
      "%d steps: %zu bytes in use at most, %zu of them the cache's%s\n", offset, settled, bytes,
      flat ? "" : ", and then it grew");
  mlx_h2o_policy_free(policy);
  mlx_h2o_cache_free(cache);
  return !flat;
}
