// Attention with scores, dense and packed; packing.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "replays.h"

// --------------------------------------------------------------------------

// What both kinds of attention cases have.
typedef struct Operands_ {
  int B, Hq, Hk, L, N, D, Dv;
  mlx_dtype dtype;
  const char* mask;
  float scale;
  mlx_array q, sinks;
} Operands;

static Operands operands_of(const Replay* r) {
  Case* c = r->c;
  Operands o = {
      int_of(c, "batch"),
      int_of(c, "query_heads"),
      int_of(c, "kv_heads"),
      int_of(c, "queries"),
      int_of(c, "keys"),
      int_of(c, "key_width"),
      int_of(c, "value_width"),
      dtype_of(text_of(c, "dtype")),
      text_of(c, "mask"),
      (float)number_of(c, "scale"),
      {NULL},
      {NULL}};
  const int q_shape[] = {o.B, o.Hq, o.L, o.D};
  o.q = tensor(r, Q, q_shape, 4, o.dtype, 0);
  if (flag_of(c, "sinks")) o.sinks = tensor(r, SINKS, &o.Hq, 1, MLX_FLOAT32, 0);
  return o;
}

void replay_attention(Replay* r) {
  Operands o = operands_of(r);
  const int k_shape[] = {o.B, o.Hk, o.N, o.D}, v_shape[] = {o.B, o.Hk, o.N, o.Dv};
  mlx_array k = tensor(r, K, k_shape, 4, o.dtype, 0), v = tensor(r, V, v_shape, 4, o.dtype, 0);
  mlx_array mask = golden(r, "in", "mask");
  const char* mode = mask.ctx ? "array" : strcmp(o.mask, "causal") ? "" : "causal";
  mlx_array out = kNone, scores = kNone, lse = kNone, mass = kNone;
  TRY(mlx_h2o_attention_with_scores(
      &out, &scores, &lse, o.q, k, v, o.scale, mode, mask, o.sinks, r->s));
  TRY(mlx_h2o_attention_mass(&mass, scores, lse, o.Hk, r->s));
  expect(r, "out", out);
  expect(r, "scores", scores);
  expect(r, "lse", lse);
  expect(r, "mass", mass);
  // The other form, into handles that hold something already.
  TRY(mlx_h2o_attention_with_mass(
      &out, &mass, &lse, o.q, k, v, o.scale, mode, mask, o.sinks, r->s));
  expect(r, "out", out);
  expect(r, "lse", lse);
  expect(r, "mass", mass);
  const mlx_array all[] = {out, scores, lse, mass, mask, k, v, o.q, o.sinks};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) mlx_array_free(all[i]);
}

// Packing the generated rows gives the stored words, scales and biases.
static void replay_packing(
    Replay* r, const Operands* o, const char* field, enum Which which, int width, int bits,
    int group_size) {
  const int rows = o->B * o->Hk * o->N;
  const int shape[] = {1, rows, width}, w_shape[] = {1, rows, width * bits / 32};
  const int s_shape[] = {1, rows, width / group_size}, index_shape[] = {1, rows};
  mlx_array given = tensor(r, which, shape, 3, o->dtype, 0);
  mlx_array w = kNone, scales = kNone, biases = kNone;
  TRY(mlx_zeros(&w, w_shape, 3, MLX_UINT32, r->s));
  TRY(mlx_zeros(&scales, s_shape, 3, o->dtype, r->s));
  TRY(mlx_zeros(&biases, s_shape, 3, o->dtype, r->s));
  int* order = malloc((size_t)rows * sizeof *order);
  for (int i = 0; i < rows; ++i) order[i] = i;
  mlx_array index = mlx_array_new_data(order, index_shape, 2, MLX_INT32);
  TRY(mlx_h2o_quantize_append(
      &w, &scales, &biases, w, scales, biases, index, given, bits, group_size, r->s));
  const mlx_array got[] = {w, scales, biases};
  for (int i = 0; i < 3; ++i) {
    char name[8];
    snprintf(name, sizeof name, "%s_%c", field, "wsb"[i]);
    mlx_array want = golden(r, "in", name);
    if (!want.ctx || mlx_array_size(want) != mlx_array_size(got[i])) {
      differs(r, name, "has another size");
    } else {
      const size_t bytes = mlx_array_size(want) * 4;
      void* a = i ? (void*)floats_of(r, got[i]) : (void*)int32s_of(r, got[i]);
      void* b = i ? (void*)floats_of(r, want) : (void*)int32s_of(r, want);
      if (memcmp(a, b, bytes)) differs(r, name, "is packed differently");
      free(a), free(b);
    }
    mlx_array_free(want);
    mlx_array_free(got[i]);
  }
  free(order);
  mlx_array_free(index);
  mlx_array_free(given);
}

void replay_quantized(Replay* r) {
  Operands o = operands_of(r);
  const int k_bits = int_of(r->c, "k_bits"), v_bits = int_of(r->c, "v_bits");
  const int group_size = int_of(r->c, "group_size");
  const char* const names[] = {"k_w", "k_s", "k_b", "v_w", "v_s", "v_b"};
  mlx_array in[6];
  for (int i = 0; i < 6; ++i) in[i] = golden(r, "in", names[i]);
  mlx_array out = kNone, scores = kNone, lse = kNone;
  TRY(mlx_h2o_attention_quantized_with_scores(
      &out, &scores, &lse, o.q, in[0], in[1], in[2], in[3], in[4], in[5], o.scale, k_bits, v_bits,
      group_size, strcmp(o.mask, "causal") ? "" : "causal", kNone, o.sinks, r->s));
  expect(r, "out", out);
  expect(r, "scores", scores);
  expect(r, "lse", lse);
  replay_packing(r, &o, "k", K, o.D, k_bits, group_size);
  replay_packing(r, &o, "v", V, o.Dv, v_bits, group_size);
  for (int i = 0; i < 6; ++i) mlx_array_free(in[i]);
  const mlx_array all[] = {out, scores, lse, o.q, o.sinks};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) mlx_array_free(all[i]);
}
