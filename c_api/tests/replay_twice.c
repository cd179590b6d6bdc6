// Prompts that are read twice.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"
#include "replays.h"
#include "stages.h"

typedef struct Conversation_ {
  int B, Hq, Hk, D, Dv, tokens, layers;
  float scale;
  mlx_dtype dtype;
  Stream* of;
  mlx_h2o_cache* caches;
  int first;  // of the next call's tokens
} Conversation;

static Conversation conversation_of(const Replay* r, int tokens) {
  Case* c = r->c;
  Conversation t = {
      .B = int_of(c, "batch"),
      .Hq = int_of(c, "query_heads"),
      .Hk = int_of(c, "kv_heads"),
      .D = int_of(c, "key_width"),
      .Dv = int_of(c, "value_width"),
      .tokens = tokens,
      .scale = (float)number_of(c, "scale"),
      .dtype = dtype_of(text_of(c, "dtype"))};
  text_or_null(c, "framed");
  size_t slots;
  int most = 0, *budgets = ints_of(c, "cache.budgets", &slots);
  t.layers = (int)slots / t.Hk;
  const Stages filling = stages_of(c, slots, &most);
  t.of = calloc((size_t)t.layers, sizeof *t.of);
  t.caches = calloc((size_t)t.layers, sizeof *t.caches);
  mlx_h2o_policy policy = policy_of(c);
  mlx_h2o_cache_options options = options_of(c, t.Hk);
  for (int l = 0; l < t.layers; ++l) {
    t.of[l] = stream_of(r, l, tokens);
    options.frame_centre = part_of_frame(r, "frame.centre", l);
    options.frame_scale = part_of_frame(r, "frame.scale", l);
    int* stages = stages_of_layer(&filling, l, t.Hk);
    options.filling = stages, options.n_stages = filling.stages;
    const int* of_layer = budgets + (size_t)l * t.Hk;
    TRY(mlx_h2o_cache_make(&t.caches[l], policy, of_layer, (size_t)t.Hk, &options));
    free(stages);
    mlx_array_free(options.frame_centre), mlx_array_free(options.frame_scale);
  }
  mlx_h2o_policy_free(policy);
  free(budgets), free(filling.numbers);
  return t;
}

static void conversation_free(Conversation t) {
  layers_free(t.of, t.caches, t.layers);
}

// Rows of a case's dtype.
static mlx_array stored(const Replay* r, const Conversation* t, mlx_array rows) {
  mlx_array cast = mlx_array_new();
  TRY(mlx_astype(&cast, rows, t->dtype, r->s));
  mlx_array_free(rows);
  return cast;
}

// One call of every layer, [layers, B, Hq, L, Dv]: of the second reading, or of another where it is
// NULL. To be freed.
static float* attend(
    const Replay* r, Conversation* t, int L, const mlx_h2o_two_readings* readings) {
  const size_t size = (size_t)t->B * t->Hq * L * t->Dv;
  float* outs = malloc(t->layers * size * sizeof *outs);
  for (int l = 0; l < t->layers; ++l) {
    const Stream* of = &t->of[l];
    mlx_array q = rows_of(r, of->q, t->B, t->Hq, t->tokens, t->D, t->first, L);
    mlx_array k = stored(r, t, rows_of(r, of->k, t->B, t->Hk, t->tokens, t->D, t->first, L));
    mlx_array v = stored(r, t, rows_of(r, of->v, t->B, t->Hk, t->tokens, t->Dv, t->first, L));
    mlx_array out = mlx_array_new();
    if (readings)
      TRY(mlx_h2o_second_reading_attend(
          &out, *readings, (size_t)l, q, k, v, t->scale, of->sinks, r->s));
    else
      TRY(mlx_h2o_cache_update_and_attend(
          &out, t->caches[l], q, k, v, t->scale, "causal", kNone, of->sinks, r->s));
    float* numbers = floats_of(r, out);
    memcpy(outs + l * size, numbers, size * sizeof *outs);
    free(numbers);
    mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  }
  t->first += L;
  return outs;
}

// What an array of each layer holds, put behind each other, [layers, ...]; heads that hold less are
// filled up to `most` with `unused`.
typedef int (*Read)(mlx_array*, mlx_h2o_cache, const mlx_stream);

static int values_of(mlx_array* res, mlx_h2o_cache cache, const mlx_stream s) {
  mlx_array keys = mlx_array_new(), positions = mlx_array_new();
  const int status = mlx_h2o_cache_rows(&keys, res, &positions, cache, s);
  mlx_array_free(keys), mlx_array_free(positions);
  return status;
}

static mlx_array of_layers(
    const Replay* r, const Conversation* t, Read read, int most, float unused, mlx_dtype dtype) {
  const int width = read == values_of ? t->Dv : 1, heads = t->layers * t->B * t->Hk;
  const int shape[] = {t->layers, t->B, t->Hk, most, width};
  const size_t size = (size_t)heads * most * width;
  float* all = malloc(size * sizeof *all);
  for (size_t i = 0; i < size; ++i) all[i] = unused;
  for (int l = 0; l < t->layers; ++l) {
    mlx_array held = mlx_array_new();
    TRY(read(&held, t->caches[l], r->s));
    float* numbers = floats_of(r, held);
    const size_t count = (size_t)mlx_array_dim(held, 2) * width;
    for (int i = 0; i < t->B * t->Hk; ++i)
      memcpy(
          all + ((size_t)l * t->B * t->Hk + i) * most * width, numbers + i * count,
          count * sizeof *all);
    free(numbers);
    mlx_array_free(held);
  }
  mlx_array made = array_of(r, all, shape, width == 1 ? 4 : 5, dtype);
  free(all);
  return made;
}

static void expect_layers(
    Replay* r, const Conversation* t, const char* name, Read read, int most, float unused,
    mlx_dtype dtype) {
  mlx_array all = of_layers(r, t, read, most, unused, dtype);
  expect(r, name, all);
  mlx_array_free(all);
}

// The greatest weights of all layers' rows, [layers, B, Hk, N].
static void expect_worths(Replay* r, const Conversation* t, mlx_h2o_two_readings readings) {
  mlx_vector_array all = mlx_vector_array_new();
  int most = 0;
  for (int l = 0; l < t->layers; ++l) {
    mlx_array worths = mlx_array_new();
    TRY(mlx_h2o_second_reading_worths(&worths, readings, (size_t)l, r->s));
    if (mlx_array_dim(worths, 2) > most) most = mlx_array_dim(worths, 2);
    mlx_vector_array_append_value(all, worths);
    mlx_array_free(worths);
  }
  const size_t heads = (size_t)t->B * t->Hk;
  float* numbers = calloc(t->layers * heads * most, sizeof *numbers);
  for (int l = 0; l < t->layers; ++l) {
    mlx_array worths = mlx_array_new();
    TRY(mlx_vector_array_get(&worths, all, (size_t)l));
    float* own = floats_of(r, worths);
    const size_t count = (size_t)mlx_array_dim(worths, 2);
    for (size_t i = 0; i < heads; ++i)
      memcpy(numbers + (l * heads + i) * most, own + i * count, count * sizeof *own);
    free(own);
    mlx_array_free(worths);
  }
  expect_floats(r, "worths", numbers, t->layers * heads * most);
  free(numbers);
  mlx_vector_array_free(all);
}

static void expect_budgets(Replay* r, const Conversation* t) {
  int* all = malloc((size_t)t->layers * t->Hk * sizeof *all);
  size_t heads = (size_t)t->Hk;
  for (int l = 0; l < t->layers; ++l)
    TRY(mlx_h2o_cache_budgets(all + l * heads, &heads, t->caches[l]));
  expect_int32s(r, "budgets", all, t->layers * heads);
  free(all);
}

// Decoding, [layers, B, Hq, steps, Dv].
static void expect_steps(Replay* r, Conversation* t, int steps) {
  const size_t rows = (size_t)t->layers * t->B * t->Hq, width = (size_t)t->Dv;
  float* all = malloc(rows * steps * width * sizeof *all);
  for (int step = 0; step < steps; ++step) {
    float* outs = attend(r, t, 1, NULL);
    for (size_t i = 0; i < rows; ++i)
      memcpy(all + (i * steps + step) * width, outs + i * width, width * sizeof *all);
    free(outs);
  }
  if (steps) expect_floats(r, "out", all, rows * steps * width);
  free(all);
}

static void replay_reading(Replay* r) {
  Case* c = r->c;
  const int prompt = int_of(c, "prompt"), chunk = int_of(c, "chunk");
  const int request = int_of(c, "request"), room = int_of(c, "room"), steps = int_of(c, "steps");
  size_t calls = 0;
  int* lengths = text_or_null(c, "calls") ? ints_of(c, "calls", &calls) : NULL;
  int tokens = 2 * prompt + (prompt + chunk - 1) / chunk * request + steps;
  for (size_t i = 0; i < calls; i += 2) tokens += lengths[i] * lengths[i + 1];
  Conversation t = conversation_of(r, tokens);
  for (size_t turn = 0; turn < calls; turn += 2)
    for (int time = 0; time < lengths[turn + 1]; ++time) free(attend(r, &t, lengths[turn], NULL));
  free(lengths);
  mlx_h2o_two_readings readings = mlx_h2o_two_readings_new();
  TRY(mlx_h2o_two_readings_begin(&readings, t.caches, (size_t)t.layers, prompt, room, r->s));
  for (int again = 0; again < 2; ++again)
    for (int first = 0; first < prompt; first += chunk) {
      const int length = prompt - first < chunk ? prompt - first : chunk;
      const int L = length + again * request;
      float* outs = attend(r, &t, L, again ? &readings : NULL);
      if (again && first + length == prompt)
        expect_floats(r, "again", outs, (size_t)t.layers * t.B * t.Hq * L * t.Dv);
      free(outs);
    }
  expect_worths(r, &t, readings);
  TRY(mlx_h2o_two_readings_finish(readings, r->s));
  mlx_h2o_two_readings_free(readings);
  expect_budgets(r, &t);
  int most = 0, size;
  for (int l = 0; l < t.layers; ++l) {
    TRY(mlx_h2o_cache_size(&size, t.caches[l]));
    if (size > most) most = size;
  }
  expect_layers(r, &t, "kept", mlx_h2o_cache_kept, most, -1, MLX_INT32);
  expect_layers(r, &t, "values", values_of, most, 0, t.dtype);
  expect_remainders(r, t.caches, t.layers);
  expect_steps(r, &t, steps);
  conversation_free(t);
}

static void replay_sharing(Replay* r) {
  Case* c = r->c;
  const int heads = int_of(c, "heads");
  int_of(c, "rows"), flag_of(c, "ties");  // of how the stored worths were made
  size_t count;
  int *own = ints_of(c, "own", &count), *counts = malloc((size_t)heads * sizeof *counts);
  mlx_array worths = golden(r, "in", "worths");
  TRY(mlx_h2o_shared_out(counts, worths, int_of(c, "whole"), own, r->s));
  expect_int32s(r, "counts", counts, (size_t)heads);
  mlx_array_free(worths);
  free(own), free(counts);
}

void replay_twice(Replay* r) {
  if (!strcmp(text_of(r->c, "kind"), "sharing"))
    replay_sharing(r);
  else
    replay_reading(r);
}
