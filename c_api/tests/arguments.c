// Wrong arguments to every function of mlx_h2o.h (calls.c lists what each takes):
//
//   arguments refuse            each argument made wrong in every way, one at a time: all refused
//   arguments fuzz COUNT SEED   COUNT calls with several arguments changed at random: each refused,
//                               or right, and then run
//
// What was refused must have changed nothing. Ends with 0, or with 1 and what went wrong.
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "numbers.h"

static const mlx_array kNone = {NULL};
static mlx_stream kStream;
static int failures = 0;

static void fails(const char* function, const char* argument, const char* how) {
  if (++failures < 40) fprintf(stderr, "arguments: %s: %s: %s\n", function, argument, how);
}

static void must(int status, const char* what) {
  if (!status) return;
  fprintf(stderr, "arguments: %s: %s\n", what, mlx_h2o_last_error());
  exit(1);
}

// -- random numbers -------------------------------------------------------------------------------

static uint64_t drawn = 0, seed = 1;

static int below(int n) {
  return (int)(hashed(seed, drawn++) % (uint64_t)n);
}

static bool chance(int percent) {
  return below(100) < percent;
}

// -- arrays ---------------------------------------------------------------------------------------

// An array of these axes, of small numbers.
static mlx_array made(const int* shape, int rank, mlx_dtype dtype, int modulus) {
  size_t size = 1;
  for (int i = 0; i < rank; ++i) size *= (size_t)shape[i];
  float* numbers = malloc((size + 1) * sizeof *numbers);
  for (size_t i = 0; i < size; ++i)
    // An index or a position counts on, another number is a fraction.
    numbers[i] = modulus ? (float)(i % (size_t)modulus) : (float)(hashed(7, i) % 97) / 64 - 0.75f;
  mlx_array exact = mlx_array_new_data(numbers, shape, rank, MLX_FLOAT32), cast = mlx_array_new();
  must(mlx_astype(&cast, exact, dtype, kStream), "astype");
  must(mlx_array_eval(cast), "eval");
  mlx_array_free(exact);
  free(numbers);
  return cast;
}

static mlx_dtype right_dtype(char kind) {
  switch (kind) {
    case 'i':
    case 'x': return MLX_INT32;
    case 'u': return MLX_UINT32;
    case 'b':
    case 'm': return MLX_BOOL;
    default: return MLX_FLOAT32;
  }
}

static int shape_of(const Array* a, int* shape) {
  const int rank = (int)strlen(a->axes);
  for (int i = 0; i < rank; ++i) shape[i] = length_of(a->axes[i]);
  return rank;
}

static mlx_array right(const Array* a) {
  int shape[8];
  const int rank = shape_of(a, shape);
  // Positions and indices are different within a head, priorities decide nothing here.
  const int modulus = a->kind == 'i' ? shape[rank - 1] : a->kind == 'x' ? length_of('S') : 0;
  return made(shape, rank, right_dtype(a->kind), modulus);
}

static const mlx_dtype kWrong[][6] = {
    ['f'] = {MLX_INT32, MLX_BOOL, MLX_UINT32, MLX_FLOAT64, MLX_INT8, MLX_UINT64},
    ['s'] = {MLX_FLOAT16, MLX_INT32, MLX_BOOL, MLX_FLOAT64, MLX_BFLOAT16, MLX_UINT32},
    ['w'] = {MLX_FLOAT16, MLX_INT32, MLX_BOOL, MLX_FLOAT64, MLX_BFLOAT16, MLX_UINT32},
    ['i'] = {MLX_FLOAT32, MLX_INT64, MLX_UINT32, MLX_BOOL, MLX_INT16, MLX_FLOAT16},
    ['x'] = {MLX_FLOAT32, MLX_INT64, MLX_UINT32, MLX_BOOL, MLX_INT16, MLX_FLOAT16},
    ['u'] = {MLX_INT32, MLX_FLOAT32, MLX_UINT8, MLX_UINT64, MLX_BOOL, MLX_FLOAT16},
    ['b'] = {MLX_INT32, MLX_FLOAT32, MLX_UINT8, MLX_UINT32, MLX_FLOAT16, MLX_INT64},
    ['m'] = {MLX_INT32, MLX_UINT32, MLX_UINT8, MLX_INT64, MLX_FLOAT64, MLX_INT8},
    ['r'] = {MLX_INT32, MLX_BOOL, MLX_UINT32, MLX_UINT8, MLX_INT8, MLX_UINT64},
};

// -- calls ----------------------------------------------------------------------------------------

static mlx_h2o_policy a_policy(const char* name) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  must(mlx_h2o_policy_named(&policy, name), name);
  must(mlx_h2o_policy_set(policy, "sink", "1"), "sink");
  return policy;
}

// A cache that has seen a prompt and evicted some of it, and a step that can be taken back.
static mlx_h2o_cache a_cache(int undo) {
  const int budgets[] = {8, 6};
  mlx_h2o_policy policy = a_policy("distinct");
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.undo = undo;
  must(mlx_h2o_cache_make(&cache, policy, budgets, 2, &options), "a cache");
  for (int L = 9; L; L = L == 9) {
    mlx_array q = made((int[]){2, 4, L, 32}, 4, MLX_FLOAT32, 0), out = kNone;
    mlx_array k = made((int[]){2, 2, L, 32}, 4, MLX_FLOAT32, 0);
    mlx_array v = made((int[]){2, 2, L, 64}, 4, MLX_FLOAT32, 0);
    must(
        mlx_h2o_cache_update_and_attend(
            &out, cache, q, k, v, 0.2f, "causal", kNone, kNone, kStream),
        "a prompt");
    must(mlx_array_eval(out), "eval");
    mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  }
  mlx_h2o_policy_free(policy);
  return cache;
}

static Call right_call(const Function* f, mlx_h2o_policy policy, mlx_h2o_cache cache) {
  Call c = {.scale = 0.2f, .texts = {f->text, "recent"}, .s = kStream, .missing = NOTHING};
  for (int i = 0; i < MOST_ARRAYS && f->in[i].name; ++i) c.in[i] = right(&f->in[i]);
  for (int i = 0; i < MOST_INTS && f->ints[i].name; ++i) c.ints[i] = f->ints[i].right;
  if (f->policy) c.policy = policy;
  if (f->cache) c.cache = cache;
  return c;
}

static void free_inputs(Call* c) {
  for (int i = 0; i < MOST_ARRAYS; ++i) mlx_array_free(c->in[i]);
}

// What a cache tells of itself.
typedef struct Told_ {
  int offset, size, trimmable;
  int64_t evicted;
  size_t nbytes;
} Told;

static Told told(mlx_h2o_cache cache) {
  Told t;
  memset(&t, 0, sizeof t);
  must(mlx_h2o_cache_offset(&t.offset, cache), "offset");
  must(mlx_h2o_cache_size(&t.size, cache), "size");
  must(mlx_h2o_cache_trimmable(&t.trimmable, cache), "trimmable");
  must(mlx_h2o_cache_evicted(&t.evicted, cache), "evicted");
  must(mlx_h2o_cache_nbytes(&t.nbytes, cache), "nbytes");
  return t;
}

enum { SENTINEL = 41 };

// Makes the call and checks what it did: 0 if it succeeded and all results can be computed, 1 if it
// was refused with a message and changed nothing.
static int tried(const Function* f, Call* c, const char* what) {
  const bool cached = f->cache && c->cache.ctx;
  Told before, after;
  if (cached) before = told(c->cache);
  c->number = SENTINEL;
  for (int i = 0; i < MOST_RESULTS; ++i) c->out[i] = mlx_array_new_int(SENTINEL);
  const void* places[MOST_RESULTS];
  for (int i = 0; i < MOST_RESULTS; ++i) places[i] = c->out[i].ctx;
  const int status = f->call(c);
  if (status) {
    if (!*mlx_h2o_last_error()) fails(f->name, what, "no message");
    if (f->results < 0 && c->number != SENTINEL) fails(f->name, what, "the result was changed");
    if (cached) {
      after = told(c->cache);
      if (memcmp(&before, &after, sizeof before)) fails(f->name, what, "the cache was changed");
    }
  }
  for (int i = 0; i < MOST_RESULTS; ++i) {
    const bool wanted = !status && i < f->results && i != c->missing;
    const bool empty = !c->out[i].ctx && f->may_be_empty;
    int number = 0;
    if (wanted && !empty && mlx_array_size(c->out[i]) < 1 << 20 && mlx_array_eval(c->out[i]))
      fails(f->name, what, "a result cannot be computed");
    if (!wanted &&
        (c->out[i].ctx != places[i] || mlx_array_ndim(c->out[i]) ||
         mlx_array_item_int32(&number, c->out[i]) || number != SENTINEL))
      fails(f->name, what, "a result was changed");
    mlx_array_free(c->out[i]);
  }
  return status != 0;
}

static void refused(const Function* f, Call* c, const char* argument, const char* how) {
  char what[128];
  snprintf(what, sizeof what, "%s %s", argument, how);
  if (!tried(f, c, what)) fails(f->name, what, "was not refused");
}

// -- one wrong argument ---------------------------------------------------------------------------

static void refuse_array(const Function* f, Call* c, int i) {
  const Array* a = &f->in[i];
  const mlx_array own = c->in[i];
  int shape[8];
  const int rank = shape_of(a, shape), modulus = a->kind == 'i' || a->kind == 'x' ? 2 : 0;
  c->in[i] = kNone;
  if (a->optional) {
    // Left out, unless the call says that it is there. (A cache would go on.)
    if (!f->cache && tried(f, c, a->name) && (!f->text || strcmp(f->text, "array")))
      fails(f->name, a->name, "may be left out");
  } else {
    refused(f, c, a->name, "is an empty handle");
  }
  for (int axis = 0; axis < rank; ++axis)
    for (int wrong = 0; wrong < 2; ++wrong) {
      const int length = shape[axis];
      if (wrong && strchr(f->loose, a->axes[axis])) continue;
      shape[axis] = wrong ? length + 1 : 0;
      c->in[i] = made(shape, rank, right_dtype(a->kind), modulus);
      refused(f, c, a->name, wrong ? "is longer" : "has an axis of 0");
      mlx_array_free(c->in[i]);
      shape[axis] = length;
    }
  shape[rank] = 1;
  for (int other = rank - 1; other <= rank + 1; other += 2) {
    c->in[i] = made(shape, other, right_dtype(a->kind), modulus);
    refused(f, c, a->name, "has another rank");
    mlx_array_free(c->in[i]);
  }
  for (int d = 0; d < 6; ++d) {
    c->in[i] = made(shape, rank, kWrong[(int)a->kind][d], modulus);
    refused(f, c, a->name, "has another dtype");
    mlx_array_free(c->in[i]);
  }
  const int beyond[] = {-1, length_of('S'), INT_MAX, INT_MIN};
  for (int w = 0; a->kind == 'x' && w < 4; ++w) {
    const int32_t index[] = {0, 1, 2, 3, beyond[w], 4};
    c->in[i] = mlx_array_new_data(index, shape, rank, MLX_INT32);
    refused(f, c, a->name, "leaves the slots");
    mlx_array_free(c->in[i]);
  }
  c->in[i] = own;
}

static void refuse_each(const Function* f, mlx_h2o_policy policy, mlx_h2o_cache cache) {
  Call c = right_call(f, policy, cache);
  if (tried(f, &c, "all right")) fails(f->name, "all right", mlx_h2o_last_error());
  for (int i = 0; i < MOST_ARRAYS && f->in[i].name; ++i) refuse_array(f, &c, i);
  for (int i = 0; i < MOST_INTS && f->ints[i].name; ++i) {
    for (int w = 0; w < f->ints[i].wrong_count; ++w) {
      c.ints[i] = f->ints[i].wrong[w];
      refused(f, &c, f->ints[i].name, "is out of range");
    }
    c.ints[i] = f->ints[i].right;
  }
  for (int i = 0; i < (f->results < 0 ? 1 : f->results); ++i) {
    c.missing = i;
    refused(f, &c, "a result", "is NULL");
  }
  c.missing = NOTHING;
  const float scales[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; f->scaled && i < 3; ++i) {
    c.scale = scales[i];
    refused(f, &c, "scale", "is not finite");
  }
  c.scale = 0.2f;
  for (int i = 0; f->wrong_text[0] && i < 2; ++i) {
    c.texts[0] = f->wrong_text[i];
    refused(f, &c, "text", f->wrong_text[i]);
  }
  if (f->wrong_text[0]) c.texts[0] = NULL, refused(f, &c, "text", "is NULL");
  c.texts[0] = f->text;
  if (f->policy) c.policy = mlx_h2o_policy_new(), refused(f, &c, "policy", "is an empty handle");
  c.policy = policy;
  if (f->cache) c.cache = mlx_h2o_cache_new(), refused(f, &c, "cache", "is an empty handle");
  c.cache = cache;
  if (f->streamed) c.s = (mlx_stream){NULL}, refused(f, &c, "stream", "is an empty handle");
  free_inputs(&c);
}

// -- what makes policies and caches ---------------------------------------------------------------

#define REFUSED(call) \
  if (!(call) || !*mlx_h2o_last_error()) fails(#call, "", "was not refused")

static void refuse_settings(void) {
  mlx_h2o_policy policy = a_policy("distinct"), none = mlx_h2o_policy_new();
  REFUSED(mlx_h2o_policy_named(NULL, "h2o"));
  REFUSED(mlx_h2o_policy_named(&policy, NULL));
  // Some Python has.
  const char* unknown[] = {"unheard-of", "snapkv"};
  for (int i = 0; i < 2; i++) {
    REFUSED(mlx_h2o_policy_named(&none, unknown[i]));
    if (none.ctx) fails("policy_named", unknown[i], "made something");
  }
  const char* const wrong[][2] = {
      {"mass_weight", "nan"},
      {"distance_weight", "1"},
      {"mass_weight", "inf"},
      {"age_weight", "-inf"},
      {"mass_weight", "1e300"},
      {"age_weight", "nan"},
      {"recent", "nan"},
      {"recent", "1.0"},
      {"recent", "-1"},
      {"recent", "-0.5"},
      {"recent", "99999999999"},
      {"sink", "-1"},
      {"sink", "4x"},
      {"sink", ""},
      {"sink", "2147483648"},
      {"sink", "1073741825"},
      {"recent", "1073741825"},
      {"evict_every", "65537"},
      {"window", "1073741825"},
      {"pool", "4097"},
      {"pool", "500001"},
      {"mass_weight", "1e19"},
      {"evict_every", "0"},
      {"pool", "2"},
      {"pool", "-3"},
      {"window", "0"},
      {"unit", "heads"},
      {"prompt", "none"},
      {"age_normalised", "maybe"},
      {"decay", "0.5"},
      {"unheard-of", "1"},
      {"", ""}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i)
    if (!mlx_h2o_policy_set(policy, wrong[i][0], wrong[i][1]))
      fails("policy_set", wrong[i][0], wrong[i][1]);
  REFUSED(mlx_h2o_policy_set(policy, NULL, "1"));
  mlx_h2o_policy_free(policy);
}

// A frame [2, 32] of which one number may be another.
static mlx_array part_of_frame(float all, float other) {
  float numbers[64];
  const int shape[] = {2, 32};
  for (int i = 0; i < 64; ++i) numbers[i] = i == 40 ? other : all;
  return mlx_array_new_data(numbers, shape, 2, MLX_FLOAT32);
}

static void refuse_frames(mlx_h2o_policy policy) {
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  const int budgets[] = {8, 6}, other_shapes[][3] = {{3, 32}, {2, 32, 1}, {64}, {2, 0}};
  const int ranks[] = {2, 3, 1, 2};
  mlx_h2o_cache_options fine = mlx_h2o_cache_options_default();
  fine.k_bits = 4, fine.group_size = 32;
  fine.frame_centre = part_of_frame(0.5f, -2), fine.frame_scale = part_of_frame(0.5f, 2);
  mlx_h2o_cache_options wrong = fine;
#define WRONG_PART(part, value)                                    \
  wrong.part = value;                                              \
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &wrong)); \
  if (wrong.part.ctx) mlx_array_free(wrong.part);                  \
  wrong.part = fine.part;
  WRONG_PART(frame_centre, kNone)
  WRONG_PART(frame_scale, kNone)
  WRONG_PART(frame_centre, part_of_frame(0, NAN))
  WRONG_PART(frame_centre, part_of_frame(0, -INFINITY))
  WRONG_PART(frame_scale, part_of_frame(1, 0))
  WRONG_PART(frame_scale, part_of_frame(1, -1))
  WRONG_PART(frame_scale, part_of_frame(1, INFINITY))
  WRONG_PART(frame_scale, part_of_frame(NAN, 1))
  for (int i = 0; i < 4; ++i) {
    WRONG_PART(frame_centre, made(other_shapes[i], ranks[i], MLX_FLOAT32, 0))
    WRONG_PART(frame_scale, made(other_shapes[i], ranks[i], MLX_FLOAT32, 0))
  }
  WRONG_PART(frame_scale, made((int[]){2, 32}, 2, MLX_FLOAT16, 3))
  WRONG_PART(frame_centre, made((int[]){2, 32}, 2, MLX_INT32, 3))
#undef WRONG_PART
  wrong.k_bits = 0, wrong.v_bits = 4;  // keys that are not packed
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &wrong));
  if (cache.ctx) fails("cache_make", "", "made something in a wrong frame");

  // Keys of another width, and attention sinks beside a centre.
  must(mlx_h2o_cache_make(&cache, policy, budgets, 2, &fine), "a framed cache");
  mlx_array q = made((int[]){2, 4, 3, 32}, 4, MLX_FLOAT32, 0), out = kNone;
  mlx_array k = made((int[]){2, 2, 3, 32}, 4, MLX_FLOAT32, 0);
  mlx_array wide_q = made((int[]){2, 4, 3, 64}, 4, MLX_FLOAT32, 0);
  mlx_array wide_k = made((int[]){2, 2, 3, 64}, 4, MLX_FLOAT32, 0);
  mlx_array sinks = made((int[]){4}, 1, MLX_FLOAT32, 0);
  REFUSED(mlx_h2o_cache_update_and_attend(
      &out, cache, wide_q, wide_k, wide_k, 1, "causal", kNone, kNone, kStream));
  REFUSED(
      mlx_h2o_cache_update_and_attend(&out, cache, q, k, k, 1, "causal", kNone, sinks, kStream));
  must(
      mlx_h2o_cache_update_and_attend(&out, cache, q, k, k, 1, "causal", kNone, kNone, kStream),
      "in a frame");
  must(mlx_array_eval(out), "eval");
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(wide_q), mlx_array_free(wide_k);
  mlx_array_free(sinks), mlx_array_free(out);
  mlx_array_free(fine.frame_centre), mlx_array_free(fine.frame_scale);
  mlx_h2o_cache_free(cache);
}

// Stages of other forms; and others than attention of ours can have.
static void refuse_fillings(mlx_h2o_policy policy) {
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  const int budgets[] = {8, 8};
  const int wrong[][6] = {
      {8, 10, 6, 8, 6, 10},   // not beyond the one before
      {0, 10, 6, 16, 6, 10},  // none at all
      {-5, 10, 6, 16, 6, 10}, {INT_MIN, 10, 6, INT_MAX, 6, 10},
      {8, 10, 0, 16, 6, 10},  {8, 10, 6, 16, -1, 10},
      {8, 10, 6, 16, 1, 10},
  };
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.n_stages = 2;
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &options));  // a null pointer
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    options.filling = wrong[i];
    REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &options));
  }
  const int right[] = {8, 10, 6, 16, 6, 10};
  options.filling = right;
  options.n_stages = (size_t)-1;
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &options));
  options.n_stages = 2;
  if (cache.ctx) fails("cache_make", "filling", "made something");
  must(mlx_h2o_cache_make(&cache, policy, budgets, 2, &options), "a cache with stages");
  mlx_h2o_policy keys_only = a_policy("keydiff");
  options.attending = false;
  REFUSED(mlx_h2o_cache_make(&cache, keys_only, budgets, 2, &options));
  mlx_h2o_policy_free(keys_only);
  mlx_h2o_cache_free(cache);
}

// A cache for a model that attends by itself.
static void refuse_fetching(void) {
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_policy keys_only = a_policy("keydiff");
  mlx_h2o_cache_options outside = mlx_h2o_cache_options_default();
  outside.attending = false, outside.undo = 4;
  const int alike[] = {24, 24};
  REFUSED(mlx_h2o_cache_make(&cache, keys_only, alike, 2, &outside));
  if (cache.ctx) fails("cache_make", "", "made something");

  outside.undo = 0;
  must(mlx_h2o_cache_make(&cache, keys_only, alike, 2, &outside), "a cache");
  mlx_array k = made((int[]){2, 2, 3, 32}, 4, MLX_FLOAT32, 0);
  mlx_array v = made((int[]){2, 2, 3, 64}, 4, MLX_FLOAT32, 0);
  mlx_array ints = made((int[]){2, 2, 3, 64}, 4, MLX_INT32, 0);
  mlx_array few = made((int[]){2, 2, 2, 64}, 4, MLX_FLOAT32, 0);
  mlx_array out[3] = {kNone, kNone, kNone};
  for (int i = 0; i < 3; ++i)
    REFUSED(mlx_h2o_cache_update_and_fetch(
        i == 0 ? NULL : &out[0], i == 1 ? NULL : &out[1], i == 2 ? NULL : &out[2], cache, k, v,
        kStream));
  REFUSED(mlx_h2o_cache_update_and_fetch(&out[0], &out[1], &out[2], cache, kNone, v, kStream));
  REFUSED(mlx_h2o_cache_update_and_fetch(&out[0], &out[1], &out[2], cache, k, ints, kStream));
  REFUSED(mlx_h2o_cache_update_and_fetch(&out[0], &out[1], &out[2], cache, k, few, kStream));
  REFUSED(
      mlx_h2o_cache_update_and_attend(&out[0], cache, k, k, v, 1, "causal", kNone, kNone, kStream));
  REFUSED(mlx_h2o_cache_kept(&out[0], cache, kStream));
  if (out[0].ctx || out[1].ctx || out[2].ctx) fails("update_and_fetch", "", "gave something");
  must(mlx_h2o_cache_update_and_fetch(&out[0], &out[1], &out[2], cache, k, v, kStream), "fetch");
  REFUSED(mlx_h2o_cache_scores(&out[2], cache, kStream));
  for (int i = 0; i < 3; ++i) mlx_array_free(out[i]);
  mlx_array_free(k), mlx_array_free(v), mlx_array_free(ints), mlx_array_free(few);
  mlx_h2o_policy_free(keys_only);
  mlx_h2o_cache_free(cache);
}

static void refuse_ropes(mlx_h2o_policy policy) {
  const int budgets[] = {24, 24};
  const mlx_h2o_rope fine = {sizeof fine, 32, 10000, 1, false},
                     wrong[] = {{sizeof fine, 31, 10000, 1, false},
                                {sizeof fine, 0, 10000, 1, false},
                                {sizeof fine, -2, 10000, 1, false},
                                {sizeof fine, INT_MAX - 1, 10000, 1, false},
                                {sizeof fine, 32, 0, 1, false},
                                {sizeof fine, 32, NAN, 1, true},
                                {sizeof fine, 32, 10000, INFINITY, true}};
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options rolling = mlx_h2o_cache_options_default();
  rolling.remainder = false, rolling.group_size = 32;
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    rolling.rope = &wrong[i];
    REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &rolling));
  }
  rolling.rope = &fine;
  mlx_h2o_cache_options packed = rolling, answering = rolling;
  packed.v_bits = 8, answering.remainder = true;
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &packed));
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &answering));
  must(mlx_h2o_cache_make(&cache, policy, budgets, 2, &rolling), "a rolling cache");
  mlx_h2o_cache_free(cache);
}

static void refuse_caches(void) {
  mlx_h2o_policy policy = a_policy("distinct");
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  const mlx_h2o_cache_options fine = mlx_h2o_cache_options_default();
  const int budgets[] = {8, 6};
  REFUSED(mlx_h2o_cache_make(NULL, policy, budgets, 2, &fine));
  REFUSED(mlx_h2o_cache_make(&cache, mlx_h2o_policy_new(), budgets, 2, &fine));
  REFUSED(mlx_h2o_cache_make(&cache, policy, NULL, 2, &fine));
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 0, &fine));
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, (size_t)-1, &fine));
  const int wrong_budgets[] = {0, -1, INT_MIN, 1};
  for (int i = 0; i < 4; ++i) {
    const int some[] = {8, wrong_budgets[i]};
    REFUSED(mlx_h2o_cache_make(&cache, policy, some, 2, &fine));
  }
  enum { WRONG = 12 };
  mlx_h2o_cache_options wrong[WRONG];
  for (int i = 0; i < WRONG; ++i) wrong[i] = fine;
  wrong[0].k_bits = 7, wrong[1].v_bits = -1, wrong[2].group_size = 0, wrong[3].group_size = 33;
  wrong[4].recent_bits = 16;  // nothing else is packed
  wrong[5].k_bits = 4, wrong[5].recent_bits = 17;
  wrong[6].attending = false;  // a policy that must see attention
  wrong[7].undo = -1, wrong[8].undo = INT_MIN, wrong[9].k_bits = INT_MAX, wrong[10].v_bits = 32;
  wrong[11].group_size = INT_MIN;
  for (int i = 0; i < WRONG; ++i)
    REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &wrong[i]));
  const float saturations[][2] = {{-1, 4}, {4, NAN}, {INFINITY, 0}};
  for (int i = 0; i < 3; ++i) {
    mlx_h2o_cache_options saturated = fine;
    saturated.saturation = saturations[i];
    REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &saturated));
  }
  refuse_ropes(policy);
  refuse_frames(policy);
  refuse_fillings(policy);
  must(mlx_h2o_policy_set(policy, "sink", "1073741824"), "sink");
  must(mlx_h2o_policy_set(policy, "evict_every", "65536"), "evict_every");
  REFUSED(mlx_h2o_cache_make(&cache, policy, budgets, 2, &fine));
  if (cache.ctx) fails("cache_make", "", "made something");
  mlx_h2o_policy_free(policy);
}

static void refuse_all(void) {
  for (int undo = 0; undo <= 4; undo += 4) {
    mlx_h2o_policy policy = a_policy("distinct");
    mlx_h2o_cache cache = a_cache(undo), twin = a_cache(undo);
    for (int i = 0; i < kFunctionCount; ++i) {
      if (!undo && !strcmp(kFunctions[i].name, "cache_trim")) continue;  // none can be taken back
      refuse_each(&kFunctions[i], policy, cache);
      if (!kFunctions[i].cache) continue;
      Call right = right_call(&kFunctions[i], policy, twin);
      tried(&kFunctions[i], &right, "all right");
      free_inputs(&right);
    }
    // The twin heard nothing of what was refused, and holds the same.
    mlx_array held[2] = {kNone, kNone}, same = kNone;
    must(mlx_h2o_cache_scores(&held[0], cache, kStream), "scores");
    must(mlx_h2o_cache_scores(&held[1], twin, kStream), "scores");
    must(mlx_array_equal(&same, held[0], held[1], false, kStream), "equal");
    bool equal = false;
    must(mlx_array_item_bool(&equal, same), "item");
    if (!equal) fails("cache", "after refusals", "holds something else");
    mlx_array_free(held[0]), mlx_array_free(held[1]), mlx_array_free(same);
    mlx_h2o_cache_free(cache), mlx_h2o_cache_free(twin);
    mlx_h2o_policy_free(policy);
  }
  refuse_settings();
  refuse_caches();
  refuse_fetching();
}

// -- several at random ----------------------------------------------------------------------------

static mlx_array changed(const Array* a) {
  static const int lengths[] = {0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 9, 32, 33, 64};
  if (chance(15)) return kNone;
  int shape[8];
  int rank = shape_of(a, shape);
  if (chance(15)) rank = 1 + below(5);
  for (int i = 0; i < rank; ++i)
    if (i >= (int)strlen(a->axes) || chance(30)) shape[i] = lengths[below(14)];
  const mlx_dtype dtype = chance(60) ? right_dtype(a->kind)
      : chance(50)                   ? MLX_BFLOAT16
                                     : (mlx_dtype)below(13);
  return made(shape, rank, dtype, a->kind == 'x' ? 1 + below(12) : chance(30) ? 9 : 0);
}

static int changed_int(int right) {
  static const int numbers[] = {-1, 0, 1, 2, 3, 4, 5, 8, 32, 64, 128, 46341, INT_MAX, INT_MIN};
  return chance(50) ? right : numbers[below(14)];
}

// A policy and a cache with settings and options of which some may be wrong.
static mlx_h2o_policy any_policy(void) {
  static const char* const names[] = {"distinct",  "h2o",     "ema",   "ema-logits", "tova",
                                      "streaming", "keydiff", "paper", "h2o-paper",  "salient"};
  static const char* const settings[][2] = {
      {"sink", "0"},
      {"sink", "3"},
      {"recent", "2"},
      {"recent", "0.5"},
      {"recent", "0"},
      {"unit", "layer"},
      {"unit", "head"},
      {"evict_every", "2"},
      {"evict_every", "5"},
      {"age_normalised", "true"},
      {"value_weighted", "true"},
      {"prompt", "full"},
      {"prompt", "window"},
      {"window", "1"},
      {"window", "1073741824"},
      {"pool", "1"},
      {"pool", "4095"},
      {"decay", "0"},
      {"mass_weight", "0"},
      {"age_weight", "-3e38"},
      {"mass_weight", "nan"},
      {"distance_weight", "0"},
      {"value_weight", "-2"},
      {"recent", "1e9"}};
  mlx_h2o_policy policy = a_policy(names[below(10)]);
  if (chance(80)) must(mlx_h2o_policy_set(policy, "recent", "1"), "recent");
  for (int i = below(4); i; --i) {
    const int s = below(24);
    mlx_h2o_policy_set(policy, settings[s][0], settings[s][1]);
  }
  return policy;
}

static mlx_h2o_cache any_cache(void) {
  static const int budgets[] = {-1, 0, 1, 3, 6, 8, 12, 17, 24, 300};
  static const int bits[] = {0, 0, 0, 2, 3, 4, 5, 6, 8, 7}, newest[] = {0, 0, 0, 16, 8, 4, 9};
  for (;;) {
    mlx_h2o_policy policy = any_policy();
    mlx_h2o_cache cache = mlx_h2o_cache_new();
    mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
    const int first = budgets[below(10)], some[] = {first, chance(60) ? first : budgets[below(10)]};
    options.remainder = chance(70);
    options.k_bits = bits[below(10)], options.v_bits = bits[below(10)];
    options.group_size = chance(80) ? 32 : changed_int(64);
    options.recent_bits = newest[below(7)];
    options.undo = chance(50) ? below(6) : 0;
    const float saturation[] = {(float)below(5) - (float)chance(10), (float)below(3)};
    if (chance(30)) options.saturation = saturation;
    const int stages[] = {below(20), budgets[below(10)], budgets[below(10)], below(40), 12, 6};
    if (chance(40)) options.filling = stages, options.n_stages = 1 + below(2);
    if (chance(options.k_bits ? 50 : 5)) {
      options.frame_centre = part_of_frame((float)below(2), chance(10) ? NAN : 0);
      options.frame_scale = part_of_frame(2, (float)below(10) / 4);
    }
    const mlx_h2o_rope rope = {
        sizeof rope, chance(90) ? 2 * below(18) : changed_int(32), (float)below(20000),
        chance(95) ? 1 : NAN, chance(50)};
    if (chance(options.k_bits || options.v_bits || options.remainder ? 5 : 50))
      options.rope = &rope;
    const int status = mlx_h2o_cache_make(&cache, policy, some, 2, &options);
    mlx_h2o_policy_free(policy);
    mlx_array_free(options.frame_centre), mlx_array_free(options.frame_scale);
    if (!status) return cache;
    if (!*mlx_h2o_last_error() || cache.ctx) fails("cache_make", "at random", "no message");
  }
}

static int fuzz(int count) {
  enum { CACHES = 6 };
  mlx_h2o_cache caches[CACHES];
  for (int i = 0; i < CACHES; ++i) caches[i] = any_cache();
  int refusals = 0;
  for (int n = 0; n < count && !failures; ++n) {
    const int held = below(CACHES);
    if (chance(3)) mlx_h2o_cache_free(caches[held]), caches[held] = any_cache();
    mlx_h2o_use_kernels(chance(80));
    // Caches are what the rest is for.
    int which = below(kFunctionCount);
    while (!kFunctions[which].cache && chance(50)) which = below(kFunctionCount);
    const Function* f = &kFunctions[which];
    mlx_h2o_policy policy = any_policy();
    Call c = right_call(f, policy, caches[held]);
    const int wrong = chance(60) ? 0 : chance(50) ? 10 : 40;  // percent of the arguments
    for (int i = 0; i < MOST_ARRAYS && f->in[i].name; ++i)
      if (chance(wrong) || (f->in[i].optional && chance(50))) {
        mlx_array_free(c.in[i]);
        c.in[i] = f->in[i].optional && chance(50) ? kNone : changed(&f->in[i]);
      }
    for (int i = 0; i < MOST_INTS && f->ints[i].name; ++i)
      if (chance(wrong)) c.ints[i] = changed_int(c.ints[i]);
    if (!strcmp(f->name, "cache_trim")) c.ints[0] = below(8);
    if (chance(wrong)) c.scale = chance(50) ? NAN : 1e30f;
    if (f->results > 0 && chance(wrong)) c.missing = below(f->results);
    char what[64];
    snprintf(what, sizeof what, "call %d of seed %llu", n, (unsigned long long)seed);
    refusals += tried(f, &c, what);
    free_inputs(&c);
    mlx_h2o_policy_free(policy);
  }
  for (int i = 0; i < CACHES; ++i) mlx_h2o_cache_free(caches[i]);
  return refusals;
}

static void silent(const char* message, void* data) {
  (void)data;
  fprintf(stderr, "arguments: mlx-c: %s\n", message);
}

int main(int argc, char** argv) {
  mlx_set_error_handler(silent, NULL, NULL);
  kStream = mlx_default_cpu_stream_new();
  if (argc == 2 && !strcmp(argv[1], "refuse")) {
    refuse_all();
    printf("%d functions, each argument wrong in every way\n", kFunctionCount);
  } else if (argc == 4 && !strcmp(argv[1], "fuzz")) {
    seed = strtoull(argv[3], NULL, 10);
    const int count = atoi(argv[2]);
    printf("%d calls, %d of them refused\n", count, fuzz(count));
  } else {
    fprintf(stderr, "arguments refuse | arguments fuzz COUNT SEED\n");
    return 2;
  }
  mlx_stream_free(kStream);
  return failures != 0;
}
