// Policies of a program's own, chunks that are shortened, pins that are missed, and rows handed out
// without a copy (tests/conformance/test_c_api.py). Ends with 0, or with 1 and what was otherwise.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRAM "own"
#include "expect.h"
#include "mlx_h2o.h"
#include "numbers.h"

enum { Hq = 4, Hk = 2, D = 32, PROMPT = 60, SLOTS = 24, MOST = 600 };

static const mlx_array kNone = {NULL};
static mlx_stream s;

static mlx_array rows(int heads, int from, int to, uint64_t seed) {
  const int shape[] = {1, heads, to - from, D};
  float numbers[Hq * PROMPT * D], all[PROMPT * D];
  for (int h = 0; h < heads; ++h) {
    fill_numbers(all, PROMPT * D, seed + (uint64_t)h, 0);
    memcpy(
        numbers + h * (to - from) * D, all + from * D, sizeof(float) * (size_t)((to - from) * D));
  }
  return mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
}

// Takes the tokens from to `to` - 1 of a text in; a number that tells outputs apart.
static int attend(mlx_h2o_cache cache, int from, int to, uint64_t seed, double* sum) {
  mlx_array q = rows(Hq, from, to, seed), k = rows(Hk, from, to, seed + 10);
  mlx_array v = rows(Hk, from, to, seed + 20), out = mlx_array_new(), flat = mlx_array_new();
  const int status =
      mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.2f, "causal", kNone, kNone, s) ||
      mlx_contiguous(&flat, out, false, s) || mlx_array_eval(flat);
  for (int i = 0; !status && i < Hq * (to - from) * D; ++i)
    *sum = *sum * 1.0001 + mlx_array_data_float32(flat)[i];
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  mlx_array_free(flat);
  return status;
}

static bool same_kept(mlx_h2o_cache a, mlx_h2o_cache b) {
  mlx_array one = mlx_array_new(), other = mlx_array_new(), same = mlx_array_new();
  bool equal = false;
  expect(
      !mlx_h2o_cache_kept(&one, a, s) && !mlx_h2o_cache_kept(&other, b, s) &&
          !mlx_array_equal(&same, one, other, false, s) && !mlx_array_item_bool(&equal, same),
      "positions");
  mlx_array_free(one), mlx_array_free(other), mlx_array_free(same);
  return equal;
}

static mlx_h2o_cache made(mlx_h2o_policy policy, int undo) {
  const int budgets[] = {SLOTS, SLOTS};
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.undo = undo;
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, Hk, &options), "a cache");
  return cache;
}

// -- a policy of one's own ------------------------------------------------------------------------

typedef struct Own_ {
  int accumulated, ranked, destroyed;
  int fails;  // 1: with a number, 2: with another shape, 3: with nothing
} Own;

static int sum_mass(
    void* context, mlx_array* res, const mlx_array scores, const mlx_h2o_observation* seen,
    const mlx_stream stream) {
  ++((Own*)context)->accumulated;
  if (!seen->stands_for.ctx) return mlx_add(res, scores, seen->mass, stream);
  mlx_array mass = mlx_array_new();
  const int status = mlx_multiply(&mass, seen->mass, seen->stands_for, stream) ||
      mlx_add(res, scores, mass, stream);
  mlx_array_free(mass);
  return status;
}

static int by_score(
    void* context, mlx_array* res, const mlx_h2o_slots* slots, const mlx_stream stream) {
  Own* own = context;
  (void)stream;
  ++own->ranked;
  if (own->fails == 1) return 5;
  if (own->fails == 3) return 0;
  return mlx_array_set(res, own->fails == 2 ? slots->keys : slots->scores);
}

static void destroy(void* context) {
  ++((Own*)context)->destroyed;
}

static mlx_h2o_policy own_policy(Own* own, bool sums) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  const mlx_h2o_policy_functions functions = {sizeof functions,       true,     own,
                                              sums ? NULL : sum_mass, by_score, destroy};
  expect(!mlx_h2o_policy_own(&policy, "mine", &functions), "a policy of one's own");
  return policy;
}

// H2O, written anew: the same positions and outputs, with the library's sum of masses and ours.
static void as_h2o(bool sums) {
  Own own = {0};
  mlx_h2o_policy mine = own_policy(&own, sums), h2o = mlx_h2o_policy_new();
  expect(!mlx_h2o_policy_named(&h2o, "h2o"), "h2o");
  mlx_h2o_cache a = made(mine, 0), b = made(h2o, 0), back = mlx_h2o_cache_new();
  mlx_map_string_to_array arrays = mlx_map_string_to_array_new();
  mlx_string settings = mlx_string_new();
  // Plain MLX for both: kernels round otherwise.
  expect(!mlx_h2o_cache_use_kernels(a, false) && !mlx_h2o_cache_use_kernels(b, false), "plain");
  double x = 0, y = 0;
  expect(!attend(a, 0, 40, 1, &x) && !attend(b, 0, 40, 1, &y), "a prompt");
  for (int i = 40; i < PROMPT; ++i)
    expect(!attend(a, i, i + 1, 1, &x) && !attend(b, i, i + 1, 1, &y), "a step");
  expect(x == y && same_kept(a, b), "what H2O does");
  expect(own.ranked && !own.accumulated == sums, "the functions were asked");
  // Saved, and gone on with.
  expect(!mlx_h2o_cache_arrays(&arrays, &settings, a, s), "arrays");
  expect(
      mlx_h2o_cache_restore(&back, mlx_h2o_policy_new(), arrays, mlx_string_data(settings), s) &&
          mlx_h2o_last_error_code() == MLX_H2O_ERROR_SAVED,
      "a policy that is not known");
  expect(
      mlx_h2o_cache_restore(&back, h2o, arrays, mlx_string_data(settings), s) && !back.ctx,
      "another policy");
  expect(
      !mlx_h2o_cache_arrays(&arrays, &settings, b, s) &&
          mlx_h2o_cache_restore(&back, h2o, arrays, mlx_string_data(settings), s) && !back.ctx &&
          mlx_h2o_last_error_code() == MLX_H2O_ERROR_ARGUMENT,
      "a policy of the library where one of the program's own is due");
  expect(!mlx_h2o_cache_arrays(&arrays, &settings, a, s), "arrays");
  expect(!mlx_h2o_cache_restore(&back, mine, arrays, mlx_string_data(settings), s), "it");
  expect(!mlx_h2o_cache_use_kernels(back, false), "plain");
  x = y = 0;
  expect(!attend(back, 3, 4, 7, &x) && !attend(b, 3, 4, 7, &y) && x == y, "a step after that");
  mlx_map_string_to_array_free(arrays), mlx_string_free(settings);
  mlx_h2o_policy_free(mine), mlx_h2o_policy_free(h2o), mlx_h2o_cache_free(a);
  expect(!own.destroyed, "a cache still has it");
  mlx_h2o_cache_free(back), mlx_h2o_cache_free(b);
  expect(own.destroyed == 1, "destroyed once");
}

static void failing(void) {
  for (int how = 1; how <= 3; ++how) {
    Own own = {0};
    double x = 0;
    mlx_h2o_policy mine = own_policy(&own, true);
    mlx_h2o_cache cache = made(mine, 0);
    expect(!attend(cache, 0, 40, 1, &x), "a prompt");
    own.fails = how;
    expect(attend(cache, 40, 41, 1, &x), "a step that fails");
    expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_PROGRAM, "by the program");
    own.fails = 0;
    expect(attend(cache, 41, 42, 1, &x), "a step after that");
    expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_STATE, "which cannot be");
    mlx_h2o_policy_free(mine), mlx_h2o_cache_free(cache);
  }
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  Own own = {0};
  mlx_h2o_policy_functions f = {sizeof f, true, &own, sum_mass, by_score, destroy}, wrong = f;
  expect(mlx_h2o_policy_own(NULL, "mine", &f), "no place");
  expect(mlx_h2o_policy_own(&policy, "", &f) && mlx_h2o_policy_own(&policy, NULL, &f), "no name");
  expect(mlx_h2o_policy_own(&policy, "mine", NULL), "no functions");
  wrong.priority = NULL;
  expect(mlx_h2o_policy_own(&policy, "mine", &wrong), "no priority");
  wrong = f, wrong.size = offsetof(mlx_h2o_policy_functions, priority);
  expect(mlx_h2o_policy_own(&policy, "mine", &wrong), "no size");
  wrong = f, wrong.needs_attention = false;
  expect(mlx_h2o_policy_own(&policy, "mine", &wrong) && !policy.ctx, "scores without attention");
  expect(!own.destroyed, "what failed destroys nothing");
  // A program of before there was `destroy`, and one of a later version.
  wrong = f, wrong.size = offsetof(mlx_h2o_policy_functions, destroy);
  expect(!mlx_h2o_policy_own(&policy, "mine", &wrong), "fewer functions");
  struct {
    mlx_h2o_policy_functions known;
    void (*later)(void*);
  } more = {f, NULL};
  more.known.size = sizeof more;
  expect(!mlx_h2o_policy_own(&policy, "mine", &more.known), "a later function, which is NULL");
  more.later = destroy;
  expect(mlx_h2o_policy_own(&policy, "mine", &more.known), "a later function");
  mlx_h2o_policy_free(policy);
  expect(own.destroyed == 1, "where the struct ends before `destroy` nothing is destroyed");
}

// A cache that a function broke, be it in a step or between steps, gives and takes nothing more.
static void broken(bool in_step) {
  Own own = {0};
  double x = 0;
  const int few[] = {16, 16}, span[] = {30, 32};
  mlx_h2o_policy mine = own_policy(&own, true);
  mlx_h2o_cache cache = made(mine, 2), twin = mlx_h2o_cache_new();
  mlx_map_string_to_array arrays = mlx_map_string_to_array_new();
  mlx_string settings = mlx_string_new();
  mlx_array kept = mlx_array_new();
  const char* mode = NULL;
  expect(!attend(cache, 0, 40, 1, &x) && !attend(cache, 40, 41, 1, &x), "a prompt and a step");
  own.fails = 1;
  expect(
      in_step ? attend(cache, 41, 42, 1, &x) : mlx_h2o_cache_resize(cache, few, Hk, NULL, 0, s),
      "fails");
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_PROGRAM, "by the program");
  own.fails = 0;
#define BROKEN(call) \
  expect((call) && mlx_h2o_last_error_code() == MLX_H2O_ERROR_STATE, "broken for " #call);
  BROKEN(attend(cache, 42, 43, 1, &x))
  BROKEN(mlx_h2o_cache_arrays(&arrays, &settings, cache, s))
  BROKEN(mlx_h2o_cache_copy(&twin, cache, s))
  BROKEN(mlx_h2o_cache_kept(&kept, cache, s))
  BROKEN(mlx_h2o_cache_trim(cache, 1, s))
  BROKEN(mlx_h2o_cache_resize(cache, few, Hk, NULL, 0, s))
  BROKEN(mlx_h2o_cache_pin(NULL, cache, span, 1, s))
  BROKEN(mlx_h2o_cache_make_mask(&mode, &kept, cache, 3, true, s))
#undef BROKEN
  mlx_map_string_to_array_free(arrays), mlx_string_free(settings), mlx_array_free(kept);
  mlx_h2o_policy_free(mine), mlx_h2o_cache_free(cache), mlx_h2o_cache_free(twin);
}

// A file says a policy by its name, so that no policy of one's own may have one of the library's.
static void names_that_are_taken(void) {
  const char* const names[] = {"h2o", "salient", "paper", "h2o-paper", "ema-logits", "snapkv"};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  Own own = {0};
  const mlx_h2o_policy_functions f = {sizeof f, true, &own, NULL, by_score, destroy};
  for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
    expect(
        mlx_h2o_policy_own(&policy, names[i], &f) && !policy.ctx &&
            mlx_h2o_last_error_code() == MLX_H2O_ERROR_SETTINGS,
        names[i]);
  expect(!own.destroyed, "what was refused destroys nothing");
}

// -- undo across a chunk's end, and pins ----------------------------------------------------------

static void shortened(const char* name) {
  const int undo = 3;
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  expect(!mlx_h2o_policy_named(&policy, name), name);
  for (int before = 0; before <= 30; before += 30)
    for (int n = 1; n <= undo; ++n) {
      double x = 0, y = 0, ignored = 0;
      int most = 0, offset = 0;
      mlx_h2o_cache a = made(policy, undo), b = made(policy, undo), twin = mlx_h2o_cache_new();
      if (before) expect(!attend(a, 0, before, 1, &x) && !attend(b, 0, before, 1, &y), "a prompt");
      expect(!attend(a, before, 59, 1, &ignored), "a chunk");
      expect(!attend(b, before, 59 - n, 1, &ignored), "a shorter chunk");
      expect(!mlx_h2o_cache_trimmable(&most, a) && most == undo, "its end can be taken back");
      expect(mlx_h2o_cache_trim(a, undo + 1, s), "not more");
      expect(!mlx_h2o_cache_copy(&twin, a, s), "a copy");
      expect(!mlx_h2o_cache_trim(a, n, s) && !mlx_h2o_cache_trim(twin, n, s), "taken back");
      expect(!mlx_h2o_cache_offset(&offset, a) && offset == 59 - n, "the offset");
      expect(same_kept(a, b) && same_kept(twin, b), "as if it had ended before");
      expect(!attend(a, 50, 51, 5, &x) && !attend(b, 50, 51, 5, &y) && x == y, "and the next step");
      expect(!mlx_h2o_cache_trimmable(&most, a) && most == 1, "after it the chunk stays");
      mlx_h2o_cache_free(a), mlx_h2o_cache_free(b), mlx_h2o_cache_free(twin);
    }
  mlx_h2o_policy_free(policy);
}

static void missed_pins(void) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  double x = 0;
  int missing = -1, held[2 * SLOTS], spans[2 * PROMPT];
  size_t count = 9;
  mlx_array kept = mlx_array_new(), flat = mlx_array_new();
  expect(!mlx_h2o_policy_named(&policy, "h2o"), "h2o");
  mlx_h2o_cache cache = made(policy, 0);
  expect(!mlx_h2o_cache_missing(NULL, &count, cache) && !count, "none yet");
  expect(!attend(cache, 0, 50, 1, &x), "a prompt");
  expect(!mlx_h2o_cache_kept(&kept, cache, s), "kept");
  expect(!mlx_contiguous(&flat, kept, false, s) && !mlx_array_eval(flat), "kept");
  memcpy(held, mlx_array_data_int32(flat), sizeof held);
  const int span[] = {20, 26};
  expect(!mlx_h2o_cache_pin(&missing, cache, span, 1, s), "pins");
  expect(!mlx_h2o_cache_missing(NULL, &count, cache) && count <= 6, "how many spans");
  expect(!mlx_h2o_cache_missing(spans, &count, cache), "which");
  size_t more = count + 1;
  expect(mlx_h2o_cache_missing(spans, &more, cache), "no more");
  int told = 0;
  for (int p = 0; p < 50; ++p) {
    int holding = 0;
    bool said = false;
    for (int i = 0; i < 2 * SLOTS; ++i) holding += held[i] == p;
    for (size_t i = 0; i < count; ++i) said = said || (spans[2 * i] <= p && p < spans[2 * i + 1]);
    expect(said == (p >= 20 && p < 26 && holding < Hk), "a pin that some head cannot keep");
    told += said;
  }
  expect(told == missing && missing > 0, "as many as were said");
  mlx_array_free(kept), mlx_array_free(flat);
  mlx_h2o_cache_free(cache), mlx_h2o_policy_free(policy);
}

// -- rows for a model that attends by itself ------------------------------------------------------

static void views(void) {
  const int budgets[] = {MOST, MOST};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.attending = false;
  size_t active = 0, peak = 0, bytes = 0;
  int steps = 0, small = 0;
  expect(
      !mlx_h2o_policy_named(&policy, "streaming") &&
          !mlx_h2o_policy_set(policy, "evict_every", "64") &&
          !mlx_h2o_cache_make(&cache, policy, budgets, Hk, &options),
      "a cache");
  for (int i = 0; i < MOST + 150; ++i) {
    const bool counted = i > MOST + 100 && i % 64;
    mlx_array k = rows(Hk, i % PROMPT, i % PROMPT + 1, 3), keys = mlx_array_new();
    mlx_array values = mlx_array_new(), mask = mlx_array_new();
    expect(!mlx_get_active_memory(&active) && !mlx_reset_peak_memory(), "memory");
    expect(!mlx_h2o_cache_update_and_fetch(&keys, &values, &mask, cache, k, k, s), "a step");
    mlx_vector_array all = mlx_vector_array_new();
    mlx_vector_array_append_value(all, keys), mlx_vector_array_append_value(all, values);
    expect(!mlx_eval(all) && !mlx_get_peak_memory(&peak), "eval");
    mlx_vector_array_free(all);
    mlx_array_free(k), mlx_array_free(keys), mlx_array_free(values), mlx_array_free(mask);
    // MLX's thread lets go of a step's rows only when that step's work is done.
    expect(!mlx_synchronize(s), "the end of a step");
    expect(!mlx_h2o_cache_nbytes(&bytes, cache), "bytes");
    if (counted && getenv("OWN_BYTES"))
      printf("%d: %zu of %zu bytes in a step\n", i, peak - active, bytes);
    steps += counted, small += counted && peak - active < bytes / 8;
  }
  // A live view of a buffer would cost a copy at every step. Within a step the victim's row is read
  // before its slot is written, and where MLX's thread has not read it yet the write is a copy: on
  // a crowded machine that is more than half of the steps.
  expect(steps > 40 && small * 8 > steps, "no copies of the cache");
  mlx_h2o_cache_free(cache), mlx_h2o_policy_free(policy);
}

int main(void) {
  s = mlx_default_cpu_stream_new();
  as_h2o(true);
  as_h2o(false);
  failing();
  broken(true), broken(false);
  names_that_are_taken();
  shortened("salient"), shortened("tova"), shortened("keydiff");
  missed_pins();
  views();
  mlx_stream_free(s);
  return failures != 0;
}
