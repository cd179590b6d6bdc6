// A conversation, and attention by itself, by the GPU's kernels and by MLX's operations
// (tests/conformance/test_c_api.py). Prints a line of JSON: whether steps were fused, how far the
// outputs of both are apart, whether the kept positions are the same, notices and all verdicts.
#include <stdlib.h>
#include <string.h>

#define PROGRAM "self_check"
#include "expect.h"
#include "mlx_h2o.h"
#include "numbers.h"

// In more slots than a threadgroup reads in one go.
enum { HEADS = 2, GROUP = 2, WIDTH = 32, PROMPT = 570, STEPS = 4 };

static const mlx_array kNone = {NULL};
static mlx_stream s;
static int notices = 0;

static void count_notice(void* context, const char* message) {
  (void)context;
  expect(strstr(message, "is not used on this device") != NULL, "a notice");
  ++notices;
}

static mlx_array rows(int heads, int tokens, uint64_t seed) {
  const int shape[] = {1, heads, tokens, WIDTH};
  const size_t count = (size_t)heads * tokens * WIDTH;
  float* numbers = malloc(count * sizeof *numbers);
  fill_numbers(numbers, count, seed, 0);
  const mlx_array made = mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
  free(numbers);
  return made;
}

// What was computed, by kernels or not.
typedef struct Outcome_ {
  bool fused;
  mlx_array outs[STEPS + 4];
  mlx_array kept;
} Outcome;

static void converse(Outcome* res, mlx_h2o_policy policy) {
  const int budgets[HEADS] = {40, 560};
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, NULL), "a cache");
  for (int i = 0; i <= STEPS; ++i) {
    const int tokens = i ? 1 : PROMPT;
    mlx_array q = rows(GROUP * HEADS, tokens, 3 * i + 1), k = rows(HEADS, tokens, 3 * i + 2);
    mlx_array v = rows(HEADS, tokens, 3 * i + 3);
    res->outs[i] = mlx_array_new();
    const int status = mlx_h2o_cache_update_and_attend(
        &res->outs[i], cache, q, k, v, 0.2f, "causal", kNone, kNone, s);
    expect(!status && !mlx_array_eval(res->outs[i]), "attention");
    mlx_array_free(q), mlx_array_free(k), mlx_array_free(v);
  }
  expect(!mlx_h2o_cache_is_fused(&res->fused, cache), "is fused");
  res->kept = mlx_array_new();
  expect(!mlx_h2o_cache_kept(&res->kept, cache, s), "kept");
  expect(!mlx_array_eval(res->kept), "kept");
  mlx_h2o_cache_free(cache);
}

static void attend(Outcome* res) {
  mlx_array q = rows(GROUP * HEADS, 1, 91), k = rows(HEADS, 600, 92), v = rows(HEADS, 600, 93);
  mlx_array* outs = res->outs + STEPS + 1;
  for (int i = 0; i < 3; ++i) outs[i] = mlx_array_new();
  const int status = mlx_h2o_attention_with_scores(
      &outs[0], &outs[1], &outs[2], q, k, v, 0.2f, "", kNone, kNone, s);
  expect(!status, "attention with scores");
  for (int i = 0; i < 3; ++i) expect(!mlx_array_eval(outs[i]), "evaluation");
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v);
}

static float apart(mlx_array found, mlx_array expected) {
  const size_t count = mlx_array_size(found);
  const float *a = mlx_array_data_float32(found), *b = mlx_array_data_float32(expected);
  float most = count == mlx_array_size(expected) ? 0 : 1e9f;
  for (size_t i = 0; i < count; ++i) {
    const float one = a[i] > b[i] ? a[i] - b[i] : b[i] - a[i];
    most = one > most || one != one ? one : most;
  }
  return most;
}

int main(void) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  Outcome kernels, plain;
  s = mlx_default_cpu_stream_new();
  expect(!mlx_h2o_policy_named(&policy, "h2o"), "a policy");
  expect(!mlx_h2o_set_notice(count_notice, NULL), "a notice");
  expect(mlx_h2o_verdicts(NULL) == 1, "verdicts without a place");
  converse(&kernels, policy);
  attend(&kernels);
  mlx_h2o_use_kernels(false);
  converse(&plain, policy);
  attend(&plain);
  float most = 0;
  for (int i = 0; i < STEPS + 4; ++i) {
    const float one = apart(kernels.outs[i], plain.outs[i]);
    most = one > most || one != one ? one : most;
    mlx_array_free(kernels.outs[i]), mlx_array_free(plain.outs[i]);
  }
  const bool same = mlx_array_size(kernels.kept) == mlx_array_size(plain.kept) &&
      !memcmp(mlx_array_data_int32(kernels.kept), mlx_array_data_int32(plain.kept),
              mlx_array_nbytes(plain.kept));
  mlx_array_free(kernels.kept), mlx_array_free(plain.kept);
  mlx_string verdicts = mlx_string_new();
  expect(!mlx_h2o_verdicts(&verdicts), "verdicts");
  printf(
      "{\"fused\": %d, \"apart\": %g, \"same\": %d, \"notices\": %d, \"verdicts\": %s}\n",
      kernels.fused, most, same, notices, mlx_string_data(verdicts));
  mlx_string_free(verdicts);
  mlx_h2o_policy_free(policy);
  mlx_stream_free(s);
  return failures != 0;
}
