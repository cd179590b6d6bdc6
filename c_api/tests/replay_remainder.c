// The remainder: fold, column, join, plain rows.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replays.h"

static void expect_remainder(Replay* r, const char* prefix, mlx_h2o_remainder got) {
  const char* const names[] = {"count", "mean_key", "var_key", "mean_value"};
  const mlx_array arrays[] = {got.count, got.mean_key, got.var_key, got.mean_value};
  for (int i = 0; i < 4; ++i) {
    char name[32];
    snprintf(name, sizeof name, "%s%s", prefix, names[i]);
    expect(r, name, arrays[i]);
  }
}

static void replay_fold(Replay* r) {
  Case* c = r->c;
  const int B = int_of(c, "batch"), H = int_of(c, "kv_heads");
  const int D = int_of(c, "key_width"), Dv = int_of(c, "value_width"), power = int_of(c, "power");
  const bool weighted = flag_of(c, "weighted");
  size_t folds;
  int *counts = ints_of(c, "rows", &folds), T = 0;
  for (size_t i = 0; i < folds; ++i) T += counts[i];
  const size_t rows = (size_t)B * H * T;
  float* keys = numbers_of(c, K, 0, rows * D, power);
  float* values = numbers_of(c, V, 0, rows * Dv, power);
  float* weights = malloc(rows * sizeof *weights);
  for (size_t i = 0; i < rows; ++i)
    weights[i] = hashed(seed_of(int_of(c, "seed"), WEIGHT, 0), i) >> 63 ? 1 : 0;
  mlx_h2o_remainder remainder = mlx_h2o_remainder_new();
  TRY(mlx_h2o_remainder_empty(&remainder, B, H, D, Dv, r->s));
  for (size_t i = 0, first = 0; i < folds; first += counts[i++]) {
    mlx_array k = rows_of(r, keys, B, H, T, D, (int)first, counts[i]);
    mlx_array v = rows_of(r, values, B, H, T, Dv, (int)first, counts[i]);
    mlx_array w = weighted ? rows_of(r, weights, B, H, T, 1, (int)first, counts[i]) : kNone;
    TRY(mlx_h2o_remainder_fold(&remainder, remainder, k, v, w, r->s));
    mlx_array_free(k), mlx_array_free(v), mlx_array_free(w);
  }
  expect_remainder(r, "", remainder);
  mlx_h2o_remainder_free(remainder);
  free(counts), free(keys), free(values), free(weights);
}

// The statistics that column and rows are asked with.
static mlx_h2o_remainder statistics(Replay* r, float count, int variance_power) {
  Case* c = r->c;
  const int B = int_of(c, "batch"), H = int_of(c, "kv_heads");
  const int k_shape[] = {B, H, int_of(c, "key_width")};
  const int v_shape[] = {B, H, int_of(c, "value_width")};
  float* counts = malloc((size_t)B * H * sizeof *counts);
  for (int i = 0; i < B * H; ++i) counts[i] = count;
  const size_t size = size_of(k_shape, 3);
  float* variance = numbers_of(c, VARIANCE, 0, size, 0);
  for (size_t i = 0; i < size; ++i) variance[i] = ldexpf(variance[i] * variance[i], variance_power);
  const mlx_h2o_remainder made = {
      array_of(r, counts, k_shape, 2, MLX_FLOAT32), tensor(r, MEAN_KEY, k_shape, 3, MLX_FLOAT32, 0),
      array_of(r, variance, k_shape, 3, MLX_FLOAT32),
      tensor(r, MEAN_VALUE, v_shape, 3, MLX_FLOAT32, 0)};
  free(counts), free(variance);
  return made;
}

static void replay_column(Replay* r) {
  Case* c = r->c;
  mlx_h2o_remainder remainder =
      statistics(r, (float)int_of(c, "count"), int_of(c, "variance_power"));
  const int shape[] = {
      int_of(c, "batch"), int_of(c, "query_heads"), int_of(c, "queries"), int_of(c, "key_width")};
  mlx_array q = tensor(r, Q, shape, 4, MLX_FLOAT32, int_of(c, "q_power")), logit = kNone;
  float* saturation = NULL;
  if (text_or_null(c, "saturation"))
    saturation = fractions_of(c, "saturation", (size_t)int_of(c, "kv_heads"));
  TRY(mlx_h2o_remainder_column(
      &logit, remainder, q, (float)number_of(c, "scale"), saturation, r->s));
  free(saturation);
  expect(r, "logit", logit);
  mlx_array_free(q), mlx_array_free(logit);
  mlx_h2o_remainder_free(remainder);
}

static mlx_array logits_of(Replay* r, enum Which which, const char* kind, const int* shape) {
  const size_t size = size_of(shape, 3);
  float* numbers = numbers_of(r->c, which, 0, size, 0);
  for (size_t i = 0; i < size; ++i) {
    if (!strcmp(kind, "nothing")) numbers[i] = -INFINITY;
    if (!strcmp(kind, "far above")) numbers[i] += 200;
  }
  mlx_array made = array_of(r, numbers, shape, 3, MLX_FLOAT32);
  free(numbers);
  return made;
}

static void replay_join(Replay* r) {
  Case* c = r->c;
  const int B = int_of(c, "batch"), Dv = int_of(c, "value_width");
  const int shape[] = {B, int_of(c, "query_heads"), int_of(c, "queries"), Dv};
  const int v_shape[] = {B, int_of(c, "kv_heads"), Dv};
  const char* lse_kind = text_of(c, "lse");
  const mlx_dtype dtype = dtype_of(text_of(c, "dtype"));
  int_of(c, "key_width");  // of a case, but not of this question
  mlx_array out = kNone;
  if (strcmp(lse_kind, "nothing"))
    out = tensor(r, V, shape, 4, dtype, 0);
  else
    TRY(mlx_zeros(&out, shape, 4, dtype, r->s));
  mlx_array lse = logits_of(r, LSE, lse_kind, shape);
  mlx_array logit = logits_of(r, LOGIT, text_of(c, "logit"), shape);
  mlx_array values = tensor(r, MEAN_VALUE, v_shape, 3, MLX_FLOAT32, 0);
  TRY(mlx_h2o_remainder_join(&out, &lse, out, lse, logit, values, r->s));
  expect(r, "out", out);
  expect(r, "lse", lse);
  mlx_array_free(out), mlx_array_free(lse), mlx_array_free(logit), mlx_array_free(values);
}

static void replay_rows(Replay* r) {
  mlx_h2o_remainder remainder = statistics(r, 40, 0);
  mlx_array keys = kNone, values = kNone;
  TRY(mlx_h2o_remainder_rows(&keys, &values, remainder, int_of(r->c, "rows"), r->s));
  expect(r, "keys", keys);
  expect(r, "values", values);
  mlx_array_free(keys), mlx_array_free(values);
  mlx_h2o_remainder_free(remainder);
}

void replay_remainder(Replay* r) {
  const char* kind = text_of(r->c, "kind");
  if (!strcmp(kind, "fold"))
    replay_fold(r);
  else if (!strcmp(kind, "column"))
    replay_column(r);
  else if (!strcmp(kind, "join"))
    replay_join(r);
  else if (!strcmp(kind, "rows"))
    replay_rows(r);
  else
    differs(r, kind, "is an unknown kind");
}
