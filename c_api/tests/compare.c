#include "compare.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void try_call(int status, const char* call, int line) {
  if (!status) return;
  fprintf(stderr, "replay:%d: %s: %s\n", line, call, mlx_h2o_last_error());
  exit(2);
}

void differs(Replay* r, const char* name, const char* how) {
  ++r->differences;
  fprintf(stderr, "%s/%s: %s %s\n", r->c->group, r->c->name, name, how);
}

mlx_array golden(const Replay* r, const char* kind, const char* name) {
  char key[256];
  snprintf(key, sizeof key, "%s/%s.%s", r->c->name, kind, name);
  mlx_array found = mlx_array_new();
  mlx_map_string_to_array_get(&found, r->arrays, key);
  return found;
}

// Evaluated, of another dtype, and with its elements in order.
static mlx_array laid_out(const Replay* r, mlx_array a, mlx_dtype dtype) {
  mlx_array cast = mlx_array_new(), dense = mlx_array_new();
  TRY(mlx_astype(&cast, a, dtype, r->s));
  TRY(mlx_contiguous(&dense, cast, false, r->s));
  TRY(mlx_array_eval(dense));
  mlx_array_free(cast);
  return dense;
}

static void* copy_of(const void* data, size_t bytes) {
  void* copy = malloc(bytes ? bytes : 1);
  if (!copy) exit(2);
  return memcpy(copy, data, bytes);
}

float* floats_of(const Replay* r, mlx_array a) {
  mlx_array dense = laid_out(r, a, MLX_FLOAT32);
  float* copy = copy_of(mlx_array_data_float32(dense), mlx_array_nbytes(dense));
  mlx_array_free(dense);
  return copy;
}

int32_t* int32s_of(const Replay* r, mlx_array a) {
  // Words are compared bit by bit.
  const mlx_dtype dtype = mlx_array_dtype(a) == MLX_UINT32 ? MLX_UINT32 : MLX_INT32;
  mlx_array dense = laid_out(r, a, dtype);
  const void* data = dtype == MLX_UINT32 ? (const void*)mlx_array_data_uint32(dense)
                                         : (const void*)mlx_array_data_int32(dense);
  int32_t* copy = copy_of(data, mlx_array_nbytes(dense));
  mlx_array_free(dense);
  return copy;
}

static bool is_float(mlx_dtype dtype) {
  return dtype == MLX_FLOAT32 || dtype == MLX_FLOAT16 || dtype == MLX_BFLOAT16;
}

// The size of a case's generated numbers: 1, or 2^power where that is larger.
static double size_of_numbers(Case* c) {
  const int power = text_or_null(c, "power") ? int_of(c, "power") : 0;
  return power > 0 ? ldexp(1, power) : 1;
}

static Tolerance tolerance_of(const Replay* r, mlx_dtype dtype) {
  Tolerance t = r->cases.float32;
  if (dtype == MLX_FLOAT16) t = r->cases.float16;
  if (dtype == MLX_BFLOAT16) t = r->cases.bfloat16;
  // A sum of large numbers may cancel, and its absolute error is then theirs.
  t.absolute *= size_of_numbers(r->c);
  return t;
}

static void compare_floats(
    Replay* r, const char* name, const float* got, const float* want, size_t count, Tolerance t) {
  double worst = 0;
  for (size_t i = 0; i < count; ++i) {
    // Infinities of one sign agree, and NaN agrees with NaN.
    if (got[i] == want[i] || (isnan(got[i]) && isnan(want[i]))) continue;
    double error = fabs((double)got[i] - want[i]) / (t.absolute + t.relative * fabs(want[i]));
    if (isnan(error) || isinf(want[i])) error = INFINITY;
    if (error > worst) worst = error;
  }
  if (worst > r->worst) r->worst = worst;
  if (worst <= 1) return;
  char how[64];
  snprintf(how, sizeof how, "is off by %.3g times the tolerance", worst);
  differs(r, name, how);
}

static void compare_int32s(
    Replay* r, const char* name, const int32_t* got, const int32_t* want, size_t count) {
  if (memcmp(got, want, count * sizeof *got)) differs(r, name, "differs");
}

void expect(Replay* r, const char* name, mlx_array got) {
  mlx_array want = golden(r, "out", name);
  const mlx_dtype dtype = want.ctx ? mlx_array_dtype(want) : MLX_BOOL;
  if (!want.ctx) {
    differs(r, name, "is not in the file");
  } else if (
      mlx_array_ndim(want) != mlx_array_ndim(got) || mlx_array_dtype(got) != dtype ||
      memcmp(mlx_array_shape(want), mlx_array_shape(got), mlx_array_ndim(got) * sizeof(int))) {
    differs(r, name, "has another shape or dtype");
  } else if (is_float(dtype)) {
    float *a = floats_of(r, got), *b = floats_of(r, want);
    compare_floats(r, name, a, b, mlx_array_size(got), tolerance_of(r, dtype));
    free(a), free(b);
  } else {
    int32_t *a = int32s_of(r, got), *b = int32s_of(r, want);
    compare_int32s(r, name, a, b, mlx_array_size(got));
    free(a), free(b);
  }
  mlx_array_free(want);
}

void expect_floats(Replay* r, const char* name, const float* got, size_t count) {
  mlx_array want = golden(r, "out", name);
  if (!want.ctx || mlx_array_size(want) != count || mlx_array_dtype(want) != MLX_FLOAT32) {
    differs(r, name, "has another size or dtype in the file, or is not there");
  } else {
    float* numbers = floats_of(r, want);
    compare_floats(r, name, got, numbers, count, r->cases.float32);
    free(numbers);
  }
  mlx_array_free(want);
}

void expect_int32s(Replay* r, const char* name, const int32_t* got, size_t count) {
  mlx_array want = golden(r, "out", name);
  if (!want.ctx || mlx_array_size(want) != count || mlx_array_dtype(want) != MLX_INT32) {
    differs(r, name, "has another size or dtype in the file, or is not there");
  } else {
    int32_t* numbers = int32s_of(r, want);
    compare_int32s(r, name, got, numbers, count);
    free(numbers);
  }
  mlx_array_free(want);
}
