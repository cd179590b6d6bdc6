// Conversations in caches, compared bit by bit (tests/conformance/test_c_api.py):
//
//   conversations undo        drafts of which some tokens are taken back against plain decoding
//   conversations interrupt   decoding that is looked at after each step against one that is not
//   conversations frame       keys in a cache's frame against keys that are put into it before
//   conversations positions   one of more tokens than 16 bits have positions for
//   conversations memory      a prompt that is reduced needs float32 copies of one head at a time
//   conversations gpu         a draft taken back where tests/host_gpu is the device
//
// The first three for several policies, stores and budgets, with and without kernels. Ends with 0,
// or with 1 and what differed.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mlx_h2o.h"
#include "numbers.h"

enum { B = 2, Hq = 4, Hk = 2, D = 32, Dv = 64, PROMPT = 23, TOKENS = 54, DRAFT = 5 };

static const mlx_array kNone = {NULL};
static mlx_stream s;
static int failures = 0;

static void must(int status, const char* what) {
  if (!status) return;
  fprintf(stderr, "conversations: %s: %s\n", what, mlx_h2o_last_error());
  exit(2);
}

// -- what is held in memory of a cache ------------------------------------------------------------

typedef struct Layer_ {
  const char *name, *policy, *settings[4];
  int budgets[Hk];
  int k_bits, v_bits, recent_bits;
  bool no_remainder, framed, rolling;
  const float* saturation;
} Layer;

static const float kFirstOrder[] = {0, 2.5f};

// Every kind of row, scores of every kind and none, ragged budgets, several victims at a time.
static const Layer kLayers[] = {
    {.name = "distinct", .policy = "distinct", .budgets = {24, 24}},
    {.name = "distinct ragged, 5 victims",
     .policy = "distinct",
     .settings = {"evict_every", "5"},
     .budgets = {30, 17}},
    {.name = "h2o k8v4", .policy = "h2o", .budgets = {24, 30}, .k_bits = 8, .v_bits = 4},
    {.name = "ema, newest apart",
     .policy = "ema",
     .settings = {"recent", "0.3"},
     .budgets = {24, 24},
     .k_bits = 4,
     .v_bits = 8,
     .recent_bits = 16},
    {.name = "ema-logits, newest in 8",
     .policy = "ema-logits",
     .settings = {"recent", "6"},
     .budgets = {24, 31},
     .k_bits = 2,
     .v_bits = 3,
     .recent_bits = 8},
    {.name = "tova by layer",
     .policy = "tova",
     .settings = {"unit", "layer", "recent", "3"},
     .budgets = {20, 20},
     .no_remainder = true},
    {.name = "h2o by value",
     .policy = "h2o",
     .settings = {"value_weighted", "true"},
     .budgets = {24, 24}},
    {.name = "keydiff ragged", .policy = "keydiff", .budgets = {24, 36}, .k_bits = 4, .v_bits = 4},
    {.name = "streaming", .policy = "streaming", .budgets = {20, 20}, .no_remainder = true},
    {.name = "salient at rolling positions",
     .policy = "salient",
     .budgets = {24, 17},
     .no_remainder = true,
     .rolling = true},
    {.name = "salient ragged", .policy = "salient", .budgets = {24, 17}},
    {.name = "salient in a frame",
     .policy = "salient",
     .settings = {"evict_every", "2"},
     .budgets = {24, 24},
     .k_bits = 5,
     .v_bits = 4,
     .framed = true,
     .saturation = kFirstOrder},
    {.name = "salient in a frame, newest apart",
     .policy = "salient",
     .settings = {"recent", "0.3"},
     .budgets = {24, 30},
     .k_bits = 4,
     .v_bits = 3,
     .recent_bits = 8,
     .framed = true},
};
static const int kLayerCount = sizeof kLayers / sizeof *kLayers;

// Of dimension d of a KV head.
static float centre_of(int head, int d) {
  return (float)((head * D + d) * 7 % 17) / 8 - 1;
}

static float scale_of(int head, int d) {
  return (float)((head * D + d) * 5 % 11) / 8 + 0.3f;
}

static mlx_array part_of_frame(bool scale) {
  const int shape[] = {Hk, D};
  float numbers[Hk * D];
  for (int h = 0; h < Hk; ++h)
    for (int d = 0; d < D; ++d) numbers[h * D + d] = scale ? scale_of(h, d) : centre_of(h, d);
  return mlx_array_new_data(numbers, shape, 2, MLX_FLOAT32);
}

static mlx_h2o_cache made(const Layer* layer, int undo) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  must(mlx_h2o_policy_named(&policy, layer->policy), layer->policy);
  must(mlx_h2o_policy_set(policy, "sink", "2"), "sink");
  for (int i = 0; i < 4 && layer->settings[i]; i += 2)
    must(mlx_h2o_policy_set(policy, layer->settings[i], layer->settings[i + 1]), "settings");
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.remainder = !layer->no_remainder;
  options.k_bits = layer->k_bits, options.v_bits = layer->v_bits;
  options.recent_bits = layer->recent_bits;
  options.group_size = 32, options.undo = undo, options.saturation = layer->saturation;
  const mlx_h2o_rope rope = {sizeof rope, D, 10000, 1, false};
  if (layer->rolling) options.rope = &rope;
  if (layer->framed) options.frame_centre = part_of_frame(false);
  if (layer->framed) options.frame_scale = part_of_frame(true);
  must(mlx_h2o_cache_make(&cache, policy, layer->budgets, Hk, &options), layer->name);
  mlx_array_free(options.frame_centre), mlx_array_free(options.frame_scale);
  mlx_h2o_policy_free(policy);
  return cache;
}

// -- tokens ---------------------------------------------------------------------------------------

// Whether queries and keys are put into the frame here.
static bool by_hand = false;

static float in_frame(enum Which which, float x, int head, int d) {
  if (which == K) return (x - centre_of(head % Hk, d)) / scale_of(head % Hk, d);
  return which == Q ? x * scale_of(head % Hq / (Hq / Hk), d) : x;
}

// Rows [B, heads, count, width] of the tokens from `first` on; what a wrong draft has is another's.
static mlx_array rows(enum Which which, int heads, int first, int count, int width, bool draft) {
  float* numbers = malloc((size_t)B * heads * count * width * sizeof *numbers);
  const uint64_t seed = seed_of(draft ? 2 : 1, which, 0);
  for (int i = 0; i < B * heads; ++i)
    for (int t = 0; t < count; ++t)
      for (int d = 0; d < width; ++d)
        numbers[(i * count + t) * width + d] =
            (float)(int)(hashed(seed, (size_t)((i * 4096 + first + t) * width + d)) % 257) / 128 -
            1;
  for (int i = 0; by_hand && i < B * heads * count * width; ++i)
    numbers[i] = in_frame(which, numbers[i], i / (count * width), i % width);
  const int shape[] = {B, heads, count, width};
  const mlx_array made = mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
  free(numbers);
  return made;
}

// Copies rows [B, Hq, L, Dv] of a chunk's tokens to where they belong among all.
static void keep(float* outs, mlx_array out, int first, int L, int count) {
  mlx_array dense = mlx_array_new();
  must(mlx_contiguous(&dense, out, false, s), "contiguous");
  must(mlx_array_eval(dense), "eval");
  const float* numbers = mlx_array_data_float32(dense);
  for (int i = 0; i < B * Hq; ++i)
    for (int t = 0; t < count; ++t)
      memcpy(outs + (i * TOKENS + first + t) * Dv, numbers + (i * L + t) * Dv, Dv * sizeof *outs);
  mlx_array_free(dense);
}

// The tokens first to first + L - 1, of which the last `wrong` are a draft's; outs of the others.
static void attend(mlx_h2o_cache cache, float* outs, int first, int L, int wrong) {
  mlx_array in[3], parts[2], out = kNone;
  const enum Which which[] = {Q, K, V};
  const int heads[] = {Hq, Hk, Hk}, widths[] = {D, D, Dv};
  for (int i = 0; i < 3; ++i) {
    parts[0] = rows(which[i], heads[i], first, L - wrong, widths[i], false);
    parts[1] = rows(which[i], heads[i], first + L - wrong, wrong, widths[i], true);
    mlx_vector_array both = mlx_vector_array_new_data(parts, 2);
    in[i] = mlx_array_new();
    must(mlx_concatenate_axis(&in[i], both, 2, s), "concatenate");
    mlx_vector_array_free(both), mlx_array_free(parts[0]), mlx_array_free(parts[1]);
  }
  must(
      mlx_h2o_cache_update_and_attend(
          &out, cache, in[0], in[1], in[2], 0.18f, "causal", kNone, kNone, s),
      "update_and_attend");
  keep(outs, out, first, L, L - wrong);
  for (int i = 0; i < 3; ++i) mlx_array_free(in[i]);
  mlx_array_free(out);
}

// -- comparing ------------------------------------------------------------------------------------

static void differs(const char* layer, const char* what, int at) {
  ++failures;
  fprintf(stderr, "conversations: %s: %s differ (%d)\n", layer, what, at);
}

static void same_arrays(const char* layer, const char* what, mlx_array a, mlx_array b, int at) {
  mlx_array same = mlx_array_new();
  bool equal = false;
  must(mlx_array_equal(&same, a, b, false, s), "equal");
  must(mlx_array_item_bool(&equal, same), "item");
  if (!equal) differs(layer, what, at);
  mlx_array_free(same);
}

static void same_caches(const char* layer, mlx_h2o_cache one, mlx_h2o_cache other, int at) {
  int offsets[2], sizes[2];
  int64_t evicted[2];
  mlx_h2o_cache both[] = {one, other};
  mlx_array kept[2] = {kNone, kNone}, scores[2] = {kNone, kNone};
  mlx_h2o_remainder remainder[2] = {mlx_h2o_remainder_new(), mlx_h2o_remainder_new()};
  bool scored = true, remembers = true;
  for (int i = 0; i < 2; ++i) {
    must(mlx_h2o_cache_offset(&offsets[i], both[i]), "offset");
    must(mlx_h2o_cache_size(&sizes[i], both[i]), "size");
    must(mlx_h2o_cache_evicted(&evicted[i], both[i]), "evicted");
    must(mlx_h2o_cache_kept(&kept[i], both[i], s), "kept");
    scored = !mlx_h2o_cache_scores(&scores[i], both[i], s) && scored;
    remembers = !mlx_h2o_cache_remainder(&remainder[i], both[i], s) && remembers;
  }
  if (offsets[0] != offsets[1] || sizes[0] != sizes[1] || evicted[0] != evicted[1])
    differs(layer, "offsets, sizes or numbers of evicted", at);
  same_arrays(layer, "positions", kept[0], kept[1], at);
  if (scored) same_arrays(layer, "scores", scores[0], scores[1], at);
  if (remembers) {
    same_arrays(layer, "counts", remainder[0].count, remainder[1].count, at);
    same_arrays(layer, "mean keys", remainder[0].mean_key, remainder[1].mean_key, at);
    same_arrays(layer, "variances", remainder[0].var_key, remainder[1].var_key, at);
    same_arrays(layer, "mean values", remainder[0].mean_value, remainder[1].mean_value, at);
  }
  for (int i = 0; i < 2; ++i) {
    mlx_array_free(kept[i]), mlx_array_free(scores[i]);
    mlx_h2o_remainder_free(remainder[i]);
  }
}

// -- positions ------------------------------------------------------------------------------------

static const int kFew = 1 << 15;  // whose positions fit into 16 bits

static size_t bytes_of(mlx_h2o_cache cache) {
  size_t bytes = 0;
  must(mlx_h2o_cache_nbytes(&bytes, cache), "nbytes");
  return bytes;
}

// The greatest position that each head keeps is the last token's.
static void keeps_the_newest(const Layer* layer, mlx_h2o_cache cache, int offset) {
  mlx_array kept = mlx_array_new(), newest = mlx_array_new(), dense = mlx_array_new();
  must(mlx_h2o_cache_kept(&kept, cache, s), "kept");
  must(mlx_max_axis(&newest, kept, 2, false, s), "max");
  must(mlx_contiguous(&dense, newest, false, s), "contiguous");
  must(mlx_array_eval(dense), "eval");
  const int32_t* positions = mlx_array_data_int32(dense);
  for (int i = 0; i < B * Hk; ++i)
    if (positions[i] != offset - 1) differs(layer->name, "the newest positions", positions[i]);
  mlx_array_free(kept), mlx_array_free(newest), mlx_array_free(dense);
}

// So many times the same chunk.
static void again(mlx_h2o_cache cache, int chunk, int times) {
  const mlx_array q = rows(Q, Hq, 0, chunk, D, false), k = rows(K, Hk, 0, chunk, D, false);
  const mlx_array v = rows(V, Hk, 0, chunk, Dv, false);
  for (int i = 0; i < times; ++i) {
    mlx_array out = mlx_array_new();
    must(
        mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.18f, "causal", kNone, kNone, s),
        "attend");
    must(mlx_array_eval(out), "eval");
    mlx_array_free(out);
  }
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v);
}

// Steps beyond what 16 bits hold, looked at after each one and not: two bytes more a slot.
static void positions(const Layer* layer) {
  enum { CHUNK = 341, STEPS = 7 };
  mlx_h2o_cache one = made(layer, 0), other = made(layer, 0);
  again(one, CHUNK, 96), again(other, CHUNK, 96);
  for (int t = 96 * CHUNK; t < kFew - STEPS; ++t) again(one, 1, 1), again(other, 1, 1);
  const size_t slots = bytes_of(other);
  size_t before = 0, after = 0;
  for (int t = kFew - STEPS; t < kFew + STEPS; ++t) {
    again(one, 1, 1), again(other, 1, 1);
    keeps_the_newest(layer, other, t + 1);
    if (t == kFew - 1) before = bytes_of(other);
    if (t == kFew) after = bytes_of(other);
  }
  same_caches(layer->name, one, other, kFew);
  int size = 0;
  must(mlx_h2o_cache_size(&size, other), "size");
  if (before < slots || after <= before || after - before > 2u * B * Hk * (size_t)size)
    differs(layer->name, "bytes of positions", (int)(after - before));
  mlx_h2o_cache_free(one), mlx_h2o_cache_free(other);
}

// -- undo -----------------------------------------------------------------------------------------

static int trimmable(mlx_h2o_cache cache) {
  int most = -1;
  must(mlx_h2o_cache_trimmable(&most, cache), "trimmable");
  return most;
}

static void refuses(const Layer* layer, mlx_h2o_cache cache, int n, const char* most) {
  if (!mlx_h2o_cache_trim(cache, n, s) || !strstr(mlx_h2o_last_error(), most)) {
    ++failures;
    fprintf(stderr, "conversations: %s: trim(%d) did not name %s\n", layer->name, n, most);
  }
}

// Drafts of DRAFT tokens and one that is sure, of which every number of tokens is taken back.
static void undo(const Layer* layer, int prompt) {
  float* plain = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *plain);
  float* drafted = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *drafted);
  mlx_h2o_cache one = made(layer, DRAFT), other = made(layer, DRAFT);
  attend(one, plain, 0, prompt, 0);
  attend(other, drafted, 0, prompt, 0);
  for (int t = prompt, wrong = 0; t < TOKENS; wrong = (wrong + 1) % (DRAFT + 1)) {
    // Now and then a draft is too short, or a single step lies between.
    const int most = wrong == 2 ? 2 : DRAFT + 1;
    const int L = most < TOKENS - t ? most : TOKENS - t, back = wrong < L ? wrong : L - 1;
    attend(other, drafted, t, L, back);
    char number[16];
    snprintf(number, sizeof number, " %d ", trimmable(other));
    refuses(layer, other, trimmable(other) + 1, number);
    must(mlx_h2o_cache_trim(other, back, s), "trim");
    for (int i = 0; i < L - back; ++i) attend(one, plain, t + i, 1, 0);
    t += L - back;
    same_caches(layer->name, one, other, t);
  }
  if (memcmp(plain, drafted, (size_t)B * Hq * TOKENS * Dv * sizeof *plain))
    differs(layer->name, "outputs", prompt);
  // All that is remembered, several times over, and again what was taken back.
  attend(other, drafted, TOKENS - 1, 1, 1), must(mlx_h2o_cache_trim(other, 1, s), "trim");
  for (int i = 0; i < 3; ++i) {
    const int back = trimmable(other);
    if (back < DRAFT - 1) differs(layer->name, "what can be taken back", back);
    must(mlx_h2o_cache_trim(other, back, s), "trim");
    if (trimmable(other)) differs(layer->name, "the tokens left to be taken back", back);
    refuses(layer, other, 1, " 0 ");
    for (int t = TOKENS - back; t < TOKENS; ++t) attend(other, drafted, t, 1, 0);
    same_caches(layer->name, one, other, back);
  }
  size_t bytes[2];
  mlx_h2o_cache none = made(layer, 0);
  for (int t = 0; t < TOKENS; t += PROMPT) attend(none, drafted, t, 6, 0);
  attend(none, drafted, 6, PROMPT, 0);
  must(mlx_h2o_cache_nbytes(&bytes[0], other), "nbytes");
  must(mlx_h2o_cache_nbytes(&bytes[1], none), "nbytes");
  // Five steps, each with a row of each head and, where there are some, the scores.
  const size_t row = (size_t)B * Hk * (D + Dv) / (layer->k_bits ? 4 : 1);
  if (bytes[0] < bytes[1] + DRAFT * row) differs(layer->name, "bytes", (int)bytes[0]);
  if (trimmable(none)) differs(layer->name, "what can be taken back without undo", 0);
  refuses(layer, none, 1, " 0 ");
  mlx_h2o_cache_free(one), mlx_h2o_cache_free(other), mlx_h2o_cache_free(none);
  free(plain), free(drafted);
}

// Before anything was evicted no journal is needed; the scores alone keep what the trimmed gave.
static void trim_without_evictions(const Layer* layer, int undo) {
  float* outs = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *outs);
  mlx_h2o_cache one = made(layer, undo), other = made(layer, undo);
  const bool scored = strcmp(layer->policy, "keydiff") && strcmp(layer->policy, "streaming");
  attend(one, outs, 0, 8, 0);
  attend(other, outs, 0, 8, 0);
  for (int t = 8; t < 12; ++t) attend(other, outs, t, 1, 1);
  if (trimmable(other) != 12) differs(layer->name, "tokens that nothing evicted", undo);
  must(mlx_h2o_cache_trim(other, 4, s), "trim");
  if (undo >= 4 || !scored) {
    for (int t = 8; t < 40; ++t) attend(one, outs, t, 1, 0), attend(other, outs, t, 1, 0);
    same_caches(layer->name, one, other, 0);
  }
  mlx_h2o_cache_free(other);
  other = made(layer, undo);
  attend(other, outs, 0, 9, 0);
  must(mlx_h2o_cache_trim(other, 4, s), "trim");
  int offset = 0;
  must(mlx_h2o_cache_offset(&offset, other), "offset");
  if (offset != 5 || trimmable(other) != 5) differs(layer->name, "tokens after a trim", offset);
  refuses(layer, other, 6, " 5 ");
  for (int t = 5; t < 40; ++t) attend(other, outs, t, 1, 0);
  mlx_h2o_cache_free(other);
  // All of them: as it was made.
  other = made(layer, undo);
  mlx_h2o_cache fresh = made(layer, undo);
  attend(other, outs, 0, 6, 6);
  must(mlx_h2o_cache_trim(other, 6, s), "trim");
  attend(other, outs, 0, PROMPT, 0), attend(fresh, outs, 0, PROMPT, 0);
  same_caches(layer->name, fresh, other, 1);
  mlx_h2o_cache_free(one), mlx_h2o_cache_free(other), mlx_h2o_cache_free(fresh);
  free(outs);
}

// With undo, too, memory does not grow: less than one byte a step, between the least that some
// steps and the least that later ones leave. (What the system gives for an array differs by some
// bytes.)
static void flat_memory(const Layer* layer) {
  enum { FIRST = 20, SEEN = 60, BETWEEN = 120 };
  float* outs = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *outs);
  mlx_h2o_cache cache = made(layer, DRAFT);
  size_t early = SIZE_MAX, late = SIZE_MAX, now = 0;
  for (int step = 0; step < FIRST + SEEN + BETWEEN; ++step) {
    attend(cache, outs, TOKENS - DRAFT - 1, DRAFT + 1, step % 3);
    must(mlx_h2o_cache_trim(cache, step % 3, s), "trim");
    must(mlx_synchronize(s), "synchronize");
    must(mlx_get_active_memory(&now), "memory");
    size_t* least = step < FIRST + SEEN ? &early : &late;
    if ((step >= FIRST && step < FIRST + SEEN) || step >= FIRST + BETWEEN)
      *least = now < *least ? now : *least;
  }
  if (late >= early + BETWEEN)
    differs(layer->name, "bytes in use, which grew,", (int)(late - early));
  size_t bytes = 0;
  must(mlx_h2o_cache_nbytes(&bytes, cache), "nbytes");
  if (bytes > now) differs(layer->name, "bytes held, which are more than in use,", (int)bytes);
  mlx_h2o_cache_free(cache);
  free(outs);
}

// -- frames ---------------------------------------------------------------------------------------

// A frame at the door is the same as one outside, whatever computes.
static void frame(const Layer* layer) {
  float* inside = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *inside);
  float* outside = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *outside);
  Layer bare = *layer;
  bare.framed = false;
  mlx_h2o_cache one = made(layer, 0), other = made(&bare, 0);
  for (int t = 0, L = PROMPT; t < TOKENS; t += L, L = t == TOKENS - 4 ? 4 : 1) {
    attend(one, inside, t, L, 0);
    by_hand = true;
    attend(other, outside, t, L, 0);
    by_hand = false;
  }
  if (memcmp(inside, outside, (size_t)B * Hq * TOKENS * Dv * sizeof *inside))
    differs(layer->name, "outputs in a frame", 0);
  same_caches(layer->name, one, other, 0);
  size_t bytes[2];
  must(mlx_h2o_cache_nbytes(&bytes[0], one), "nbytes");
  must(mlx_h2o_cache_nbytes(&bytes[1], other), "nbytes");
  if (bytes[0] != bytes[1] + 2 * Hk * D * sizeof(float))
    differs(layer->name, "bytes of a frame", 0);
  mlx_h2o_cache_free(one), mlx_h2o_cache_free(other);
  free(inside), free(outside);
}

// -- interruptions --------------------------------------------------------------------------------

// Fused steps give their arrays back when the cache is looked at: by name, whatever the store.
static void interrupt(const Layer* layer) {
  float* plain = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *plain);
  float* looked = calloc((size_t)B * Hq * TOKENS * Dv, sizeof *looked);
  mlx_h2o_cache one = made(layer, 0), other = made(layer, 0);
  attend(one, plain, 0, PROMPT, 0);
  attend(other, looked, 0, PROMPT, 0);
  for (int t = PROMPT; t < TOKENS; ++t) {
    attend(one, plain, t, 1, 0);
    attend(other, looked, t, 1, 0);
    mlx_array kept = kNone;
    must(mlx_h2o_cache_kept(&kept, other, s), "kept");
    must(mlx_array_eval(kept), "eval");
    mlx_array_free(kept);
  }
  if (memcmp(plain, looked, (size_t)B * Hq * TOKENS * Dv * sizeof *plain))
    differs(layer->name, "outputs", 0);
  same_caches(layer->name, one, other, 0);
  mlx_h2o_cache_free(one), mlx_h2o_cache_free(other);
  free(plain), free(looked);
}

// -- memory of a prompt ---------------------------------------------------------------------------

static void memory(void) {
  enum { HEADS = 64, LENGTH = 512, WIDTH = 64 };
  int budgets[HEADS];
  for (int i = 0; i < HEADS; ++i) budgets[i] = 32;
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  must(mlx_h2o_policy_named(&policy, "keydiff"), "keydiff");
  must(mlx_h2o_cache_make(&cache, policy, budgets, HEADS, NULL), "cache");
  const int shape[] = {1, HEADS, LENGTH, WIDTH};
  mlx_array wide = mlx_array_new(), rows = mlx_array_new(), out = mlx_array_new();
  mlx_array low = mlx_array_new_float32(-1), high = mlx_array_new_float32(1);
  must(mlx_random_uniform(&wide, low, high, shape, 4, MLX_FLOAT32, kNone, s), "uniform");
  must(mlx_astype(&rows, wide, MLX_FLOAT16, s), "astype");
  must(mlx_array_eval(rows), "eval");
  mlx_array_free(wide), mlx_array_free(low), mlx_array_free(high);
  size_t before = 0, peak = 0;
  must(mlx_get_active_memory(&before), "memory");
  must(mlx_reset_peak_memory(), "memory");
  must(
      mlx_h2o_cache_update_and_attend(
          &out, cache, rows, rows, rows, 0.1f, "causal", kNone, kNone, s),
      "prompt");
  must(mlx_array_eval(out), "eval");
  must(mlx_get_peak_memory(&peak), "memory");
  // One float32 copy of all heads' keys is twice the rows: the output, and heads one by one, are
  // less than that.
  const size_t held = mlx_array_nbytes(rows), more = peak - before;
  printf("a prompt of %zu bytes of keys was reduced in %zu more\n", held, more);
  if (more > 2 * held) ++failures;
  mlx_array_free(rows), mlx_array_free(out);
  mlx_h2o_cache_free(cache);
  mlx_h2o_policy_free(policy);
}

int main(int argc, char** argv) {
  const char* what = argc == 2 ? argv[1] : "";
  s = mlx_default_cpu_stream_new();
  if (!strcmp(what, "memory")) {
    memory();
  } else if (!strcmp(what, "interrupt")) {
    for (int i = 0; i < kLayerCount; ++i) interrupt(&kLayers[i]);
  } else if (!strcmp(what, "undo")) {
    for (int i = 0; i < kLayerCount; ++i) {
      // A third of them without kernels, and one from a prompt of one token on.
      mlx_h2o_use_kernels(i % 3 != 1);
      undo(&kLayers[i], i == 3 ? 1 : PROMPT);
      trim_without_evictions(&kLayers[i], i % 2 ? DRAFT : 0);
    }
    mlx_h2o_use_kernels(true);
    flat_memory(&kLayers[3]);
  } else if (!strcmp(what, "positions")) {
    for (int i = 0; i < kLayerCount; i += kLayerCount - 1) positions(&kLayers[i]);
    mlx_h2o_use_kernels(false);
    positions(&kLayers[2]);
  } else if (!strcmp(what, "frame")) {
    for (int i = 0; i < 2 * kLayerCount; ++i) {
      mlx_h2o_use_kernels(i % 2);
      if (kLayers[i / 2].framed) frame(&kLayers[i / 2]);
    }
  } else if (!strcmp(what, "gpu")) {
    undo(&kLayers[0], TOKENS - 4);
  } else {
    fprintf(stderr, "conversations undo | interrupt | frame | positions | memory | gpu\n");
    return 2;
  }
  mlx_stream_free(s);
  return failures != 0;
}
