// Prompts that are read twice (tests/conformance/test_c_api.py): what the golden vectors do not
// say. Readings that are abandoned leave the caches within their bound; the second one stores
// nothing; wrong arguments change nothing. Ends with 0, or with 1 and what was otherwise.
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mlx_h2o_golden.h"
#include "numbers.h"

enum { Hq = 4, Hk = 2, D = 32, LAYERS = 2, PROMPT = 50, ROOM = 3, REQUEST = 4, MOST = 64 };

static const mlx_array kNone = {NULL};
static const int kBudgets[LAYERS][Hk] = {{24, 20}, {22, 18}};
static mlx_stream s;
static int failures = 0;

static void expect(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "twice: %s (%s)\n", what, mlx_h2o_last_error());
  ++failures;
}

// That it failed, in this way, and had something to say.
static void refused(int status, mlx_h2o_error code, const char* what) {
  expect(status == 1 && mlx_h2o_last_error_code() == code && *mlx_h2o_last_error(), what);
}

// -- a conversation -------------------------------------------------------------------------------

typedef struct Settings_ {
  const char *policy, *setting, *value;
  mlx_h2o_cache_options options;
} Settings;

static Settings usual(void) {
  return (Settings){"h2o", "sink", "2", mlx_h2o_cache_options_default()};
}

static void make(mlx_h2o_cache* caches, const Settings* settings) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  expect(
      !mlx_h2o_policy_named(&policy, settings->policy) &&
          !mlx_h2o_policy_set(policy, "recent", "0.25") &&
          !mlx_h2o_policy_set(policy, settings->setting, settings->value),
      "a policy");
  const bool alike = !settings->options.attending || !strcmp(settings->setting, "unit");
  static const int same[Hk] = {24, 24};
  for (int l = 0; l < LAYERS; ++l) {
    caches[l] = mlx_h2o_cache_new();
    expect(
        !mlx_h2o_cache_make(&caches[l], policy, alike ? same : kBudgets[l], Hk, &settings->options),
        "a cache");
  }
  mlx_h2o_policy_free(policy);
}

static void release(mlx_h2o_cache* caches) {
  for (int l = 0; l < LAYERS; ++l) mlx_h2o_cache_free(caches[l]);
}

static mlx_array rows(int heads, int tokens, int seed, float scale) {
  const int shape[] = {1, heads, tokens, D};
  float numbers[Hq * MOST * D];
  fill_numbers(numbers, (size_t)heads * tokens * D, (uint64_t)seed, 0);
  for (int i = 0; i < heads * tokens * D; ++i) numbers[i] *= scale;
  return mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
}

// One call of a layer: of the second reading, unless that is NULL.
static int call(
    mlx_h2o_cache cache, const mlx_h2o_two_readings* readings, size_t layer, int tokens, int seed,
    float scale) {
  mlx_array q = rows(Hq, tokens, seed, 1), k = rows(Hk, tokens, seed + 1, scale);
  mlx_array v = rows(Hk, tokens, seed + 2, 1), out = mlx_array_new();
  const int status = readings
      ? mlx_h2o_second_reading_attend(&out, *readings, layer, q, k, v, 0.2f, kNone, s)
      : mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.2f, "causal", kNone, kNone, s);
  if (!status) expect(!mlx_array_eval(out), "an evaluated output");
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  return status;
}

static void read(mlx_h2o_cache* caches, int tokens, float scale) {
  for (int l = 0; l < LAYERS; ++l)
    expect(!call(caches[l], NULL, 0, tokens, 10 * l, scale), "a reading");
}

static void read_again(mlx_h2o_two_readings readings, int layers) {
  const mlx_h2o_cache none = {NULL};
  for (int l = 0; l < layers; ++l)
    expect(!call(none, &readings, (size_t)l, PROMPT + REQUEST, 500 + 10 * l, 1), "again");
}

static mlx_h2o_two_readings begun(mlx_h2o_cache* caches) {
  mlx_h2o_two_readings readings = mlx_h2o_two_readings_new();
  expect(!mlx_h2o_two_readings_begin(&readings, caches, LAYERS, PROMPT, ROOM, s), "two readings");
  return readings;
}

static int slots_of(const mlx_h2o_cache* caches, int* res) {
  int sum = 0;
  for (int l = 0; l < LAYERS; ++l) {
    size_t heads = Hk;
    expect(!mlx_h2o_cache_budgets(res + l * Hk, &heads, caches[l]), "budgets");
    for (int h = 0; h < Hk; ++h) sum += res[l * Hk + h];
  }
  return sum;
}

static int number(int (*of)(int*, const mlx_h2o_cache), mlx_h2o_cache cache) {
  int res = -1;
  expect(!of(&res, cache), "a number");
  return res;
}

// Whether caches have these slots, hold no more, and go on.
static void go_on(mlx_h2o_cache* caches, const int* slots, const char* what) {
  int now[LAYERS * Hk];
  slots_of(caches, now);
  expect(!memcmp(now, slots, sizeof now), what);
  for (int l = 0; l < LAYERS; ++l) {
    const int most = now[l * Hk] > now[l * Hk + 1] ? now[l * Hk] : now[l * Hk + 1];
    expect(number(mlx_h2o_cache_size, caches[l]) <= most, what);
  }
  for (int step = 0; step < 2 * ROOM; ++step)
    for (int l = 0; l < LAYERS; ++l) expect(!call(caches[l], NULL, 0, 1, 900 + step, 1), what);
}

// -- what is tested -------------------------------------------------------------------------------

// All of the prompt is there in between; afterwards no more slots than before are, and room is
// free.
static void both_readings(void) {
  const Settings settings = usual();
  mlx_h2o_cache caches[LAYERS];
  int before[LAYERS * Hk], after[LAYERS * Hk];
  make(caches, &settings);
  const int bound = slots_of(caches, before);
  mlx_h2o_two_readings readings = begun(caches);
  read(caches, PROMPT, 1);
  size_t bytes[LAYERS];
  for (int l = 0; l < LAYERS; ++l) {
    expect(number(mlx_h2o_cache_size, caches[l]) == PROMPT, "room for all");
    expect(!mlx_h2o_cache_nbytes(&bytes[l], caches[l]), "bytes");
  }
  read_again(readings, LAYERS);
  mlx_vector_array state = mlx_vector_array_new();
  expect(!mlx_h2o_second_reading_state(&state, readings), "its arrays");
  expect(mlx_vector_array_size(state) == 2 * LAYERS, "worths and queries of each layer");
  for (int l = 0; l < LAYERS; ++l) {
    size_t now = 0;
    expect(!mlx_h2o_cache_nbytes(&now, caches[l]) && now == bytes[l], "nothing is stored");
    expect(number(mlx_h2o_cache_offset, caches[l]) == PROMPT, "the position");
  }
  expect(!mlx_h2o_two_readings_finish(readings, s), "finish");
  expect(slots_of(caches, after) <= bound, "within the bound");
  expect(memcmp(before, after, sizeof after) != 0, "slots that competed");
  int64_t gone[LAYERS], later[LAYERS];
  for (int l = 0; l < LAYERS; ++l) expect(!mlx_h2o_cache_evicted(&gone[l], caches[l]), "evicted");
  for (int step = 0; step < ROOM; ++step) read(caches, 1, 1);
  for (int l = 0; l < LAYERS; ++l) {
    expect(!mlx_h2o_cache_evicted(&later[l], caches[l]) && later[l] == gone[l], "the room");
    expect(gone[l] > 0, "rows that went");
  }
  refused(mlx_h2o_two_readings_finish(readings, s), MLX_H2O_ERROR_STATE, "finish again");
  refused(mlx_h2o_two_readings_abandon(readings, s), MLX_H2O_ERROR_STATE, "abandon after it");
  go_on(caches, after, "after two readings");
  mlx_vector_array_free(state);
  mlx_h2o_two_readings_free(readings);
  release(caches);
}

// Abandoned before, within and after the first reading, within the second, or after it.
static void abandoned(void) {
  static const int slots[] = {24, 20, 22, 18}, later[] = {16, 16, 16, 16};
  static const int stage[] = {30, 16, 16};
  for (int grows = 0; grows < 2; ++grows)
    for (int tokens = 0; tokens <= PROMPT; tokens += PROMPT / 2)
      for (int layers = 0; layers <= (tokens == PROMPT ? LAYERS : 0); ++layers) {
        Settings settings = usual();
        if (grows) settings.options.filling = stage, settings.options.n_stages = 1;
        mlx_h2o_cache caches[LAYERS];
        make(caches, &settings);
        mlx_h2o_two_readings readings = begun(caches);
        if (tokens) read(caches, tokens, 1);
        read_again(readings, layers);
        expect(!mlx_h2o_two_readings_abandon(readings, s), "abandon");
        go_on(caches, grows && tokens > 30 ? later : slots, "after readings that were abandoned");
        mlx_h2o_two_readings_free(readings);
        release(caches);
      }
}

// With a file values are as they came, and later prompts are read once: rows come back meanwhile.
static void with_a_file(const char* folder) {
  const Settings settings = usual();
  mlx_h2o_cache caches[LAYERS];
  int before[LAYERS * Hk], after[LAYERS * Hk];
  make(caches, &settings);
  const int bound = slots_of(caches, before);
  mlx_h2o_spill spill = mlx_h2o_spill_new();
  expect(!mlx_h2o_spill_make(&spill, folder, LAYERS, NULL), "a file");
  for (int l = 0; l < LAYERS; ++l)
    expect(!mlx_h2o_cache_spill_to(caches[l], spill, (size_t)l, NULL, 0), "its layers");
  mlx_h2o_two_readings readings = begun(caches);
  read(caches, PROMPT, 1);
  read_again(readings, LAYERS);
  mlx_vector_array state = mlx_vector_array_new();
  expect(!mlx_h2o_second_reading_state(&state, readings), "its arrays");
  expect(mlx_vector_array_size(state) == LAYERS, "worths and no queries");
  expect(!mlx_h2o_two_readings_finish(readings, s), "finish with a file");
  expect(slots_of(caches, after) <= bound, "within the bound");
  refused(
      mlx_h2o_two_readings_begin(&readings, caches, LAYERS, PROMPT, ROOM, s),
      MLX_H2O_ERROR_SETTINGS, "a later prompt");
  go_on(caches, after, "with a file");
  const char* failure = NULL;
  expect(!mlx_h2o_spill_failure(&failure, spill) && !*failure, "the file goes on");
  mlx_vector_array_free(state);
  mlx_h2o_two_readings_free(readings);
  release(caches);
  mlx_h2o_spill_free(spill);
}

// What no model gives is no number to sort by: nothing breaks.
static void numbers_that_are_none(void) {
  const Settings settings = usual();
  mlx_h2o_cache caches[LAYERS];
  int after[LAYERS * Hk];
  make(caches, &settings);
  mlx_h2o_two_readings readings = begun(caches);
  read(caches, PROMPT, NAN);
  read_again(readings, LAYERS);
  expect(!mlx_h2o_two_readings_finish(readings, s), "finish without numbers");
  slots_of(caches, after);
  go_on(caches, after, "without numbers");
  mlx_h2o_two_readings_free(readings);
  release(caches);
}

static void refuse_beginnings(void) {
  const mlx_h2o_rope rope = {sizeof rope, D, 10000, 1, false};
  Settings all[] = {usual(), usual(), usual(), usual(), usual()};
  all[0].policy = "streaming", all[0].options.attending = false;
  all[1].options.remainder = false, all[1].options.rope = &rope;
  all[2].options.k_bits = all[2].options.v_bits = 4, all[2].options.group_size = 32;
  all[2].options.recent_bits = 8;
  all[3].setting = "unit", all[3].value = "layer";
  all[4].setting = "recent", all[4].value = "13";  // no slots but these and the room
  mlx_h2o_two_readings readings = mlx_h2o_two_readings_new();
  for (int i = 0; i < 5; ++i) {
    mlx_h2o_cache caches[LAYERS];
    int before[LAYERS * Hk], after[LAYERS * Hk];
    make(caches, &all[i]);
    slots_of(caches, before);
    const int room = i == 4 ? 12 : ROOM;
    refused(
        mlx_h2o_two_readings_begin(&readings, caches, LAYERS, PROMPT, room, s),
        MLX_H2O_ERROR_SETTINGS, "settings");
    slots_of(caches, after);
    expect(!readings.ctx && !memcmp(before, after, sizeof after), "nothing is changed");
    release(caches);
  }
  static const int numbers[][3] = {
      {LAYERS, 0, 0},       {LAYERS, -1, 0}, {LAYERS, INT_MAX, 0},      {LAYERS, 1 << 30, 0},
      {LAYERS, PROMPT, -1}, {0, PROMPT, 0},  {LAYERS, PROMPT, INT_MAX}, {-1, PROMPT, 0},
      {5000, PROMPT, 0}};
  const Settings settings = usual();
  mlx_h2o_cache caches[LAYERS];
  int before[LAYERS * Hk];
  make(caches, &settings);
  slots_of(caches, before);
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i)
    refused(
        mlx_h2o_two_readings_begin(
            &readings, caches, (size_t)(long long)numbers[i][0], numbers[i][1], numbers[i][2], s),
        MLX_H2O_ERROR_ARGUMENT, "numbers");
  const mlx_h2o_cache empty[LAYERS] = {caches[0], {NULL}};
  const mlx_stream nowhere = {NULL};
  refused(
      mlx_h2o_two_readings_begin(NULL, caches, LAYERS, PROMPT, 0, s), MLX_H2O_ERROR_ARGUMENT,
      "no place");
  refused(
      mlx_h2o_two_readings_begin(&readings, NULL, LAYERS, PROMPT, 0, s), MLX_H2O_ERROR_ARGUMENT,
      "no caches");
  refused(
      mlx_h2o_two_readings_begin(&readings, empty, LAYERS, PROMPT, 0, s), MLX_H2O_ERROR_ARGUMENT,
      "an empty cache");
  refused(
      mlx_h2o_two_readings_begin(&readings, caches, LAYERS, PROMPT, 0, nowhere),
      MLX_H2O_ERROR_ARGUMENT, "no stream");
  go_on(caches, before, "after what was refused");
  expect(!call(caches[0], NULL, 0, 1, 1, 1), "a step of one layer");
  refused(
      mlx_h2o_two_readings_begin(&readings, caches, LAYERS, PROMPT, 0, s), MLX_H2O_ERROR_STATE,
      "caches that do not agree");
  release(caches);
}

static void refuse_steps(void) {
  const Settings settings = usual();
  mlx_h2o_cache caches[LAYERS];
  make(caches, &settings);
  mlx_h2o_two_readings readings = begun(caches), none = mlx_h2o_two_readings_new();
  refused(call(caches[0], &readings, 0, 4, 1, 1), MLX_H2O_ERROR_STATE, "before any reading");
  read(caches, PROMPT - 1, 1);
  refused(call(caches[0], &readings, 0, 4, 1, 1), MLX_H2O_ERROR_STATE, "before the end");
  refused(mlx_h2o_two_readings_finish(readings, s), MLX_H2O_ERROR_STATE, "finish too early");
  read(caches, 1, 1);
  refused(mlx_h2o_two_readings_finish(readings, s), MLX_H2O_ERROR_STATE, "finish after one");
  refused(call(caches[0], &readings, LAYERS, 4, 1, 1), MLX_H2O_ERROR_ARGUMENT, "no such layer");
  refused(call(caches[0], &none, 0, 4, 1, 1), MLX_H2O_ERROR_ARGUMENT, "an empty handle");
  refused(mlx_h2o_two_readings_finish(none, s), MLX_H2O_ERROR_ARGUMENT, "finish of none");
  refused(mlx_h2o_two_readings_abandon(none, s), MLX_H2O_ERROR_ARGUMENT, "abandon of none");
  mlx_vector_array state = mlx_vector_array_new();
  refused(mlx_h2o_second_reading_state(&state, none), MLX_H2O_ERROR_ARGUMENT, "state of none");
  refused(mlx_h2o_second_reading_state(NULL, readings), MLX_H2O_ERROR_ARGUMENT, "no place");
  mlx_array q = rows(Hq, 4, 1, 1), k = rows(Hk, 4, 2, 1), v = rows(Hk, 4, 3, 1);
  mlx_array odd = rows(Hk, 5, 4, 1), out = mlx_array_new();
  const struct {
    mlx_array q, k, v, sinks;
    float scale;
  } wrong[] = {{q, odd, v, kNone, 0.2f},   {q, k, odd, kNone, 0.2f},   {odd, k, v, kNone, 0.2f},
               {kNone, k, v, kNone, 0.2f}, {q, kNone, v, kNone, 0.2f}, {q, k, kNone, kNone, 0.2f},
               {q, k, v, odd, 0.2f},       {q, k, v, kNone, NAN},      {q, q, v, kNone, 0.2f}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i)
    refused(
        mlx_h2o_second_reading_attend(
            &out, readings, 0, wrong[i].q, wrong[i].k, wrong[i].v, wrong[i].scale, wrong[i].sinks,
            s),
        MLX_H2O_ERROR_ARGUMENT, "a call");
  refused(
      mlx_h2o_second_reading_attend(NULL, readings, 0, q, k, v, 0.2f, kNone, s),
      MLX_H2O_ERROR_ARGUMENT, "no place");
  read_again(readings, LAYERS);
  // A cache that is changed in between.
  const int few[] = {20, 20}, many[] = {80, 80};
  expect(!mlx_h2o_cache_resize(caches[1], few, Hk, NULL, 0, s), "other slots");
  refused(call(caches[1], &readings, 1, 4, 1, 1), MLX_H2O_ERROR_STATE, "after other slots");
  refused(mlx_h2o_two_readings_finish(readings, s), MLX_H2O_ERROR_STATE, "finish after those");
  expect(!mlx_h2o_cache_resize(caches[1], many, Hk, NULL, 0, s), "slots again");
  refused(mlx_h2o_two_readings_finish(readings, s), MLX_H2O_ERROR_STATE, "rows that went");
  expect(!mlx_h2o_two_readings_abandon(readings, s), "abandon");
  go_on(caches, kBudgets[0], "after what was refused");
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(odd);
  mlx_vector_array_free(state);
  mlx_h2o_two_readings_free(readings);
  release(caches);
}

static void shares(void) {
  const int shape[] = {2, 3}, own[] = {1, 0}, none[] = {0, 0}, below[] = {1, -1};
  const float numbers[] = {NAN, NAN, NAN, 3, 2, 1};
  mlx_array worths = mlx_array_new_data(numbers, shape, 2, MLX_FLOAT32);
  int counts[2] = {7, 7};
  refused(mlx_h2o_shared_out(NULL, worths, 3, own, s), MLX_H2O_ERROR_ARGUMENT, "no place");
  refused(mlx_h2o_shared_out(counts, worths, 3, NULL, s), MLX_H2O_ERROR_ARGUMENT, "no own");
  refused(mlx_h2o_shared_out(counts, worths, -1, own, s), MLX_H2O_ERROR_ARGUMENT, "whole");
  refused(mlx_h2o_shared_out(counts, worths, 3, below, s), MLX_H2O_ERROR_ARGUMENT, "own");
  refused(mlx_h2o_shared_out(counts, kNone, 3, own, s), MLX_H2O_ERROR_ARGUMENT, "no worths");
  expect(counts[0] == 7 && counts[1] == 7, "nothing is written");
  expect(!mlx_h2o_shared_out(counts, worths, 2, none, s), "shares");
  expect(counts[0] == 0 && counts[1] == 2, "what is no number is worth least");
  mlx_array_free(worths);
}

int main(int argc, char** argv) {
  if (argc != 2) return fprintf(stderr, "twice FOLDER\n"), 2;
  s = mlx_default_cpu_stream_new();
  both_readings();
  abandoned();
  with_a_file(argv[1]);
  numbers_that_are_none();
  refuse_beginnings();
  refuse_steps();
  shares();
  mlx_stream_free(s);
  return failures != 0;
}
