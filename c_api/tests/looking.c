// Masks, and looking at what a cache holds (tests/conformance/test_c_api.py). Ends with 0, or with
// 1 and what was otherwise.
//
//   looking        masks of chunks and drafts, and rows as they came
//   looking steps [fused]  looking between steps; fused ones go on, and nothing is copied
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRAM "looking"
#include "expect.h"
#include "mlx_h2o.h"
#include "numbers.h"

enum { Hq = 4, Hk = 2, D = 32, PROMPT = 40, MOST = 64, STEPS = 6 };

static const mlx_array kNone = {NULL};
static mlx_stream s;

static mlx_h2o_cache made(const char* name, int slots, int undo, bool attending) {
  const int budgets[] = {slots, slots};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.undo = undo, options.attending = attending;
  expect(
      !mlx_h2o_policy_named(&policy, name) &&
          !mlx_h2o_cache_make(&cache, policy, budgets, Hk, &options),
      "a cache");
  mlx_h2o_policy_free(policy);
  return cache;
}

// Rows [1, heads, tokens, D], of which one token's may be others.
static mlx_array rows(int heads, int tokens, uint64_t seed, int other) {
  const int shape[] = {1, heads, tokens, D};
  float numbers[Hq * PROMPT * D];
  fill_numbers(numbers, (size_t)heads * tokens * D, seed, 0);
  for (int h = 0; h < heads && other >= 0; ++h)
    for (int i = 0; i < D; ++i) numbers[(h * tokens + other) * D + i] *= -3;
  return mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
}

// [rows, columns] booleans, or numbers to add: what a causal mask hides, and one column besides.
static mlx_array mask(int queries, int columns, int hidden, bool added) {
  float numbers[PROMPT * MOST];
  const int shape[] = {queries, columns}, older = columns - queries;
  for (int i = 0; i < queries; ++i)
    for (int j = 0; j < columns; ++j) {
      const bool visible = j <= older + i && (j != older + hidden || i == hidden);
      numbers[i * columns + j] = added ? (visible ? 0 : -3.4028234663852886e38f) : visible;
    }
  mlx_array exact = mlx_array_new_data(numbers, shape, 2, MLX_FLOAT32), cast = mlx_array_new();
  expect(!mlx_astype(&cast, exact, added ? MLX_FLOAT32 : MLX_BOOL, s), "a mask");
  mlx_array_free(exact);
  return cast;
}

// Takes tokens in, with a mask unless the mode is NULL; the outputs of a token.
static void attend(
    mlx_h2o_cache cache, int tokens, uint64_t seed, int other, const char* mode, mlx_array given,
    int token, float* res) {
  mlx_array q = rows(Hq, tokens, seed, -1), k = rows(Hk, tokens, seed + 1, other);
  mlx_array v = rows(Hk, tokens, seed + 2, other), out = mlx_array_new(), flat = mlx_array_new();
  const int status = mlx_h2o_cache_update_and_attend(
      &out, cache, q, k, v, 0.2f, mode ? mode : "causal", mode ? given : kNone, kNone, s);
  expect(!status && !mlx_contiguous(&flat, out, false, s) && !mlx_array_eval(flat), "a step");
  for (int h = 0; res && !status && h < Hq; ++h)
    memcpy(res + h * D, mlx_array_data_float32(flat) + (h * tokens + token) * D, D * sizeof *res);
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  mlx_array_free(flat);
}

static bool near(const float* a, const float* b) {
  for (int i = 0; i < Hq * D; ++i)
    if (!(a[i] - b[i] < 1e-4f && b[i] - a[i] < 1e-4f)) return false;
  return true;
}

// What is said by a causal mask and by arrays is the same, and what they hide is not seen.
static void masks(const char* policy, int undo) {
  const int chunk = 4, last = chunk - 1;
  float want[Hq * D], got[Hq * D];
  mlx_h2o_cache plain = made(policy, 24, undo, true);
  attend(plain, PROMPT, 1, -1, NULL, kNone, 0, NULL);
  attend(plain, chunk, 50, -1, NULL, kNone, last, want);
  // Drafts go token by token: each sees all that came before it.
  for (int how = 0; how < (undo ? 3 : 6); ++how) {
    mlx_h2o_cache cache = made(policy, 24, undo, true);
    mlx_array one = mask(PROMPT, PROMPT, -1, how == 1);
    attend(cache, PROMPT, 1, -1, how ? "array" : "causal", how ? one : kNone, 0, NULL);
    // Columns for what is held before are there or not, and say nothing.
    mlx_array two =
        mask(chunk, how == 2 ? chunk + 24 : chunk, how > 2 ? 1 : -1, how == 1 || how == 4);
    attend(
        cache, chunk, 50, how == 5 ? 1 : -1, how ? "array" : "causal", how ? two : kNone, last,
        got);
    if (how <= 2) expect(near(got, want), "a causal mask, however it is said");
    if (how == 3) {
      expect(!near(got, want), "a hidden token");
      memcpy(want, got, sizeof want);
    }
    if (how == 4) expect(near(got, want), "the same hidden token");
    // How the hidden token's row is does not matter.
    if (how == 5) expect(near(got, want), "another hidden token");
    mlx_array_free(one), mlx_array_free(two);
    mlx_h2o_cache_free(cache);
  }
  mlx_h2o_cache_free(plain);
}

static void all_visible(void) {
  float seen[Hq * D], unseen[Hq * D];
  mlx_h2o_cache cache = made("keydiff", 40, 0, true), other = made("keydiff", 40, 0, true);
  attend(cache, 8, 1, -1, "", kNone, 0, seen);
  attend(other, 8, 1, 7, "", kNone, 0, unseen);
  expect(!near(seen, unseen), "the first token sees the last");
  mlx_h2o_cache_free(cache), mlx_h2o_cache_free(other);
}

static void wrong_masks(void) {
  mlx_h2o_cache cache = made("h2o", 24, 0, true);
  mlx_array q = rows(Hq, 4, 1, -1), k = rows(Hk, 4, 2, -1), out = mlx_array_new();
  mlx_array few = mask(4, 4, -1, false), fine = mask(4, 4, -1, true), whole = mlx_array_new();
  mlx_array cut = mlx_array_new();
  const int start[] = {0, 0}, stop[] = {4, 3}, steps[] = {1, 1};
  int offset = 1;
  expect(
      !mlx_astype(&whole, few, MLX_INT32, s) &&
          !mlx_slice(&cut, few, start, 2, stop, 2, steps, 2, s),
      "masks");
#define REFUSED(mode, m)                                                                \
  expect(                                                                               \
      mlx_h2o_cache_update_and_attend(&out, cache, q, k, k, 0.2f, mode, m, kNone, s) && \
          mlx_h2o_last_error_code() == MLX_H2O_ERROR_ARGUMENT,                          \
      "a mask is refused: " mode)
  REFUSED("array", whole);
  REFUSED("array", cut);
  REFUSED("array", k);
  REFUSED("array", kNone);
  REFUSED("causal", fine);
  REFUSED("none", kNone);
#undef REFUSED
  expect(!mlx_h2o_cache_offset(&offset, cache) && !offset, "nothing came");
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(out), mlx_array_free(few);
  mlx_array_free(fine), mlx_array_free(whole), mlx_array_free(cut);
  mlx_h2o_cache_free(cache);
}

static void masks_before(void) {
  mlx_h2o_cache cache = made("h2o", 24, 0, true);
  mlx_array found = mlx_array_new();
  const char* mode = NULL;
#define MODE(n, as_array, said)                                                              \
  expect(                                                                                    \
      !mlx_h2o_cache_make_mask(&mode, &found, cache, n, as_array, s) && !strcmp(mode, said), \
      "the mask of " #n)
  MODE(1, true, "");
  MODE(5, false, "causal");
  attend(cache, PROMPT, 1, -1, NULL, kNone, 0, NULL);
  MODE(3, true, "array");
  expect(
      mlx_array_dim(found, 0) == 3 && mlx_array_dim(found, 1) == 27 &&
          mlx_array_dtype(found) == MLX_BOOL,
      "booleans for what is held and what comes");
  attend(cache, 3, 9, -1, mode, found, 0, NULL);
  MODE(1, false, "");
  expect(!found.ctx, "no mask");
  expect(mlx_h2o_cache_make_mask(&mode, &found, cache, 0, false, s), "a mask of no token");
  expect(mlx_h2o_cache_make_mask(NULL, &found, cache, 1, false, s), "no place");
  mlx_h2o_cache_free(cache);
  // Of plain rows: what taking the rows in gives, and before it.
  cache = made("keydiff", 32, 0, false);
  mlx_array out[3] = {mlx_array_new(), mlx_array_new(), mlx_array_new()}, same = mlx_array_new();
  const int chunks[] = {20, 20, 1, 1, 5, 1};
  for (int i = 0; i < 6; ++i) {
    mlx_array k = rows(Hk, chunks[i], 30 + (uint64_t)i, -1);
    bool equal = false;
    expect(!mlx_h2o_cache_make_mask(&mode, &found, cache, chunks[i], false, s), "before");
    expect(!mlx_h2o_cache_update_and_fetch(&out[0], &out[1], &out[2], cache, k, k, s), "rows");
    expect((out[2].ctx != NULL) == !strcmp(mode, "array"), "whether there is one");
    if (out[2].ctx)
      expect(
          !mlx_array_equal(&same, found, out[2], true, s) && !mlx_array_item_bool(&equal, same) &&
              equal,
          "the same mask");
    expect(!mlx_array_eval(out[0]), "eval");
    mlx_array_free(k);
  }
  for (int i = 0; i < 3; ++i) mlx_array_free(out[i]);
  mlx_array_free(found), mlx_array_free(same);
  mlx_h2o_cache_free(cache);
}

// Rows that are all held come out as they came in.
static void rows_as_they_came(void) {
  mlx_h2o_cache cache = made("distinct", 24, 0, true);
  mlx_array k = rows(Hk, 20, 6, -1), v = rows(Hk, 20, 7, -1), q = rows(Hq, 20, 5, -1);
  mlx_array out = mlx_array_new(), held[3] = {mlx_array_new(), mlx_array_new(), mlx_array_new()};
  expect(mlx_h2o_cache_rows(&held[0], &held[1], &held[2], cache, s), "no rows yet");
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_STATE, "since none came");
  expect(
      !mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.2f, "causal", kNone, kNone, s),
      "a prompt");
  expect(!mlx_h2o_cache_rows(&held[0], &held[1], &held[2], cache, s), "rows");
  const mlx_array came[] = {k, v};
  for (int i = 0; i < 2; ++i) {
    mlx_array same = mlx_array_new();
    bool equal = false;
    expect(
        !mlx_array_equal(&same, held[i], came[i], true, s) && !mlx_array_item_bool(&equal, same) &&
            equal,
        "rows as they came");
    mlx_array_free(same);
  }
  expect(!mlx_array_eval(held[2]) && mlx_array_data_int32(held[2])[39] == 19, "positions");
  mlx_array_free(k), mlx_array_free(v), mlx_array_free(q), mlx_array_free(out);
  for (int i = 0; i < 3; ++i) mlx_array_free(held[i]);
  mlx_h2o_cache_free(cache);
}

// One conversation is looked at after every step and another is not; with what was seen kept.
static void steps(bool fused) {
  enum { SLOTS = 40 };
  mlx_h2o_cache seen = made("salient", SLOTS, 0, true), unseen = made("salient", SLOTS, 0, true);
  mlx_array before[3], now[3], inner = mlx_array_new();
  float a[Hq * D], b[Hq * D];
  size_t bytes = 0, active = 0, peak = 0;
  attend(seen, PROMPT, 1, -1, NULL, kNone, 0, NULL);
  attend(unseen, PROMPT, 1, -1, NULL, kNone, 0, NULL);
  int last[2 * SLOTS];
  for (int i = 0; i < STEPS; ++i) {
    attend(seen, 1, 100 + 4 * (uint64_t)i, -1, NULL, kNone, 0, a);
    attend(unseen, 1, 100 + 4 * (uint64_t)i, -1, NULL, kNone, 0, b);
    expect(!memcmp(a, b, sizeof a), "steps of what is looked at");
    mlx_vector_array held = mlx_vector_array_new();
    expect(!mlx_h2o_cache_inner_state(&held, seen) && !mlx_eval(held), "the arrays held");
    mlx_vector_array_free(held);
    for (int j = 0; j < 3; ++j) now[j] = mlx_array_new();
    expect(!mlx_h2o_cache_rows(&now[0], &now[1], &now[2], seen, s), "rows between steps");
    for (int j = 0; j < 3; ++j) expect(!mlx_array_eval(now[j]), "what was seen");
    expect(
        mlx_array_data_int32(now[2])[SLOTS - 1] == PROMPT + i &&
            (!i || mlx_array_data_int32(before[2])[SLOTS - 1] == PROMPT + i - 1),
        "the newest token, and that before it");
    for (int j = 0; i && j < 3; ++j) mlx_array_free(before[j]);
    memcpy(before, now, sizeof before);
    memcpy(last, mlx_array_data_int32(now[2]), sizeof last);
  }
  for (int j = 0; j < 3; ++j) mlx_array_free(before[j]);
  // Looking at positions alone, and the step after it, take little memory.
  expect(!mlx_h2o_cache_nbytes(&bytes, seen) && !mlx_get_active_memory(&active), "bytes");
  expect(!mlx_reset_peak_memory(), "the peak");
  expect(!mlx_h2o_cache_kept(&inner, seen, s) && !mlx_array_eval(inner), "positions");
  attend(seen, 1, 300, -1, NULL, kNone, 0, a), attend(unseen, 1, 300, -1, NULL, kNone, 0, b);
  expect(!memcmp(a, b, sizeof a), "the last step");
  expect(!mlx_get_peak_memory(&peak), "the peak");
  // (Plain MLX needs room for its steps.)
  expect(!fused || peak - active < bytes / 2, "no copy of the cache");
  mlx_array_free(inner);
  mlx_h2o_cache_free(seen), mlx_h2o_cache_free(unseen);
}

int main(int argc, char** argv) {
  s = mlx_default_cpu_stream_new();
  if (argc > 1 && !strcmp(argv[1], "steps")) {
    steps(argc > 2);
  } else {
    for (int undo = 0; undo <= 4; undo += 4) masks("salient", undo), masks("tova", undo);
    all_visible();
    wrong_masks();
    masks_before();
    rows_as_they_came();
  }
  mlx_stream_free(s);
  return failures != 0;
}
