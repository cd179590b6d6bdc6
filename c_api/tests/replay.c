// Replays golden vectors through the C API: replay GOLDEN [--group NAME] [--plain] [--steps N]
//
// --group replays one group only; --plain computes without the CPU kernels; --steps N decodes N
// tokens afterwards and fails if memory grows. Ends with 0 if all agree, 1 if something differs, 2
// if it could not be tried.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compare.h"
#include "numbers.h"

static const mlx_array kNone = {NULL};

static size_t size_of(const int* shape, int rank) {
  size_t size = 1;
  for (int i = 0; i < rank; ++i) size *= (size_t)shape[i];
  return size;
}

static float* numbers_of(Case* c, enum Which which, int layer, size_t n, int power) {
  float* numbers = malloc((n ? n : 1) * sizeof *numbers);
  if (!numbers) exit(2);
  fill_numbers(numbers, n, seed_of(int_of(c, "seed"), which, layer), power);
  return numbers;
}

static mlx_dtype dtype_of(const char* name) {
  if (!strcmp(name, "float16")) return MLX_FLOAT16;
  return strcmp(name, "bfloat16") ? MLX_FLOAT32 : MLX_BFLOAT16;
}

static mlx_array array_of(
    const Replay* r, const float* data, const int* shape, int rank, mlx_dtype dtype) {
  mlx_array exact = mlx_array_new_data(data, shape, rank, MLX_FLOAT32), cast = mlx_array_new();
  TRY(mlx_astype(&cast, exact, dtype, r->s));
  mlx_array_free(exact);
  return cast;
}

// A generated tensor of the case.
static mlx_array tensor(
    const Replay* r, enum Which which, const int* shape, int rank, mlx_dtype dtype, int power) {
  float* numbers = numbers_of(r->c, which, 0, size_of(shape, rank), power);
  mlx_array made = array_of(r, numbers, shape, rank, dtype);
  free(numbers);
  return made;
}

static mlx_h2o_policy policy_of(Case* c) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  TRY(mlx_h2o_policy_named(&policy, text_of(c, "policy.name")));
  for (size_t p = 0; p < c->count; ++p) {
    Parameter* parameter = &c->parameters[p];
    if (strncmp(parameter->name, "policy.", 7) || !strcmp(parameter->name, "policy.name")) continue;
    parameter->read = true;
    TRY(mlx_h2o_policy_set(policy, parameter->name + 7, parameter->value));
  }
  return policy;
}

// -- attention, quantized
// --------------------------------------------------------------------------

// What both kinds of attention cases have.
typedef struct Operands_ {
  int B, Hq, Hk, L, N, D, Dv;
  mlx_dtype dtype;
  const char* mask;
  float scale;
  mlx_array q, sinks;
} Operands;

static Operands operands_of(const Replay* r) {
  Case* c = r->c;
  Operands o = {
      int_of(c, "batch"),
      int_of(c, "query_heads"),
      int_of(c, "kv_heads"),
      int_of(c, "queries"),
      int_of(c, "keys"),
      int_of(c, "key_width"),
      int_of(c, "value_width"),
      dtype_of(text_of(c, "dtype")),
      text_of(c, "mask"),
      (float)number_of(c, "scale"),
      {NULL},
      {NULL}};
  const int q_shape[] = {o.B, o.Hq, o.L, o.D};
  o.q = tensor(r, Q, q_shape, 4, o.dtype, 0);
  if (flag_of(c, "sinks")) o.sinks = tensor(r, SINKS, &o.Hq, 1, MLX_FLOAT32, 0);
  return o;
}

static void replay_attention(Replay* r) {
  Operands o = operands_of(r);
  const int k_shape[] = {o.B, o.Hk, o.N, o.D}, v_shape[] = {o.B, o.Hk, o.N, o.Dv};
  mlx_array k = tensor(r, K, k_shape, 4, o.dtype, 0), v = tensor(r, V, v_shape, 4, o.dtype, 0);
  mlx_array mask = golden(r, "in", "mask");
  const char* mode = mask.ctx ? "array" : strcmp(o.mask, "causal") ? "" : "causal";
  mlx_array out = kNone, scores = kNone, lse = kNone, mass = kNone;
  TRY(mlx_h2o_attention_with_scores(
      &out, &scores, &lse, o.q, k, v, o.scale, mode, mask, o.sinks, r->s));
  TRY(mlx_h2o_attention_mass(&mass, scores, lse, o.Hk, r->s));
  expect(r, "out", out);
  expect(r, "scores", scores);
  expect(r, "lse", lse);
  expect(r, "mass", mass);
  // The other form, into handles that hold something already.
  TRY(mlx_h2o_attention_with_mass(
      &out, &mass, &lse, o.q, k, v, o.scale, mode, mask, o.sinks, r->s));
  expect(r, "out", out);
  expect(r, "lse", lse);
  expect(r, "mass", mass);
  const mlx_array all[] = {out, scores, lse, mass, mask, k, v, o.q, o.sinks};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) mlx_array_free(all[i]);
}

// Packing the generated rows gives the stored words, scales and biases.
static void replay_packing(
    Replay* r, const Operands* o, const char* field, enum Which which, int width, int bits,
    int group_size) {
  const int rows = o->B * o->Hk * o->N;
  const int shape[] = {1, rows, width}, w_shape[] = {1, rows, width * bits / 32};
  const int s_shape[] = {1, rows, width / group_size}, index_shape[] = {1, rows};
  mlx_array given = tensor(r, which, shape, 3, o->dtype, 0);
  mlx_array w = kNone, scales = kNone, biases = kNone;
  TRY(mlx_zeros(&w, w_shape, 3, MLX_UINT32, r->s));
  TRY(mlx_zeros(&scales, s_shape, 3, o->dtype, r->s));
  TRY(mlx_zeros(&biases, s_shape, 3, o->dtype, r->s));
  int* order = malloc((size_t)rows * sizeof *order);
  for (int i = 0; i < rows; ++i) order[i] = i;
  mlx_array index = mlx_array_new_data(order, index_shape, 2, MLX_INT32);
  TRY(mlx_h2o_quantize_append(
      &w, &scales, &biases, w, scales, biases, index, given, bits, group_size, r->s));
  const mlx_array got[] = {w, scales, biases};
  for (int i = 0; i < 3; ++i) {
    char name[8];
    snprintf(name, sizeof name, "%s_%c", field, "wsb"[i]);
    mlx_array want = golden(r, "in", name);
    if (!want.ctx || mlx_array_size(want) != mlx_array_size(got[i])) {
      differs(r, name, "has another size");
    } else {
      const size_t bytes = mlx_array_size(want) * 4;
      void* a = i ? (void*)floats_of(r, got[i]) : (void*)int32s_of(r, got[i]);
      void* b = i ? (void*)floats_of(r, want) : (void*)int32s_of(r, want);
      if (memcmp(a, b, bytes)) differs(r, name, "is packed differently");
      free(a), free(b);
    }
    mlx_array_free(want);
    mlx_array_free(got[i]);
  }
  free(order);
  mlx_array_free(index);
  mlx_array_free(given);
}

static void replay_quantized(Replay* r) {
  Operands o = operands_of(r);
  const int k_bits = int_of(r->c, "k_bits"), v_bits = int_of(r->c, "v_bits");
  const int group_size = int_of(r->c, "group_size");
  const char* const names[] = {"k_w", "k_s", "k_b", "v_w", "v_s", "v_b"};
  mlx_array in[6];
  for (int i = 0; i < 6; ++i) in[i] = golden(r, "in", names[i]);
  mlx_array out = kNone, scores = kNone, lse = kNone;
  TRY(mlx_h2o_attention_quantized_with_scores(
      &out, &scores, &lse, o.q, in[0], in[1], in[2], in[3], in[4], in[5], o.scale, k_bits, v_bits,
      group_size, strcmp(o.mask, "causal") ? "" : "causal", kNone, o.sinks, r->s));
  expect(r, "out", out);
  expect(r, "scores", scores);
  expect(r, "lse", lse);
  replay_packing(r, &o, "k", K, o.D, k_bits, group_size);
  replay_packing(r, &o, "v", V, o.Dv, v_bits, group_size);
  for (int i = 0; i < 6; ++i) mlx_array_free(in[i]);
  const mlx_array all[] = {out, scores, lse, o.q, o.sinks};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) mlx_array_free(all[i]);
}

// -- the remainder --------------------------------------------------------------------------------

static void expect_remainder(Replay* r, const char* prefix, mlx_h2o_remainder got) {
  const char* const names[] = {"count", "mean_key", "var_key", "mean_value"};
  const mlx_array arrays[] = {got.count, got.mean_key, got.var_key, got.mean_value};
  for (int i = 0; i < 4; ++i) {
    char name[32];
    snprintf(name, sizeof name, "%s%s", prefix, names[i]);
    expect(r, name, arrays[i]);
  }
}

// Rows first to first + count - 1 of data [batch, rows, width].
static mlx_array rows_of(
    const Replay* r, const float* data, int batch, int heads, int rows, int width, int first,
    int count) {
  const int shape[] = {batch, heads, count, width};
  float* part = malloc(size_of(shape, 4) * sizeof *part);
  if (!part) exit(2);
  for (int i = 0; i < batch * heads; ++i)
    memcpy(
        part + (size_t)i * count * width, data + ((size_t)i * rows + first) * width,
        (size_t)count * width * sizeof *part);
  mlx_array made = array_of(r, part, shape, width == 1 ? 3 : 4, MLX_FLOAT32);
  free(part);
  return made;
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
  TRY(mlx_h2o_remainder_column(&logit, remainder, q, (float)number_of(c, "scale"), r->s));
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

static void replay_remainder(Replay* r) {
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

// -- policies -------------------------------------------------------------------------------------

static void replay_accumulate(Replay* r) {
  // They describe how the stored inputs were made.
  const char* const made_with[] = {"seed", "batch",     "query_heads", "kv_heads", "queries",
                                   "keys", "key_width", "scale",       "sinks"};
  for (size_t i = 0; i < sizeof made_with / sizeof *made_with; ++i) text_of(r->c, made_with[i]);
  mlx_h2o_policy policy = policy_of(r->c);
  mlx_array scores = golden(r, "in", "scores"), logits = golden(r, "in", "logits");
  mlx_array lse = golden(r, "in", "lse"), after = kNone;
  TRY(mlx_h2o_accumulate(&after, policy, scores, logits, lse, r->s));
  expect(r, "scores", after);
  mlx_array_free(scores), mlx_array_free(logits), mlx_array_free(lse), mlx_array_free(after);
  mlx_h2o_policy_free(policy);
}

static void replay_selection(Replay* r) {
  Case* c = r->c;
  const char* kind = text_of(c, "kind");
  const int B = int_of(c, "batch"), H = int_of(c, "kv_heads"), N = int_of(c, "slots");
  const int D = int_of(c, "key_width"), Dv = int_of(c, "value_width");
  const int count = int_of(c, "count"), evicted = int_of(c, "evicted");
  const int k_shape[] = {B, H, N, D}, v_shape[] = {B, H, N, Dv}, mean_shape[] = {B, H, D};
  const bool per_layer = !strcmp(text_of(c, "policy.unit"), "layer");
  text_or_null(c, "scores");  // how the stored ones were made
  mlx_h2o_policy policy = policy_of(c);
  int recent;
  TRY(mlx_h2o_policy_recent_slots(&recent, policy, N));
  mlx_h2o_slots slots = {
      tensor(r, K, k_shape, 4, MLX_FLOAT32, 0),
      tensor(r, V, v_shape, 4, MLX_FLOAT32, 0),
      golden(r, "in", "positions"),
      golden(r, "in", "scores"),
      mlx_array_new(),
      tensor(r, MEAN_KEY, mean_shape, 3, MLX_FLOAT32, 0),
      N + evicted,
      evicted};
  TRY(mlx_h2o_evictable(
      &slots.evictable, slots.positions, slots.offset, int_of(c, "policy.sink"), recent, r->s));
  mlx_array priority = kNone, chosen = kNone, mass = golden(r, "in", "window_mass");
  if (!strcmp(kind, "kept")) {
    TRY(mlx_h2o_prompt_priority(&priority, policy, slots, mass, r->s));
    expect(r, "priority", priority);
    TRY(mlx_h2o_select_kept(
        &chosen, priority, slots.positions, slots.evictable, count, per_layer, r->s));
    expect(r, "kept", chosen);
    TRY(mlx_h2o_compress_prompt(&chosen, policy, slots, mass, count, r->s));
    expect(r, "kept", chosen);
  } else {
    if (strcmp(kind, "extremes")) {
      TRY(mlx_h2o_priority(&priority, policy, slots, r->s));
      expect(r, "priority", priority);
    } else {
      priority = golden(r, "in", "priority");
    }
    TRY(mlx_h2o_select_victims(
        &chosen, priority, slots.positions, slots.evictable, count, per_layer, r->s));
    expect(r, "victims", chosen);
  }
  const mlx_array all[] = {slots.keys,   slots.values,    slots.positions,
                           slots.scores, slots.evictable, slots.evicted_mean_key,
                           priority,     chosen,          mass};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) mlx_array_free(all[i]);
  mlx_h2o_policy_free(policy);
}

// -- trajectories ---------------------------------------------------------------------------------

// A layer's stream and cache.
typedef struct Layer_ {
  mlx_h2o_cache cache;
  float *q, *k, *v;
  mlx_array sinks;
} Layer;

typedef struct Trajectory_ {
  int B, Hq, Hk, D, Dv, T, layers, most;
  float scale;
  Layer* of;
} Trajectory;

static Trajectory trajectory_of(const Replay* r) {
  Case* c = r->c;
  Trajectory t = {
      .B = int_of(c, "batch"),
      .Hq = int_of(c, "query_heads"),
      .Hk = int_of(c, "kv_heads"),
      .D = int_of(c, "key_width"),
      .Dv = int_of(c, "value_width"),
      .scale = (float)number_of(c, "scale")};
  size_t calls, slots;
  int *lengths = ints_of(c, "calls", &calls), *budgets = ints_of(c, "cache.budgets", &slots);
  for (size_t i = 0; i < calls; i += 2) t.T += lengths[i] * lengths[i + 1];
  for (size_t i = 0; i < slots; ++i)
    if (budgets[i] > t.most) t.most = budgets[i];
  t.layers = (int)slots / t.Hk;
  t.of = calloc((size_t)t.layers, sizeof *t.of);
  mlx_h2o_policy policy = policy_of(c);
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.remainder = flag_of(c, "cache.remainder");
  if (text_or_null(c, "cache.bits")) options.k_bits = options.v_bits = int_of(c, "cache.bits");
  if (text_or_null(c, "cache.k_bits")) options.k_bits = int_of(c, "cache.k_bits");
  if (text_or_null(c, "cache.v_bits")) options.v_bits = int_of(c, "cache.v_bits");
  if (text_or_null(c, "cache.group_size")) options.group_size = int_of(c, "cache.group_size");
  if (text_or_null(c, "cache.recent_bits")) options.recent_bits = int_of(c, "cache.recent_bits");
  const bool sinks = flag_of(c, "sinks");
  for (int l = 0; l < t.layers; ++l) {
    Layer* layer = &t.of[l];
    layer->cache = mlx_h2o_cache_new();
    TRY(mlx_h2o_cache_make(
        &layer->cache, policy, budgets + (size_t)l * t.Hk, (size_t)t.Hk, options));
    const size_t rows = (size_t)t.B * t.T;
    layer->q = numbers_of(c, Q, l, rows * t.Hq * t.D, 0);
    layer->k = numbers_of(c, K, l, rows * t.Hk * t.D, 0);
    layer->v = numbers_of(c, V, l, rows * t.Hk * t.Dv, 0);
    if (sinks) {
      float* numbers = numbers_of(c, SINKS, l, (size_t)t.Hq, 0);
      layer->sinks = array_of(r, numbers, &t.Hq, 1, MLX_FLOAT32);
      free(numbers);
    }
  }
  mlx_h2o_policy_free(policy);
  free(lengths), free(budgets);
  return t;
}

static void trajectory_free(Trajectory t) {
  for (int l = 0; l < t.layers; ++l) {
    mlx_h2o_cache_free(t.of[l].cache);
    mlx_array_free(t.of[l].sinks);
    free(t.of[l].q), free(t.of[l].k), free(t.of[l].v);
  }
  free(t.of);
}

// One call of a layer's attention: the next L tokens of its stream.
static float* call(const Replay* r, const Trajectory* t, Layer* layer, int L) {
  int first;
  TRY(mlx_h2o_cache_offset(&first, layer->cache));
  mlx_array q = rows_of(r, layer->q, t->B, t->Hq, t->T, t->D, first, L);
  mlx_array k = rows_of(r, layer->k, t->B, t->Hk, t->T, t->D, first, L);
  mlx_array v = rows_of(r, layer->v, t->B, t->Hk, t->T, t->Dv, first, L), out = kNone;
  TRY(mlx_h2o_cache_update_and_attend(&out, layer->cache, q, k, v, t->scale, layer->sinks, r->s));
  float* numbers = floats_of(r, out);
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  return numbers;
}

static bool contains(const int* numbers, size_t count, int wanted) {
  for (size_t i = 0; i < count; ++i)
    if (numbers[i] == wanted) return true;
  return false;
}

// Copies rows of `from` numbers into rows of `to`, which is at least as much.
static void widen(void* to, size_t to_width, const void* from, size_t from_width, size_t rows) {
  for (size_t i = 0; i < rows; ++i)
    memcpy((char*)to + i * to_width * 4, (const char*)from + i * from_width * 4, from_width * 4);
}

static void replay_trajectory(Replay* r) {
  Case* c = r->c;
  Trajectory t = trajectory_of(r);
  size_t calls, recorded, chunks;
  int* lengths = ints_of(c, "calls", &calls);
  int *records = ints_of(c, "recorded", &recorded), *whole = ints_of(c, "chunks", &chunks);
  const size_t heads = (size_t)t.B * t.Hk, queries = (size_t)t.B * t.Hq;
  const size_t out_size = queries * t.Dv, kept_size = heads * t.most;
  const size_t of_all = recorded * (size_t)t.layers;
  float* outs = calloc(of_all * out_size, sizeof *outs);
  float* scores = calloc(of_all * kept_size, sizeof *scores);
  int32_t* kept = malloc(of_all * kept_size * sizeof *kept);
  for (size_t i = 0; i < of_all * kept_size; ++i) kept[i] = -1;
  bool scored = false;
  int number = 0;
  size_t record = 0;
  for (size_t turn = 0; turn < calls; turn += 2)
    for (int time = 0; time < lengths[turn + 1]; ++time, ++number) {
      const int L = lengths[turn];
      const bool chunk = contains(whole, chunks, number),
                 records_it = contains(records, recorded, number);
      float* chunk_out = chunk ? malloc(t.layers * out_size * L * sizeof *chunk_out) : NULL;
      for (int l = 0; l < t.layers; ++l) {
        Layer* layer = &t.of[l];
        float* out = call(r, &t, layer, L);
        if (chunk) memcpy(chunk_out + l * out_size * L, out, out_size * L * sizeof *out);
        if (records_it) {
          const size_t at = record * t.layers + l;
          for (size_t i = 0; i < queries; ++i)
            memcpy(
                outs + at * out_size + i * t.Dv, out + (i * L + L - 1) * t.Dv,
                (size_t)t.Dv * sizeof *out);
          mlx_array positions = kNone, of_slots = kNone;
          TRY(mlx_h2o_cache_kept(&positions, layer->cache, r->s));
          const size_t held = (size_t)mlx_array_dim(positions, 2);
          int32_t* p = int32s_of(r, positions);
          widen(kept + at * kept_size, t.most, p, held, heads);
          free(p);
          // A policy that looks at keys only has none, and says so.
          if (!mlx_h2o_cache_scores(&of_slots, layer->cache, r->s)) {
            float* s = floats_of(r, of_slots);
            widen(scores + at * kept_size, t.most, s, held, heads);
            free(s);
            scored = true;
          }
          mlx_array_free(positions), mlx_array_free(of_slots);
        }
        free(out);
      }
      if (chunk) {
        char name[32];
        snprintf(name, sizeof name, "chunk.%d", number);
        expect_floats(r, name, chunk_out, t.layers * out_size * L);
        free(chunk_out);
      }
      record += records_it;
    }
  expect_floats(r, "out", outs, of_all * out_size);
  expect_int32s(r, "kept", kept, of_all * kept_size);
  mlx_array has_scores = golden(r, "out", "scores");
  if ((has_scores.ctx != NULL) != scored) differs(r, "scores", "are on one side only");
  if (scored) expect_floats(r, "scores", scores, of_all * kept_size);
  mlx_array_free(has_scores);

  const char* const names[] = {"count", "mean_key", "var_key", "mean_value"};
  const size_t widths[] = {1, (size_t)t.D, (size_t)t.D, (size_t)t.Dv};
  mlx_h2o_remainder remainder = mlx_h2o_remainder_new();
  const bool remembers = !mlx_h2o_cache_remainder(&remainder, t.of[0].cache, r->s);
  for (int i = 0; i < 4; ++i) {
    char name[32];
    snprintf(name, sizeof name, "remainder.%s", names[i]);
    if (!remembers) {
      mlx_array has = golden(r, "out", name);
      if (has.ctx) differs(r, name, "is not kept here");
      mlx_array_free(has);
      continue;
    }
    const size_t size = heads * widths[i];
    float* all = malloc(t.layers * size * sizeof *all);
    for (int l = 0; l < t.layers; ++l) {
      TRY(mlx_h2o_cache_remainder(&remainder, t.of[l].cache, r->s));
      const mlx_array arrays[] = {
          remainder.count, remainder.mean_key, remainder.var_key, remainder.mean_value};
      float* of_layer = floats_of(r, arrays[i]);
      memcpy(all + l * size, of_layer, size * sizeof *all);
      free(of_layer);
    }
    expect_floats(r, name, all, t.layers * size);
    free(all);
  }
  mlx_h2o_remainder_free(remainder);
  free(outs), free(scores), free(kept), free(lengths), free(records), free(whole);
  trajectory_free(t);
}

// -- errors, slots, memory ------------------------------------------------------------------------

// Wrong arguments give a status and a message, and leave the cache as it was.
static int check_errors(const Replay* r) {
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
  MUST_FAIL(mlx_h2o_cache_make(&cache, policy, few, 2, options));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(&out, cache, rows, rows, rows, 1, kNone, r->s));
  TRY(mlx_h2o_cache_make(&cache, policy, budgets, 2, options));
  MUST_FAIL(mlx_h2o_cache_kept(&out, cache, r->s));
  TRY(mlx_h2o_cache_update_and_attend(&out, cache, rows, rows, rows, 1, kNone, r->s));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(&out, cache, narrow, narrow, narrow, 1, kNone, r->s));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(&out, cache, rows, rows, rows, 1, rows, r->s));
  MUST_FAIL(mlx_h2o_cache_update_and_attend(&out, cache, rows, rows, kNone, 1, kNone, r->s));
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

static int check_write_rows(Replay* r) {
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

// Decodes so many tokens in one layer; memory must not grow once the budgets are full.
static int check_flat_memory(Replay* r, int steps) {
  enum { Hq = 4, Hk = 2, D = 32, SETTLED = 500 };
  const int budgets[] = {40, 100}, q_shape[] = {1, Hq, 1, D}, k_shape[] = {1, Hk, 1, D};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  TRY(mlx_h2o_policy_named(&policy, "distinct"));
  TRY(mlx_h2o_cache_make(&cache, policy, budgets, Hk, mlx_h2o_cache_options_default()));
  float numbers[(Hq + 2 * Hk) * D];
  size_t settled = 0, now = 0, settled_bytes = 0, bytes = 0;
  for (int step = 0; step < steps; ++step) {
    fill_numbers(numbers, sizeof numbers / sizeof *numbers, (uint64_t)step << 20, 0);
    mlx_array q = array_of(r, numbers, q_shape, 4, MLX_FLOAT32), out = kNone;
    mlx_array k = array_of(r, numbers + Hq * D, k_shape, 4, MLX_FLOAT32);
    mlx_array v = array_of(r, numbers + (Hq + Hk) * D, k_shape, 4, MLX_FLOAT32);
    TRY(mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.1875f, kNone, r->s));
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

// -- all of it ------------------------------------------------------------------------------------

typedef struct Group_ {
  const char* name;
  void (*replay)(Replay*);
} Group;

static const Group kGroups[] = {
    {"attention", replay_attention},
    {"quantized", replay_quantized},
    {"remainder", replay_remainder},
    {"accumulate", replay_accumulate},
    {"selection", replay_selection},
    {"trajectory", replay_trajectory},
    {"model", NULL},  // models are Python's and Swift's
};

static void replay_group(Replay* r, const char* folder, const Group* group) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.safetensors", folder, group->name);
  mlx_map_string_to_string metadata = mlx_map_string_to_string_new();
  r->arrays = mlx_map_string_to_array_new();
  if (mlx_load_safetensors(&r->arrays, &metadata, path, r->s)) exit(2);
  const char* schema = NULL;
  if (mlx_map_string_to_string_get(&schema, metadata, "schema") || strcmp(schema, "1")) {
    fprintf(stderr, "replay: %s has another schema\n", path);
    exit(2);
  }
  const int before = r->differences;
  int replayed = 0, left = 0;
  r->worst = 0;
  for (size_t i = 0; i < r->cases.count; ++i) {
    r->c = &r->cases.cases[i];
    if (strcmp(r->c->group, group->name)) continue;
    // Attention by the model itself, over plain rows: the C cache attends.
    const char* kind = text_or_null(r->c, "kind");
    if (kind && !strcmp(kind, "plain")) {
      ++left;
      continue;
    }
    group->replay(r);
    ++replayed;
    text_or_null(r->c, "seed");
    if (unread(r->c)) differs(r, unread(r->c), "is a parameter that this replayer does not know");
  }
  printf(
      "%-10s %3d cases, worst error %.2f of what is tolerated, %d differences", group->name,
      replayed, r->worst, r->differences - before);
  printf(left ? "; %d of attention by the model itself left out\n" : "\n", left);
  mlx_map_string_to_array_free(r->arrays);
  mlx_map_string_to_string_free(metadata);
}

static void print_error(const char* message, void* data) {
  (void)data;
  fprintf(stderr, "replay: mlx-c: %s\n", message);
}

int main(int argc, char** argv) {
  const char *folder = NULL, *only = NULL;
  int steps = 0;
  for (int i = 1; i < argc; ++i) {
    if (!strcmp(argv[i], "--plain"))
      mlx_h2o_use_kernels(false);
    else if (!strcmp(argv[i], "--steps") && i + 1 < argc)
      steps = atoi(argv[++i]);
    else if (!strcmp(argv[i], "--group") && i + 1 < argc)
      only = argv[++i];
    else
      folder = argv[i];
  }
  if (!folder) {
    fprintf(stderr, "replay GOLDEN [--group NAME] [--plain] [--steps N]\n");
    return 2;
  }
  mlx_set_error_handler(print_error, NULL, NULL);
  char path[4096];
  snprintf(path, sizeof path, "%s/cases.txt", folder);
  Replay r = {.s = mlx_default_cpu_stream_new(), .cases = cases_read(path)};
  for (size_t i = 0; i < r.cases.count; ++i) {
    bool known = false;
    for (size_t g = 0; g < sizeof kGroups / sizeof *kGroups; ++g)
      known = known || !strcmp(kGroups[g].name, r.cases.cases[i].group);
    if (!known) {
      fprintf(stderr, "replay: the group %s is unknown\n", r.cases.cases[i].group);
      return 2;
    }
  }
  for (size_t g = 0; g < sizeof kGroups / sizeof *kGroups; ++g)
    if (kGroups[g].replay && (!only || !strcmp(only, kGroups[g].name)))
      replay_group(&r, folder, &kGroups[g]);
  int failures = r.differences + check_errors(&r) + check_write_rows(&r);
  if (steps) failures += check_flat_memory(&r, steps);
  cases_free(r.cases);
  mlx_stream_free(r.s);
  return failures ? 1 : 0;
}
