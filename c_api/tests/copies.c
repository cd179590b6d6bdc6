// Caches that are copied or given other slots (tests/conformance/test_c_api.py). A copy goes on as
// the original would have, bit by bit, and neither sees the other; a resized cache holds what its
// slots allow. Ends with 0, or with 1 and what was otherwise.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mlx_h2o.h"
#include "numbers.h"

enum { Hq = 4, Hk = 2, D = 32, PROMPT = 30, STEPS = 12, MOST = 64 };

static const mlx_array kNone = {NULL};
static mlx_stream s;
static int failures = 0;

typedef struct Layer_ {
  const char *name, *policy;
  int budgets[Hk], smaller[Hk], larger[Hk];
  int bits, recent_bits, undo;
} Layer;

static const Layer kLayers[] = {
    {"salient", "salient", {24, 20}, {14, 18}, {40, 40}, 0, 0, 0},
    {"salient, newest apart", "salient", {24, 20}, {16, 16}, {40, 30}, 4, 8, 0},
    {"h2o with undo", "h2o", {24, 24}, {12, 20}, {25, 32}, 0, 0, 3},
    {"keydiff packed", "keydiff", {24, 30}, {14, 30}, {30, 30}, 8, 0, 0},
};

static void expect(bool holds, const char* layer, const char* what) {
  if (holds) return;
  fprintf(stderr, "copies: %s: %s (%s)\n", layer, what, mlx_h2o_last_error());
  ++failures;
}

static mlx_h2o_cache made(const Layer* layer, const int* budgets) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.k_bits = options.v_bits = layer->bits, options.group_size = 32;
  options.recent_bits = layer->recent_bits, options.undo = layer->undo;
  expect(
      !mlx_h2o_policy_named(&policy, layer->policy) &&
          !mlx_h2o_cache_make(&cache, policy, budgets, Hk, &options),
      layer->name, "a cache");
  mlx_h2o_policy_free(policy);
  return cache;
}

static mlx_array rows(int heads, int tokens, int seed) {
  const int shape[] = {1, heads, tokens, D};
  float numbers[Hq * PROMPT * D];
  fill_numbers(numbers, (size_t)heads * tokens * D, (uint64_t)seed, 0);
  return mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
}

// Takes tokens in; what is attended to is added to `sum`, whose bits tell conversations apart.
static void attend(mlx_h2o_cache cache, int tokens, int seed, double* sum) {
  mlx_array q = rows(Hq, tokens, seed), k = rows(Hk, tokens, seed + 1),
            v = rows(Hk, tokens, seed + 2);
  mlx_array out = mlx_array_new(), flat = mlx_array_new();
  expect(
      !mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.2f, "causal", kNone, kNone, s) &&
          !mlx_contiguous(&flat, out, false, s) && !mlx_array_eval(flat),
      "attention", "a step");
  const float* numbers = mlx_array_data_float32(flat);
  for (int i = 0; i < Hq * tokens * D; ++i) *sum = *sum * 1.0001 + numbers[i];
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  mlx_array_free(flat);
}

static double steps(mlx_h2o_cache cache, int seed) {
  double sum = 0;
  for (int i = 0; i < STEPS; ++i) attend(cache, 1, seed + 4 * i, &sum);
  return sum;
}

// Positions held; how many of a head's.
static int kept(mlx_h2o_cache cache, int* positions) {
  mlx_array held = mlx_array_new(), flat = mlx_array_new();
  int size = 0;
  expect(
      !mlx_h2o_cache_kept(&held, cache, s) && !mlx_contiguous(&flat, held, false, s) &&
          !mlx_array_eval(flat) && !mlx_h2o_cache_size(&size, cache) && size <= MOST,
      "kept", "positions");
  memcpy(positions, mlx_array_data_int32(flat), (size_t)Hk * size * sizeof *positions);
  mlx_array_free(held), mlx_array_free(flat);
  return size;
}

static bool same_kept(mlx_h2o_cache one, mlx_h2o_cache other) {
  int a[Hk * MOST], b[Hk * MOST];
  const int size = kept(one, a);
  return size == kept(other, b) && !memcmp(a, b, (size_t)Hk * size * sizeof *a);
}

static void copies(const Layer* layer) {
  mlx_h2o_cache never = made(layer, layer->budgets), one = made(layer, layer->budgets);
  mlx_h2o_cache twin = mlx_h2o_cache_new();
  double sum = 0;
  expect(!mlx_h2o_cache_copy(&twin, one, s), layer->name, "a copy without tokens");
  attend(never, PROMPT, 1, &sum), attend(one, PROMPT, 1, &sum);
  steps(never, 100), steps(one, 100);
  // In the place of the one before.
  expect(!mlx_h2o_cache_copy(&twin, one, s), layer->name, "a copy");
  expect(same_kept(one, twin), layer->name, "what a copy holds");
  int could = 0, can = 0;
  expect(
      !mlx_h2o_cache_trimmable(&could, one) && !mlx_h2o_cache_trimmable(&can, twin) && can == could,
      layer->name, "what a copy can take back");
  // The copy goes on otherwise, and the original as if there were none.
  const double otherwise = steps(twin, 900), as_before = steps(never, 200);
  expect(steps(one, 200) == as_before, layer->name, "the original after its copy");
  expect(same_kept(one, never), layer->name, "what the original holds");
  expect(otherwise != as_before, layer->name, "two conversations");
  // And the other way round.
  expect(!mlx_h2o_cache_copy(&twin, one, s), layer->name, "a copy again");
  mlx_h2o_cache_free(one);
  expect(steps(twin, 300) == steps(never, 300), layer->name, "a copy after its original");
  expect(same_kept(twin, never), layer->name, "what the copy holds");
  mlx_h2o_cache_free(never), mlx_h2o_cache_free(twin);
}

static void resizes(const Layer* layer) {
  mlx_h2o_cache cache = made(layer, layer->budgets), small = made(layer, layer->smaller);
  int before[Hk * MOST], after[Hk * MOST], offset = 0;
  int64_t evicted = 0;
  double sum = 0;
  expect(
      !mlx_h2o_cache_resize(cache, layer->smaller, Hk, NULL, 0, s), layer->name,
      "slots before any token");
  attend(cache, PROMPT, 1, &sum), attend(small, PROMPT, 1, &sum);
  expect(steps(cache, 100) == steps(small, 100), layer->name, "slots from the beginning");
  expect(!mlx_h2o_cache_resize(cache, layer->larger, Hk, NULL, 0, s), layer->name, "more slots");
  expect(same_kept(cache, small), layer->name, "what more slots hold at first");
  for (int i = 0; i < 3; ++i) steps(cache, 500 + 100 * i);
  const int filled = kept(cache, before);
  expect(
      filled == (layer->larger[0] > layer->larger[1] ? layer->larger[0] : layer->larger[1]),
      layer->name, "more slots are filled");
  // What cannot be is refused, and changes nothing.
  const int too_few[] = {1, 1}, negative[] = {24, -3};
  expect(mlx_h2o_cache_resize(cache, too_few, Hk, NULL, 0, s), layer->name, "too few slots");
  expect(mlx_h2o_cache_resize(cache, negative, Hk, NULL, 0, s), layer->name, "slots below 0");
  expect(
      mlx_h2o_cache_resize(cache, layer->smaller, 1, NULL, 0, s), layer->name, "slots of one head");
  expect(mlx_h2o_cache_resize(cache, NULL, Hk, NULL, 0, s), layer->name, "no slots");
  expect(
      kept(cache, after) == filled && !memcmp(before, after, (size_t)Hk * filled * sizeof *before),
      layer->name, "what refusals leave");
  expect(!mlx_h2o_cache_resize(cache, layer->smaller, Hk, NULL, 0, s), layer->name, "fewer slots");
  expect(
      !mlx_h2o_cache_offset(&offset, cache) && !mlx_h2o_cache_evicted(&evicted, cache) &&
          evicted == offset - (layer->smaller[0] + layer->smaller[1]) / 2,
      layer->name, "the evicted");
  // Fewer slots hold some of the same tokens, the newest among them.
  const int size = kept(cache, after);
  for (int h = 0; h < Hk; ++h) {
    int found = 0;
    for (int i = 0; i < size; ++i)
      for (int j = 0; j < filled && after[h * size + i] >= 0; ++j)
        found += before[h * filled + j] == after[h * size + i];
    expect(found == layer->smaller[h], layer->name, "tokens of fewer slots");
    expect(after[h * size + layer->smaller[h] - 1] == offset - 1, layer->name, "the newest token");
  }
  steps(cache, 900);
  mlx_h2o_cache_free(cache), mlx_h2o_cache_free(small);
}

// Slots are shared out anew as a conversation grows, but not between drafted tokens, which come one
// by one or together: all but the first can be taken back.
static void grows_between_drafts(bool together, int rejected) {
  enum { DRAFTED = 4 };
  const char* name = together ? "drafts together" : "drafts one by one";
  const int budgets[] = {20, 20}, filling[] = {20, 28, 12, 40, 12, 28};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.undo = DRAFTED, options.filling = filling, options.n_stages = 2;
  expect(
      !mlx_h2o_policy_named(&policy, "h2o") &&
          !mlx_h2o_cache_make(&cache, policy, budgets, Hk, &options),
      name, "a cache that grows and takes tokens back");
  mlx_h2o_policy_free(policy);
  double sum = 0;
  int64_t evicted = 0;
  attend(cache, 16, 1, &sum);
  for (int i = 0, offset = 16, after = 0; i < 60 && offset < 60; ++i, offset = after) {
    for (int t = 0; t < (together ? 1 : DRAFTED); ++t)
      attend(cache, together ? DRAFTED : 1, 100 + 10 * i + t, &sum);
    expect(!mlx_h2o_cache_trim(cache, rejected, s), name, "rejected drafts");
    expect(
        !mlx_h2o_cache_offset(&after, cache) && after == offset + DRAFTED - rejected, name,
        "the tokens that stay");
    expect(
        !mlx_h2o_cache_evicted(&evicted, cache) && (after > 20 || !evicted), name,
        "everything while it fits");
  }
  int slots[Hk];
  size_t heads = Hk;
  expect(
      !mlx_h2o_cache_budgets(slots, &heads, cache) && slots[0] == 12 && slots[1] == 28, name,
      "the last shares");
  mlx_h2o_cache_free(cache);
}

int main(void) {
  s = mlx_default_cpu_stream_new();
  for (size_t i = 0; i < sizeof kLayers / sizeof *kLayers; ++i) {
    copies(&kLayers[i]);
    resizes(&kLayers[i]);
  }
  for (int rejected = 0; rejected < 4; ++rejected) {
    grows_between_drafts(false, rejected);
    grows_between_drafts(true, rejected);
  }
  mlx_h2o_cache empty = mlx_h2o_cache_new(), res = mlx_h2o_cache_new();
  expect(mlx_h2o_cache_copy(&res, empty, s) && !res.ctx, "none", "a copy of no cache");
  expect(mlx_h2o_cache_copy(NULL, empty, s), "none", "a copy without a place");
  mlx_stream_free(s);
  return failures != 0;
}
