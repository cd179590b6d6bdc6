// Makes the calls of attention that stdin lists, a line each, so that what they launch on a GPU can
// be recorded (tests/conformance/test_c_api.py; its results mean nothing):
//
//   batch query_heads kv_heads queries keys key_width value_width dtype mask sinks bits
//
// mask is none, causal, bool (an array [B, 1, L, N]) or row (an additive one [L, 1]); bits 0 is
// dense.
#include <stdio.h>
#include <string.h>

#include "mlx_h2o.h"

static const mlx_array kNone = {NULL};

static mlx_array zeros(const int* shape, int rank, mlx_dtype dtype, mlx_stream s) {
  mlx_array array = mlx_array_new();
  mlx_zeros(&array, shape, rank, dtype, s);
  return array;
}

int main(void) {
  const mlx_stream s = mlx_default_cpu_stream_new();
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
