// What the library evaluates goes through the program's evaluator, which may refuse
// (tests/conformance/test_c_api.py). Ends with 0, or with 1 and what was otherwise.
//
// Where tests/host_gpu is the device, fused steps are what is waited for as well.
#include <stdio.h>
#include <stdlib.h>

#define PROGRAM "evaluator"
#include "expect.h"
#include "mlx_h2o.h"
#include "mlx_h2o_golden.h"
#include "numbers.h"

enum { HEADS = 2, WIDTH = 32, PROMPT = 20, STEPS = 8 };

static const mlx_array kNone = {NULL};
static mlx_stream s;

typedef struct Evaluations_ {
  int calls;
  bool refuses;
} Evaluations;

static int evaluate(void* context, const mlx_vector_array arrays) {
  Evaluations* seen = context;
  ++seen->calls;
  return seen->refuses ? 7 : mlx_eval(arrays);
}

static mlx_array rows(int tokens, uint64_t seed) {
  const int shape[] = {1, HEADS, tokens, WIDTH};
  float numbers[HEADS * PROMPT * WIDTH];
  fill_numbers(numbers, (size_t)HEADS * tokens * WIDTH, seed, 0);
  return mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
}

static void attend(mlx_h2o_cache cache, int tokens, uint64_t seed) {
  mlx_array x = rows(tokens, seed), out = mlx_array_new();
  expect(
      !mlx_h2o_cache_update_and_attend(&out, cache, x, x, x, 0.2f, "causal", kNone, kNone, s) &&
          !mlx_array_eval(out),
      "attention");
  mlx_array_free(x), mlx_array_free(out);
}

// A call with the evaluator that works, which it must have asked, and before it with one that
// refuses, after which the call must fail.
#define ASKS(call, what)                                            \
  do {                                                              \
    seen->refuses = true;                                           \
    expect((call) != 0, what " does without the evaluator");        \
    seen->refuses = false, seen->calls = 0;                         \
    expect((call) == 0 && seen->calls > 0, what " with evaluator"); \
  } while (0)

// Writes a row at an index, whose numbers are looked at.
static int write_a_row(void) {
  const int buffer_shape[] = {1, 8, WIDTH}, row_shape[] = {1, 1, WIDTH}, place[] = {3};
  const int one[] = {1, 1};
  mlx_array buffer = mlx_array_new(), row = mlx_array_new(), res = mlx_array_new();
  mlx_array index = mlx_array_new_data(place, one, 2, MLX_INT32);
  expect(!mlx_zeros(&buffer, buffer_shape, 3, MLX_FLOAT32, s), "zeros");
  expect(!mlx_ones(&row, row_shape, 3, MLX_FLOAT32, s), "ones");
  const int status = mlx_h2o_write_rows(&res, buffer, index, row, s);
  mlx_array_free(buffer), mlx_array_free(row), mlx_array_free(res), mlx_array_free(index);
  return status;
}

static void frames_and_indices(Evaluations* seen, mlx_h2o_policy policy) {
  const int budgets[] = {12, 12}, shape[] = {HEADS, WIDTH};
  float scales[HEADS * WIDTH], centres[HEADS * WIDTH] = {0};
  for (int i = 0; i < HEADS * WIDTH; ++i) scales[i] = 1;
  mlx_h2o_cache framed = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.k_bits = 8, options.group_size = 32;
  options.frame_scale = mlx_array_new_data(scales, shape, 2, MLX_FLOAT32);
  options.frame_centre = mlx_array_new_data(centres, shape, 2, MLX_FLOAT32);
  ASKS(mlx_h2o_cache_make(&framed, policy, budgets, HEADS, &options), "a frame");
  mlx_h2o_cache_free(framed);
  mlx_array_free(options.frame_scale), mlx_array_free(options.frame_centre);
  ASKS(write_a_row(), "an index");
}

static void conversation(Evaluations* seen, mlx_h2o_policy policy, bool on_gpu) {
  const int budgets[] = {12, 12}, span[] = {15, 17};
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_array kept = mlx_array_new();
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, NULL), "a cache");
  attend(cache, PROMPT, 1);
  seen->calls = 0;
  for (int i = 0; i < STEPS; ++i) attend(cache, 1, 2 + i);
  // The first fused step of a program tries whether kernels can write in place.
  expect(seen->calls <= (on_gpu ? 3 : 0), "steps evaluate nothing");
  // Taking the rows back waits for fused steps on a GPU, and for nothing elsewhere.
  seen->calls = 0;
  seen->refuses = on_gpu;
  expect(!mlx_h2o_cache_kept(&kept, cache, s) == !on_gpu, "looking at rows");
  seen->refuses = false;
  expect(!mlx_h2o_cache_kept(&kept, cache, s), "looking again");
  expect(seen->calls == (on_gpu ? 2 : 0), "evaluations of a look");
  int missing = 0, offset = 0;
  ASKS(mlx_h2o_cache_pin(&missing, cache, span, 1, s), "pins");
  expect(!mlx_h2o_cache_offset(&offset, cache) && offset == PROMPT + STEPS, "the tokens");
  mlx_array_free(kept);
  mlx_h2o_cache_free(cache);
}

int main(int argc, char** argv) {
  (void)argv;
  Evaluations seen = {0, false};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  s = mlx_default_cpu_stream_new();
  expect(!mlx_h2o_policy_named(&policy, "salient"), "a policy");
  expect(!mlx_h2o_set_evaluator(evaluate, &seen), "an evaluator");
  frames_and_indices(&seen, policy);
  conversation(&seen, policy, argc > 1);
  // MLX's own again.
  expect(!mlx_h2o_set_evaluator(NULL, NULL), "none");
  seen.calls = 0;
  seen.refuses = true;
  expect(!write_a_row() && !seen.calls, "MLX's own evaluation");
  mlx_h2o_policy_free(policy);
  mlx_stream_free(s);
  return failures != 0;
}
