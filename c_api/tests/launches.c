// Makes the calls of attention that stdin lists, a line each, so that what they launch on a GPU can
// be recorded (tests/conformance/test_c_api.py; its results mean nothing):
//
//   batch query_heads kv_heads queries keys key_width value_width dtype mask sinks bits
//
// mask is none, causal, bool (an array [B, 1, L, N]) or row (an additive one [L, 1]); bits 0 is
// dense.
//
//   launches tokens COUNT HEADS
//
// instead has a cache of so many query heads and two KV heads, whose policy needs no scores, read
// COUNT tokens and then two more.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mlx_h2o.h"

static const mlx_array kNone = {NULL};

static mlx_array zeros(const int* shape, int rank, mlx_dtype dtype, mlx_stream s) {
  mlx_array array = mlx_array_new();
  mlx_zeros(&array, shape, rank, dtype, s);
  return array;
}

static int read_tokens(int count, int query_heads, mlx_stream s) {
  enum { Heads = 2, Width = 64 };
  const int budgets[Heads] = {count + 2, count + 2};
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.remainder = false;
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  int status = mlx_h2o_policy_named(&policy, "streaming") ||
      mlx_h2o_cache_make(&cache, policy, budgets, Heads, &options);
  for (int i = 0; i < 2 && !status; ++i) {
    const int tokens = i ? 2 : count;
    const int q_shape[] = {1, query_heads, tokens, Width}, shape[] = {1, Heads, tokens, Width};
    const mlx_array q = zeros(q_shape, 4, MLX_FLOAT16, s), rows = zeros(shape, 4, MLX_FLOAT16, s);
    mlx_array out = mlx_array_new();
    status = mlx_h2o_cache_update_and_attend(
                 &out, cache, q, rows, rows, 0.125f, "causal", kNone, kNone, s) ||
        mlx_array_eval(out);
    mlx_array_free(out), mlx_array_free(q), mlx_array_free(rows);
  }
  if (status) fprintf(stderr, "launches: %s\n", mlx_h2o_last_error());
  mlx_h2o_cache_free(cache), mlx_h2o_policy_free(policy);
  return status;
}

int main(int argc, char** argv) {
  const mlx_stream s = mlx_default_cpu_stream_new();
  if (argc == 4 && !strcmp(argv[1], "tokens")) {
    const int status = read_tokens(atoi(argv[2]), atoi(argv[3]), s);
    mlx_stream_free(s);
    return status;
  }
  int B, Hq, Hk, L, N, D, Dv, sinks, bits;
  char type[16], mask[16];
  while (scanf(
             "%d %d %d %d %d %d %d %15s %15s %d %d", &B, &Hq, &Hk, &L, &N, &D, &Dv, type, mask,
             &sinks, &bits) == 11) {
    const mlx_dtype dtype = !strcmp(type, "float16") ? MLX_FLOAT16
        : !strcmp(type, "bfloat16")                  ? MLX_BFLOAT16
                                                     : MLX_FLOAT32;
    const int q_shape[] = {B, Hq, L, D}, whole[] = {B, 1, L, N}, row[] = {L, 1};
    mlx_array in[9] = {zeros(q_shape, 4, dtype, s)};
    for (int field = 0; field < 2; ++field) {
      mlx_array* rows = in + 1 + 3 * field;
      const int width = field ? Dv : D;
      if (!bits) {
        rows[0] = zeros((int[]){B, Hk, N, width}, 4, dtype, s);
      } else {
        rows[0] = zeros((int[]){B, Hk, N, width * bits / 32}, 4, MLX_UINT32, s);
        rows[1] = zeros((int[]){B, Hk, N, width / 32}, 4, dtype, s);
        rows[2] = zeros((int[]){B, Hk, N, width / 32}, 4, dtype, s);
      }
    }
    if (!strcmp(mask, "bool")) in[7] = zeros(whole, 4, MLX_BOOL, s);
    if (!strcmp(mask, "row")) in[7] = zeros(row, 2, dtype, s);
    if (sinks) in[8] = zeros(&Hq, 1, MLX_FLOAT32, s);
    const char* mode = in[7].ctx ? "array" : !strcmp(mask, "causal") ? "causal" : "";
    mlx_array out = kNone, scores = kNone, lse = kNone;
    const int status = bits
        ? mlx_h2o_attention_quantized_with_scores(
              &out, &scores, &lse, in[0], in[1], in[2], in[3], in[4], in[5], in[6], 0.125f, bits,
              bits, 32, mode, in[7], in[8], s)
        : mlx_h2o_attention_with_scores(
              &out, &scores, &lse, in[0], in[1], in[4], 0.125f, mode, in[7], in[8], s);
    if (status) {
      fprintf(stderr, "launches: %s\n", mlx_h2o_last_error());
      return 1;
    }
    for (int i = 0; i < 9; ++i) mlx_array_free(in[i]);
    mlx_array_free(out), mlx_array_free(scores), mlx_array_free(lse);
  }
  mlx_stream_free(s);
  return 0;
}
