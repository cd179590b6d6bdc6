// Decodes in bounded memory: decode [TOKENS]
//
// A layer of 8 query and 2 KV heads reads a prompt of 512 tokens and then so many more (100000 by
// default), one by one. Its KV cache holds 128 tokens a head, whatever comes; a full one would grow
// to TOKENS. Where your model computes queries, keys and values, this draws them at random.
#include <stdio.h>
#include <stdlib.h>

#include "mlx_h2o.h"

enum { LAYERS = 2, QUERY_HEADS = 8, KV_HEADS = 2, WIDTH = 64, PROMPT = 512 };

static void try_call(int status, int line) {
  if (!status) return;
  fprintf(stderr, "decode.c:%d: %s\n", line, mlx_h2o_last_error());
  exit(1);
}
#define TRY(call) try_call((call), __LINE__)

// What a layer's projections would give: [1, heads, tokens, WIDTH].
static mlx_array drawn(int heads, int tokens, mlx_stream s) {
  const int shape[] = {1, heads, tokens, WIDTH};
  mlx_array x = mlx_array_new(), no_key = mlx_array_new();
  TRY(mlx_random_normal(&x, shape, 4, MLX_FLOAT32, 0, 1, no_key, s));
  return x;
}

static void attend(mlx_h2o_cache cache, int tokens, mlx_stream s) {
  mlx_array q = drawn(QUERY_HEADS, tokens, s), k = drawn(KV_HEADS, tokens, s);
  mlx_array v = drawn(KV_HEADS, tokens, s), out = mlx_array_new(), no_sinks = mlx_array_new();
  TRY(mlx_h2o_cache_update_and_attend(
      &out, cache, q, k, v, 0.125f, "causal", no_sinks, no_sinks, s));
  TRY(mlx_array_eval(out));
  mlx_array_free(q);
  mlx_array_free(k);
  mlx_array_free(v);
  mlx_array_free(out);
}

int main(int argc, char** argv) {
  const int tokens = argc > 1 ? atoi(argv[1]) : 100000;
  mlx_stream s = mlx_default_cpu_stream_new();

  // Every head gets 128 slots here; a profile gives the heads that copy and recall more.
  const int slots[KV_HEADS] = {128, 128};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  TRY(mlx_h2o_policy_named(&policy, "distinct"));
  TRY(mlx_h2o_policy_set(policy, "recent", "0.25"));
  mlx_h2o_cache caches[LAYERS];
  for (int l = 0; l < LAYERS; ++l) {
    caches[l] = mlx_h2o_cache_new();
    TRY(mlx_h2o_cache_make(&caches[l], policy, slots, KV_HEADS, NULL));
    attend(caches[l], PROMPT, s);
  }
  mlx_h2o_policy_free(policy);

  for (int token = 0; token < tokens; ++token) {
    for (int l = 0; l < LAYERS; ++l) attend(caches[l], 1, s);
    // After 1, 10, 100 ... tokens.
    int power = 1;
    while (power < token + 1) power *= 10;
    if (power != token + 1 && token + 1 != tokens) continue;
    int offset, size;
    size_t bytes, in_use;
    TRY(mlx_h2o_cache_offset(&offset, caches[0]));
    TRY(mlx_h2o_cache_size(&size, caches[0]));
    TRY(mlx_h2o_cache_nbytes(&bytes, caches[0]));
    TRY(mlx_get_active_memory(&in_use));
    printf(
        "%7d tokens: %d held in %zu bytes a layer (a full cache: %zu); MLX uses %zu\n", offset,
        size, bytes, (size_t)offset * KV_HEADS * 2 * WIDTH * sizeof(float), in_use);
  }
  for (int l = 0; l < LAYERS; ++l) mlx_h2o_cache_free(caches[l]);
  mlx_stream_free(s);
  return 0;
}
