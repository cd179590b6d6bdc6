// Whole conversations in caches.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layers.h"
#include "replays.h"
#include "spilled.h"
#include "stages.h"

typedef struct Trajectory_ {
  int B, Hq, Hk, D, Dv, T, layers, most;
  float scale;
  bool attending;
  Stream* of;
  mlx_h2o_cache* caches;
  Spilled spilled;
} Trajectory;

// Whether a case's positions roll, by `rope`.
static bool rope_of(Case* c, mlx_h2o_rope* rope) {
  if (!text_or_null(c, "cache.rope.dims")) return false;
  *rope = (mlx_h2o_rope){
      sizeof *rope, int_of(c, "cache.rope.dims"), (float)number_of(c, "cache.rope.base"),
      (float)number_of(c, "cache.rope.scale"), flag_of(c, "cache.rope.traditional")};
  return true;
}

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
  const Stages filling = stages_of(c, slots, &t.most);
  t.of = calloc((size_t)t.layers, sizeof *t.of);
  t.caches = calloc((size_t)t.layers, sizeof *t.caches);
  t.spilled = spilled_of(c, t.layers, t.Hk);
  mlx_h2o_policy policy = policy_of(c);
  mlx_h2o_cache_options options = options_of(c, t.Hk);
  mlx_h2o_rope rope;
  if (rope_of(c, &rope)) options.rope = &rope;
  t.attending = options.attending;
  for (int l = 0; l < t.layers; ++l) {
    t.of[l] = stream_of(r, l, t.T);
    options.frame_centre = part_of_frame(r, "frame.centre", l);
    options.frame_scale = part_of_frame(r, "frame.scale", l);
    int* stages = stages_of_layer(&filling, l, t.Hk);
    options.filling = stages, options.n_stages = filling.stages;
    TRY(mlx_h2o_cache_make(
        &t.caches[l], policy, budgets + (size_t)l * t.Hk, (size_t)t.Hk, &options));
    spill_layer(&t.spilled, t.caches[l], l);
    free(stages);
    mlx_array_free(options.frame_centre), mlx_array_free(options.frame_scale);
  }
  mlx_h2o_policy_free(policy);
  free((void*)options.saturation);
  free(lengths), free(budgets), free(filling.numbers);
  return t;
}

static void trajectory_free(Trajectory t) {
  layers_free(t.of, t.caches, t.layers);
  spilled_free(t.spilled);
}

// One call of a layer's attention: the next L tokens of its stream.
static float* call(const Replay* r, const Trajectory* t, int number, int L) {
  const Stream* layer = &t->of[number];
  const mlx_h2o_cache cache = t->caches[number];
  int first;
  TRY(mlx_h2o_cache_offset(&first, cache));
  mlx_array q = rows_of(r, layer->q, t->B, t->Hq, t->T, t->D, first, L);
  mlx_array k = rows_of(r, layer->k, t->B, t->Hk, t->T, t->D, first, L);
  mlx_array v = rows_of(r, layer->v, t->B, t->Hk, t->T, t->Dv, first, L), out = kNone;
  if (t->attending) {
    TRY(mlx_h2o_cache_update_and_attend(
        &out, cache, q, k, v, t->scale, "causal", kNone, layer->sinks, r->s));
  } else {
    mlx_array mask = kNone;
    TRY(mlx_h2o_cache_update_and_fetch(&k, &v, &mask, cache, k, v, r->s));
    const char* mode = mask.ctx ? "array" : L > 1 ? "causal" : "";
    TRY(mlx_fast_scaled_dot_product_attention(
        &out, q, k, v, t->scale, mode, mask, layer->sinks, r->s));
    mlx_array_free(mask);
  }
  float* numbers = floats_of(r, out);
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  return numbers;
}

// What is pinned before a call, and the turns that begin, where the case has any.
typedef struct Conversation_ {
  int *pins, *turns;  // (call, first, end) and calls
  float* carries;
  size_t pin_numbers, turn_count;
} Conversation;

static Conversation conversation_of(Case* c) {
  Conversation talk = {0};
  if (text_or_null(c, "pins")) talk.pins = ints_of(c, "pins", &talk.pin_numbers);
  if (!text_or_null(c, "turn_calls")) return talk;
  talk.turns = ints_of(c, "turn_calls", &talk.turn_count);
  talk.carries = fractions_of(c, "carries", talk.turn_count);
  return talk;
}

static void begin_call(const Replay* r, const Conversation* talk, const Trajectory* t, int number) {
  int spans[64], missing;
  size_t count = 0;
  for (size_t i = 0; i < talk->pin_numbers; i += 3)
    if (talk->pins[i] == number && count < 32) {
      spans[2 * count] = talk->pins[i + 1];
      spans[2 * count++ + 1] = talk->pins[i + 2];
    }
  for (int l = 0; l < t->layers; ++l) {
    if (count) TRY(mlx_h2o_cache_pin(&missing, t->caches[l], spans, count, r->s));
    for (size_t i = 0; i < talk->turn_count; ++i)
      if (talk->turns[i] == number)
        TRY(mlx_h2o_cache_new_turn(t->caches[l], talk->carries[i], r->s));
  }
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

// What is recorded of all layers, record after record, and how far that is.
typedef struct Records_ {
  float *outs, *scores;
  int32_t* kept;
  size_t out_size, kept_size, count;
  bool scored;
} Records;

static Records records_of(const Trajectory* t, size_t recorded) {
  const size_t of_all = recorded * (size_t)t->layers;
  Records all = {
      .out_size = (size_t)t->B * t->Hq * t->Dv, .kept_size = (size_t)t->B * t->Hk * t->most};
  all.outs = calloc(of_all * all.out_size, sizeof *all.outs);
  all.scores = calloc(of_all * all.kept_size, sizeof *all.scores);
  all.kept = malloc(of_all * all.kept_size * sizeof *all.kept);
  for (size_t i = 0; i < of_all * all.kept_size; ++i) all.kept[i] = -1;
  return all;
}

// The last of a call's L outputs, and what the layer holds after it.
static void record(
    const Replay* r, const Trajectory* t, Records* all, mlx_h2o_cache cache, const float* out,
    int L) {
  const size_t heads = (size_t)t->B * t->Hk, queries = (size_t)t->B * t->Hq, at = all->count++;
  for (size_t i = 0; i < queries; ++i)
    memcpy(
        all->outs + at * all->out_size + i * t->Dv, out + (i * L + L - 1) * t->Dv,
        (size_t)t->Dv * sizeof *out);
  mlx_array positions = kNone, of_slots = kNone;
  TRY(mlx_h2o_cache_kept(&positions, cache, r->s));
  const size_t held = (size_t)mlx_array_dim(positions, 2);
  int32_t* p = int32s_of(r, positions);
  widen(all->kept + at * all->kept_size, t->most, p, held, heads);
  free(p);
  // A policy that looks at keys only has none, and says so.
  if (!mlx_h2o_cache_scores(&of_slots, cache, r->s)) {
    float* s = floats_of(r, of_slots);
    widen(all->scores + at * all->kept_size, t->most, s, held, heads);
    free(s);
    all->scored = true;
  }
  mlx_array_free(positions), mlx_array_free(of_slots);
}

static void expect_records(Replay* r, const Records* all) {
  expect_floats(r, "out", all->outs, all->count * all->out_size);
  expect_int32s(r, "kept", all->kept, all->count * all->kept_size);
  mlx_array has_scores = golden(r, "out", "scores");
  if ((has_scores.ctx != NULL) != all->scored) differs(r, "scores", "are on one side only");
  if (all->scored) expect_floats(r, "scores", all->scores, all->count * all->kept_size);
  mlx_array_free(has_scores);
}

// One call of every layer. Outputs of a whole chunk are compared at once.
static void replay_call(
    Replay* r, const Trajectory* t, int L, int number, bool chunk, Records* all) {
  const size_t size = (size_t)t->B * t->Hq * t->Dv * L;
  float* whole = chunk ? malloc(t->layers * size * sizeof *whole) : NULL;
  for (int l = 0; l < t->layers; ++l) {
    float* out = call(r, t, l, L);
    if (chunk) memcpy(whole + l * size, out, size * sizeof *out);
    if (all) record(r, t, all, t->caches[l], out, L);
    free(out);
  }
  if (!chunk) return;
  char name[32];
  snprintf(name, sizeof name, "chunk.%d", number);
  expect_floats(r, name, whole, t->layers * size);
  free(whole);
}

void replay_trajectory(Replay* r) {
  Case* c = r->c;
  const Trajectory t = trajectory_of(r);
  size_t calls, recorded, chunks;
  int* lengths = ints_of(c, "calls", &calls);
  int *records = ints_of(c, "recorded", &recorded), *whole = ints_of(c, "chunks", &chunks);
  const Conversation talk = conversation_of(c);
  Records all = records_of(&t, recorded);
  int number = 0;
  for (size_t turn = 0; turn < calls; turn += 2)
    for (int time = 0; time < lengths[turn + 1]; ++time, ++number) {
      begin_call(r, &talk, &t, number);
      replay_call(
          r, &t, lengths[turn], number, contains(whole, chunks, number),
          contains(records, recorded, number) ? &all : NULL);
    }
  expect_records(r, &all);
  expect_remainders(r, t.caches, t.layers);
  expect_returned(r, &t.spilled, t.caches);
  free(all.outs), free(all.scores), free(all.kept);
  free(lengths), free(records), free(whole);
  free(talk.pins), free(talk.turns), free(talk.carries);
  trajectory_free(t);
}
