#include "calls.h"

#include <limits.h>
#include <string.h>

// Batch, query and KV heads, queries, keys, widths of keys and values, slots, rows to write; words
// and groups of keys (4 bits) and values (8 bits) in groups of 32; and one token.
static const char kAxes[] = "BQKLNDVSMWGwg1";
static const int kLengths[] = {2, 4, 2, 3, 7, 32, 64, 8, 3, 4, 1, 16, 2, 1};

int length_of(char axis) {
  return kLengths[strchr(kAxes, axis) - kAxes];
}

static mlx_array* out(Call* c, int i) {
  return c->missing == i ? NULL : &c->out[i];
}

#define IN c->in

static int with_scores(Call* c) {
  return mlx_h2o_attention_with_scores(
      out(c, 0), out(c, 1), out(c, 2), IN[0], IN[1], IN[2], c->scale, c->texts[0], IN[3], IN[4],
      c->s);
}

static int with_mass(Call* c) {
  return mlx_h2o_attention_with_mass(
      out(c, 0), out(c, 1), out(c, 2), IN[0], IN[1], IN[2], c->scale, c->texts[0], IN[3], IN[4],
      c->s);
}

static int causal(Call* c) {
  return mlx_h2o_attention_with_mass(
      out(c, 0), out(c, 1), out(c, 2), IN[0], IN[1], IN[2], c->scale, c->texts[0], mlx_array_new(),
      mlx_array_new(), c->s);
}

static int quantized(Call* c) {
  return mlx_h2o_attention_quantized_with_scores(
      out(c, 0), out(c, 1), out(c, 2), IN[0], IN[1], IN[2], IN[3], IN[4], IN[5], IN[6], c->scale,
      c->ints[0], c->ints[1], c->ints[2], c->texts[0], IN[7], IN[8], c->s);
}

static int mass(Call* c) {
  return mlx_h2o_attention_mass(out(c, 0), IN[0], IN[1], c->ints[0], c->s);
}

// A remainder out of the first four results.
static mlx_h2o_remainder results(const Call* c) {
  return (mlx_h2o_remainder){c->out[0], c->out[1], c->out[2], c->out[3]};
}

static int store(Call* c, mlx_h2o_remainder r, int status) {
  c->out[0] = r.count, c->out[1] = r.mean_key, c->out[2] = r.var_key, c->out[3] = r.mean_value;
  return status;
}

static mlx_h2o_remainder given(const Call* c) {
  return (mlx_h2o_remainder){IN[0], IN[1], IN[2], IN[3]};
}

static int empty(Call* c) {
  mlx_h2o_remainder r = results(c);
  const int* n = c->ints;
  const int status =
      mlx_h2o_remainder_empty(c->missing < 0 ? &r : NULL, n[0], n[1], n[2], n[3], c->s);
  return store(c, r, status);
}

static int fold(Call* c) {
  mlx_h2o_remainder r = results(c);
  const int status =
      mlx_h2o_remainder_fold(c->missing < 0 ? &r : NULL, given(c), IN[4], IN[5], IN[6], c->s);
  return store(c, r, status);
}

static int column(Call* c) {
  return mlx_h2o_remainder_column(out(c, 0), given(c), IN[4], c->scale, NULL, c->s);
}

static int join(Call* c) {
  return mlx_h2o_remainder_join(out(c, 0), out(c, 1), IN[0], IN[1], IN[2], IN[3], c->s);
}

static int rows(Call* c) {
  return mlx_h2o_remainder_rows(out(c, 0), out(c, 1), given(c), c->ints[0], c->s);
}

static int set(Call* c) {
  return mlx_h2o_policy_set(c->policy, c->texts[1], c->texts[0]);
}

static int recent_slots(Call* c) {
  int slots = (int)c->number;
  const int status =
      mlx_h2o_policy_recent_slots(c->missing < 0 ? &slots : NULL, c->policy, c->ints[0]);
  c->number = slots;
  return status;
}

static int accumulate(Call* c) {
  return mlx_h2o_accumulate(out(c, 0), c->policy, IN[0], IN[1], IN[2], c->s);
}

static int evictable(Call* c) {
  return mlx_h2o_evictable(out(c, 0), IN[0], c->ints[0], c->ints[1], c->ints[2], c->s);
}

#define GIVEN_SLOTS \
  &(mlx_h2o_slots){ \
      sizeof(mlx_h2o_slots), IN[0], IN[1], IN[2], IN[3], IN[4], IN[5], c->ints[0], c->ints[1]}

static int priority(Call* c) {
  return mlx_h2o_priority(out(c, 0), c->policy, GIVEN_SLOTS, c->s);
}

static int prompt_priority(Call* c) {
  return mlx_h2o_prompt_priority(out(c, 0), c->policy, GIVEN_SLOTS, IN[6], c->s);
}

static int select_victims(Call* c) {
  return mlx_h2o_select_victims(out(c, 0), IN[0], IN[1], IN[2], c->ints[0], false, c->s);
}

static int select_kept(Call* c) {
  return mlx_h2o_select_kept(out(c, 0), IN[0], IN[1], IN[2], c->ints[0], true, c->s);
}

static int compress_prompt(Call* c) {
  return mlx_h2o_compress_prompt(out(c, 0), c->policy, GIVEN_SLOTS, IN[6], c->ints[2], c->s);
}

static int write_rows(Call* c) {
  return mlx_h2o_write_rows(out(c, 0), IN[0], IN[1], IN[2], c->s);
}

static int quantize_append(Call* c) {
  return mlx_h2o_quantize_append(
      out(c, 0), out(c, 1), out(c, 2), IN[0], IN[1], IN[2], IN[3], IN[4], c->ints[0], c->ints[1],
      c->s);
}

static int causally(Call* c) {
  return mlx_h2o_cache_update_and_attend(
      out(c, 0), c->cache, IN[0], IN[1], IN[2], c->scale, c->texts[0], mlx_array_new(), IN[3],
      c->s);
}

static int update_and_attend(Call* c) {
  return mlx_h2o_cache_update_and_attend(
      out(c, 0), c->cache, IN[0], IN[1], IN[2], c->scale, c->texts[0], IN[3], IN[4], c->s);
}

static int make_mask(Call* c) {
  const char* mode = NULL;
  return mlx_h2o_cache_make_mask(&mode, out(c, 0), c->cache, c->ints[0], true, c->s);
}

static int rows_of(Call* c) {
  return mlx_h2o_cache_rows(out(c, 0), out(c, 1), out(c, 2), c->cache, c->s);
}

#define NUMBER(name, type)                                                              \
  static int name(Call* c) {                                                            \
    type number = (type)c->number;                                                      \
    const int status = mlx_h2o_cache_##name(c->missing < 0 ? &number : NULL, c->cache); \
    c->number = (long long)number;                                                      \
    return status;                                                                      \
  }
NUMBER(offset, int)
NUMBER(size, int)
NUMBER(evicted, int64_t)
NUMBER(nbytes, size_t)
NUMBER(trimmable, int)

static int budgets(Call* c) {
  int slots[2] = {(int)c->number};
  size_t heads = (size_t)c->ints[0];
  const int status = mlx_h2o_cache_budgets(slots, c->missing < 0 ? &heads : NULL, c->cache);
  c->number = slots[0];
  return status;
}

static int trim(Call* c) {
  return mlx_h2o_cache_trim(c->cache, c->ints[0], c->s);
}

static int kept(Call* c) {
  return mlx_h2o_cache_kept(out(c, 0), c->cache, c->s);
}

static int scores(Call* c) {
  return mlx_h2o_cache_scores(out(c, 0), c->cache, c->s);
}

static int remainder_of(Call* c) {
  mlx_h2o_remainder r = results(c);
  const int status = mlx_h2o_cache_remainder(c->missing < 0 ? &r : NULL, c->cache, c->s);
  return store(c, r, status);
}

#define REMAINDER                                                                                 \
  {"count", "BK", 's', false}, {"mean_key", "BKD", 's', false}, {"var_key", "BKD", 's', false}, { \
    "mean_value", "BKV", 's', false                                                               \
  }
#define SLOTS                                                                                     \
  {"keys", "BKND", 'f', false}, {"values", "BKNV", 'f', false}, {"positions", "BKN", 'i', false}, \
      {"scores", "BKN", 's', false}, {"evictable", "BKN", 'b', false}, {                          \
    "evicted_mean_key", "BKD", 's', false                                                         \
  }
#define ATTENTION                                                                  \
  {"q", "BQLD", 'f', false}, {"k", "BKND", 'f', false}, {"v", "BKNV", 'f', false}, \
      {"mask_arr", "BQLN", 'm', true}, {                                           \
    "sinks", "Q", 'f', true                                                        \
  }
#define COUNTS {"offset", 9, {-1, INT_MIN}, 2}, {"evicted", 2, {-1, INT_MIN}, 2}

const Function kFunctions[] = {
    {"attention_with_scores",
     with_scores,
     {ATTENTION},
     3,
     "V",
     .scaled = true,
     .streamed = true,
     .text = "",
     .wrong_text = {"upside down", "causal"}},
    {"attention_with_mass",
     with_mass,
     {ATTENTION},
     3,
     "V",
     .scaled = true,
     .streamed = true,
     .text = "array",
     .wrong_text = {"upside down", "causal"}},
    {"attention_with_mass (causal)",
     causal,
     {{"q", "BQLD", 'f', false}, {"k", "BKND", 'f', false}, {"v", "BKNV", 'f', false}},
     3,
     "VL",
     .scaled = true,
     .streamed = true,
     .text = "causal",
     .wrong_text = {"Causal", "array"}},
    {"attention_quantized_with_scores",
     quantized,
     {{"q", "BQLD", 'f', false},
      {"k_w", "BKNW", 'u', false},
      {"k_scales", "BKNG", 'f', false},
      {"k_biases", "BKNG", 'f', false},
      {"v_w", "BKNw", 'u', false},
      {"v_scales", "BKNg", 'f', false},
      {"v_biases", "BKNg", 'f', false},
      {"mask_arr", "BQLN", 'm', true},
      {"sinks", "Q", 'f', true}},
     3,
     "",
     {{"k_bits", 4, {0, -4, 7, 5, INT_MAX}, 5},
      {"v_bits", 8, {0, 1, 16, 6, INT_MIN}, 5},
      {"group_size", 32, {0, -32, 16, 64, INT_MAX}, 5}},
     .scaled = true,
     .streamed = true,
     .text = "",
     .wrong_text = {"causal", "all"}},
    {"attention_mass",
     mass,
     {{"scores", "BQLN", 's', false}, {"lse", "BQL", 's', false}},
     1,
     "N",
     {{"n_kv_heads", 2, {0, -1, 3, INT_MAX, INT_MIN}, 5}},
     .streamed = true},
    {"remainder_empty",
     empty,
     {{0}},
     4,
     "",
     {{"batch", 2, {0, -1, INT_MAX, INT_MIN}, 4},
      {"n_kv_heads", 2, {0, -1, INT_MAX, INT_MIN}, 4},
      {"key_width", 32, {0, -1, INT_MAX, INT_MIN}, 4},
      {"value_width", 64, {0, -1, INT_MAX, INT_MIN}, 4}},
     .streamed = true},
    {"remainder_fold",
     fold,
     {REMAINDER,
      {"keys", "BKMD", 'f', false},
      {"values", "BKMV", 'f', false},
      {"weights", "BKM", 'w', true}},
     4,
     "",
     .streamed = true},
    {"remainder_column",
     column,
     {REMAINDER, {"q", "BQLD", 'f', false}},
     1,
     "VL",
     .scaled = true,
     .streamed = true},
    {"remainder_join",
     join,
     {{"out", "BQLV", 'f', false},
      {"lse", "BQL", 's', false},
      {"logits", "BQL", 's', false},
      {"values", "BKV", 's', false}},
     2,
     "",
     .streamed = true},
    {"remainder_rows",
     rows,
     {REMAINDER},
     2,
     "V",
     {{"rows", 4, {0, -2, 3, 1026, INT_MAX}, 5}},
     .streamed = true},
    {"policy_set",
     set,
     {{0}},
     0,
     "",
     .policy = true,
     .text = "0.3",
     .wrong_text = {"nan", "1e999"}},
    {"policy_recent_slots",
     recent_slots,
     {{0}},
     -1,
     "",
     {{"budget", 10, {0, -1, INT_MIN}, 3}},
     .policy = true},
    {"accumulate",
     accumulate,
     {{"scores", "BKN", 's', false}, {"logits", "BQLN", 's', false}, {"lse", "BQL", 's', false}},
     1,
     "",
     .policy = true,
     .streamed = true},
    {"evictable",
     evictable,
     {{"positions", "BKN", 'i', false}},
     1,
     "BKN",
     {{"offset", 9, {-1, INT_MIN}, 2},
      {"sink", 2, {-1, INT_MIN}, 2},
      {"recent", 3, {-1, INT_MIN}, 2}},
     .streamed = true},
    {"priority", priority, {SLOTS}, 1, "V", {COUNTS}, .policy = true, .streamed = true},
    {"prompt_priority",
     prompt_priority,
     {SLOTS, {"window_mass", "BKN", 's', true}},
     1,
     "V",
     {COUNTS},
     .policy = true,
     .streamed = true},
    {"select_victims",
     select_victims,
     {{"priority", "BKN", 's', false},
      {"positions", "BKN", 'i', false},
      {"evictable", "BKN", 'b', false}},
     1,
     "",
     {{"count", 2, {0, -1, 8, INT_MAX, INT_MIN}, 5}},
     .streamed = true},
    {"select_kept",
     select_kept,
     {{"priority", "BKN", 's', false},
      {"positions", "BKN", 'i', false},
      {"evictable", "BKN", 'b', false}},
     1,
     "",
     {{"count", 2, {0, -1, 8, INT_MAX, INT_MIN}, 5}},
     .streamed = true},
    {"compress_prompt",
     compress_prompt,
     {SLOTS, {"window_mass", "BKN", 's', true}},
     1,
     "V",
     {COUNTS, {"count", 5, {0, -1, 8, INT_MAX, INT_MIN}, 5}},
     .policy = true,
     .streamed = true},
    {"write_rows",
     write_rows,
     {{"buffer", "BSD", 'r', false}, {"index", "BM", 'x', false}, {"rows", "BMD", 'r', false}},
     1,
     "S",
     .streamed = true},
    {"quantize_append",
     quantize_append,
     {{"w", "BSW", 'u', false},
      {"scales", "BSG", 'f', false},
      {"biases", "BSG", 'f', false},
      {"index", "BM", 'x', false},
      {"rows", "BMD", 'f', false}},
     3,
     "",
     {{"bits", 4, {0, -4, 7, 8, INT_MAX}, 5}, {"group_size", 32, {0, -32, 16, 64, INT_MAX}, 5}},
     .streamed = true},
    {"cache_update_and_attend (chunk)",
     causally,
     {{"q", "BQLD", 'f', false},
      {"keys", "BKLD", 'f', false},
      {"values", "BKLV", 'f', false},
      {"sinks", "Q", 'f', true}},
     1,
     "",
     .scaled = true,
     .cache = true,
     .streamed = true,
     .text = "causal",
     .wrong_text = {"array", "all"}},
    {"cache_update_and_attend (step)",
     causally,
     {{"q", "BQ1D", 'f', false},
      {"keys", "BK1D", 'f', false},
      {"values", "BK1V", 'f', false},
      {"sinks", "Q", 'f', true}},
     1,
     "",
     .scaled = true,
     .cache = true,
     .streamed = true,
     .text = "causal",
     .wrong_text = {"array", "all"}},
    {"cache_update_and_attend (masked)",
     update_and_attend,
     {{"q", "BQLD", 'f', false},
      {"keys", "BKLD", 'f', false},
      {"values", "BKLV", 'f', false},
      {"mask_arr", "BQLN", 'm', false},
      {"sinks", "Q", 'f', true}},
     1,
     "N",
     .scaled = true,
     .cache = true,
     .streamed = true,
     .text = "array",
     .wrong_text = {"causal", "all"}},
    {"cache_make_mask",
     make_mask,
     {{0}},
     1,
     "",
     {{"n", 3, {0, -1, INT_MAX, INT_MIN}, 4}},
     .cache = true,
     .streamed = true,
     .may_be_empty = true},
    {"cache_rows", rows_of, {{0}}, 3, "", .cache = true, .streamed = true},
    {"cache_offset", offset, {{0}}, -1, "", .cache = true},
    {"cache_size", size, {{0}}, -1, "", .cache = true},
    {"cache_evicted", evicted, {{0}}, -1, "", .cache = true},
    {"cache_nbytes", nbytes, {{0}}, -1, "", .cache = true},
    {"cache_trimmable", trimmable, {{0}}, -1, "", .cache = true},
    {"cache_budgets",
     budgets,
     {{0}},
     -1,
     "",
     {{"n_kv_heads", 2, {0, 1, 3, -1, INT_MIN}, 5}},
     .cache = true},
    {"cache_trim",
     trim,
     {{0}},
     0,
     "",
     {{"n", 1, {-1, 100, INT_MAX, INT_MIN}, 4}},
     .cache = true,
     .streamed = true},
    {"cache_kept", kept, {{0}}, 1, "", .cache = true, .streamed = true},
    {"cache_scores", scores, {{0}}, 1, "", .cache = true, .streamed = true},
    {"cache_remainder", remainder_of, {{0}}, 4, "", .cache = true, .streamed = true},
};
const int kFunctionCount = sizeof kFunctions / sizeof *kFunctions;
