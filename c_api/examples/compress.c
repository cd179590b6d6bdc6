// Compresses a prompt: which of its rows to keep, as a policy sees them.
//
// A layer of 8 query and 2 KV heads has read a prompt of 512 tokens; 64 rows a head are to stay,
// for a runtime that stores them itself. Where your model has queries, keys and values, this draws
// them at random.
#include <stdio.h>
#include <stdlib.h>

#include "mlx_h2o.h"

enum { QUERY_HEADS = 8, KV_HEADS = 2, WIDTH = 64, PROMPT = 512, WINDOW = 32, KEPT = 64 };

static void try_call(int status, int line) {
  if (!status) return;
  fprintf(stderr, "compress.c:%d: %s\n", line, mlx_h2o_last_error());
  exit(1);
}
#define TRY(call) try_call((call), __LINE__)

static mlx_array drawn(int heads, mlx_stream s) {
  const int shape[] = {1, heads, PROMPT, WIDTH};
  mlx_array x = mlx_array_new(), no_key = mlx_array_new();
  TRY(mlx_random_normal(&x, shape, 4, MLX_FLOAT32, 0, 1, no_key, s));
  return x;
}

static mlx_array zeros(int last_axis, mlx_stream s) {
  const int shape[] = {1, KV_HEADS, last_axis};
  mlx_array x = mlx_array_new();
  TRY(mlx_zeros(&x, shape, 3, MLX_FLOAT32, s));
  return x;
}

// The mass that each key got from the last queries, to which all keys are visible but for the
// newest.
static mlx_array window_mass(mlx_array q, mlx_array k, mlx_array v, float scale, mlx_stream s) {
  const int first[] = {0, 0, PROMPT - WINDOW, 0}, steps[] = {1, 1, 1, 1};
  const int last[] = {1, QUERY_HEADS, PROMPT, WIDTH};
  mlx_array window = mlx_array_new(), out = mlx_array_new(), mass = mlx_array_new();
  mlx_array lse = mlx_array_new(), none = mlx_array_new();
  TRY(mlx_slice(&window, q, first, 4, last, 4, steps, 4, s));
  TRY(mlx_h2o_attention_with_mass(&out, &mass, &lse, window, k, v, scale, "causal", none, none, s));
  mlx_array_free(window);
  mlx_array_free(out);
  mlx_array_free(lse);
  return mass;
}

int main(void) {
  const float scale = 0.125f;
  mlx_stream s = mlx_default_cpu_stream_new();
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  TRY(mlx_h2o_policy_named(&policy, "distinct"));
  int recent;
  TRY(mlx_h2o_policy_recent_slots(&recent, policy, KEPT));

  mlx_array q = drawn(QUERY_HEADS, s), k = drawn(KV_HEADS, s), v = drawn(KV_HEADS, s);
  mlx_array out = mlx_array_new(), logits = mlx_array_new(), lse = mlx_array_new();
  mlx_array none = mlx_array_new(), before = zeros(PROMPT, s), mean = zeros(WIDTH, s);
  mlx_array scores = mlx_array_new(), evictable = mlx_array_new(), kept = mlx_array_new();
  TRY(mlx_h2o_attention_with_scores(&out, &logits, &lse, q, k, v, scale, "causal", none, none, s));
  TRY(mlx_h2o_accumulate(&scores, policy, before, logits, lse, s));
  int32_t numbers[KV_HEADS * PROMPT];
  for (int i = 0; i < KV_HEADS * PROMPT; ++i) numbers[i] = i % PROMPT;
  const int shape[] = {1, KV_HEADS, PROMPT};
  mlx_array positions = mlx_array_new_data(numbers, shape, 3, MLX_INT32);
  TRY(mlx_h2o_evictable(&evictable, positions, PROMPT, 4, recent, s));
  mlx_array mass = window_mass(q, k, v, scale, s);

  const mlx_h2o_slots slots = {sizeof slots, k, v, positions, scores, evictable, mean, PROMPT, 0};
  TRY(mlx_h2o_compress_prompt(&kept, policy, &slots, mass, KEPT, s));
  TRY(mlx_array_eval(kept));
  const int32_t* rows = mlx_array_data_int32(kept);
  for (int head = 0; head < KV_HEADS; ++head) {
    printf("head %d keeps", head);
    for (int i = 0; i < KEPT; ++i) printf(" %d", rows[head * KEPT + i]);
    printf("\n");
  }

  const mlx_array arrays[] = {q,    k,      v,         out,  logits,    lse, before,
                              mean, scores, evictable, kept, positions, mass};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) mlx_array_free(arrays[i]);
  mlx_h2o_policy_free(policy);
  mlx_stream_free(s);
  return 0;
}
