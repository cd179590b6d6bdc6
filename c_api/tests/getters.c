// What a program asks and tells without arrays (tests/conformance/test_c_api.py): kinds of errors,
// settings as numbers, options of several sizes, and all that a cache was made with. Ends with 0,
// or with 1 and what was otherwise.
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRAM "getters"
#include "expect.h"
#include "mlx_h2o.h"
#include "numbers.h"

enum { HEADS = 2, WIDTH = 32, PROMPT = 24 };

static const mlx_array kNone = {NULL};
static mlx_stream s;

static void fails_with(int status, mlx_h2o_error code, const char* what) {
  expect(status && *mlx_h2o_last_error(), what);
  if (mlx_h2o_last_error_code() == code) return;
  fprintf(stderr, "getters: %s: code %d, not %d\n", what, mlx_h2o_last_error_code(), code);
  ++failures;
}

static mlx_array rows(int tokens, uint64_t seed) {
  const int shape[] = {1, HEADS, tokens, WIDTH};
  float numbers[HEADS * PROMPT * WIDTH];
  fill_numbers(numbers, (size_t)HEADS * tokens * WIDTH, seed, 0);
  return mlx_array_new_data(numbers, shape, 4, MLX_FLOAT32);
}

static int attend(mlx_h2o_cache cache, int tokens, uint64_t seed) {
  mlx_array x = rows(tokens, seed), out = mlx_array_new();
  const int status =
      mlx_h2o_cache_update_and_attend(&out, cache, x, x, x, 0.2f, "causal", kNone, kNone, s) ||
      mlx_array_eval(out);
  mlx_array_free(x), mlx_array_free(out);
  return status;
}

// Whether a cache with this policy says a setting so, in its settings as JSON.
static bool says(mlx_h2o_policy policy, const char* setting) {
  const int budgets[] = {500, 500};
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_map_string_to_array arrays = mlx_map_string_to_array_new();
  mlx_string settings = mlx_string_new();
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, NULL), "a cache");
  expect(!mlx_h2o_cache_arrays(&arrays, &settings, cache, s), "its settings");
  const bool found = strstr(mlx_string_data(settings), setting);
  mlx_h2o_cache_free(cache), mlx_map_string_to_array_free(arrays), mlx_string_free(settings);
  return found;
}

static void policies(void) {
  static const char* const wrong[][2] = {
      {"sink", "-1"},     {"sink", "1.0"},  {"recent", "1.0"},
      {"pool", "true"},   {"unit", "1"},    {"mass_weight", "1.0"},
      {"decay", "1e999"}, {"decay", "inf"}, {"sink", "99999999999"}};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  fails_with(mlx_h2o_policy_named(&policy, "unheard-of"), MLX_H2O_ERROR_SETTINGS, "a name");
  fails_with(mlx_h2o_policy_named(&policy, NULL), MLX_H2O_ERROR_ARGUMENT, "no name");
  expect(!mlx_h2o_policy_named(&policy, "paper"), "a preset");
  expect(
      says(policy, "\"ema-logits\"") && says(policy, "\"recent\": 128") &&
          says(policy, "\"unit\": \"layer\"") && says(policy, "\"age_normalised\": false"),
      "its settings");
  expect(
      !mlx_h2o_policy_set(policy, "recent", "0.25") && says(policy, "\"recent\": 0.25"), "share");
  expect(!mlx_h2o_policy_set(policy, "recent", "7") && says(policy, "\"recent\": 7"), "a count");
  expect(!mlx_h2o_policy_set(policy, "decay", "0") && says(policy, "\"decay\": 0.0"), "a number");
  expect(!mlx_h2o_policy_set(policy, "age_normalised", "true"), "true");
  expect(says(policy, "\"age_normalised\": true"), "it is true");
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i)
    fails_with(
        mlx_h2o_policy_set(policy, wrong[i][0], wrong[i][1]), MLX_H2O_ERROR_SETTINGS, wrong[i][0]);
  fails_with(mlx_h2o_policy_set(policy, NULL, "1"), MLX_H2O_ERROR_ARGUMENT, "no setting");
  mlx_h2o_policy_free(policy);
}

// A program that knows fewer options, and one that knows more.
static void sizes(mlx_h2o_policy policy) {
  const int budgets[] = {12, 16};
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  struct {
    mlx_h2o_cache_options known;
    long long more;
  } later;
  expect(!mlx_h2o_cache_options_init(&later.known, sizeof later) && !later.more, "more options");
  expect(later.known.size == sizeof later && later.known.kernels, "their defaults");
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, &later.known), "none of them set");
  later.more = 1;
  fails_with(
      mlx_h2o_cache_make(&cache, policy, budgets, HEADS, &later.known), MLX_H2O_ERROR_ARGUMENT,
      "one of them set");
  mlx_h2o_cache_options wrong = mlx_h2o_cache_options_default();
  expect(wrong.size == sizeof wrong && wrong.remainder && wrong.group_size == 64, "defaults");
  wrong.size = 4;
  fails_with(
      mlx_h2o_cache_make(&cache, policy, budgets, HEADS, &wrong), MLX_H2O_ERROR_ARGUMENT,
      "4 bytes");
  fails_with(mlx_h2o_cache_options_init(&wrong, 0), MLX_H2O_ERROR_ARGUMENT, "0 bytes");
  fails_with(mlx_h2o_cache_options_init(NULL, 100), MLX_H2O_ERROR_ARGUMENT, "no place");
  mlx_h2o_cache_free(cache);
}

static mlx_array part_of_frame(float number) {
  const int shape[] = {HEADS, WIDTH};
  float numbers[HEADS * WIDTH];
  for (int i = 0; i < HEADS * WIDTH; ++i) numbers[i] = number;
  return mlx_array_new_data(numbers, shape, 2, MLX_FLOAT32);
}

static bool is_all(mlx_array a, float number) {
  return mlx_array_size(a) == HEADS * WIDTH && mlx_array_data_float32(a)[WIDTH + 1] == number;
}

// The rope of positions that roll.
static void rope(mlx_h2o_policy policy, const int* budgets) {
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default(), got = options;
  const mlx_h2o_rope given = {sizeof given, 8, 500, 0.5f, true};
  expect(!got.rope, "no rope");
  options.remainder = false, options.rope = &given;
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, &options), "a rolling cache");
  expect(!mlx_h2o_cache_get_options(&got, cache), "its options");
  expect(
      got.rope && got.rope->dims == 8 && got.rope->base == 500 && got.rope->scale == 0.5f &&
          got.rope->traditional,
      "its rope");
  // A program of before there were ropes.
  got.size = offsetof(mlx_h2o_cache_options, rope), got.rope = &given;
  expect(!mlx_h2o_cache_get_options(&got, cache) && got.rope == &given, "fields that it knows");
  mlx_h2o_cache_free(cache);
}

static void caches(mlx_h2o_policy policy) {
  const int budgets[] = {12, 16}, filling[] = {20, 14, 14, 40, 12, 20}, span[] = {3, 5, 17, 18};
  const float saturation[] = {0, 3};
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default(), got = options;
  options.k_bits = 8, options.v_bits = 4, options.group_size = 32;
  options.saturation = saturation, options.kernels = false;
  options.filling = filling, options.n_stages = 2;
  options.frame_centre = part_of_frame(0.5f), options.frame_scale = part_of_frame(2);
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, &options), "a cache");
  mlx_array_free(options.frame_centre), mlx_array_free(options.frame_scale);
  expect(!mlx_h2o_cache_get_options(&got, cache), "its options");
  expect(
      got.k_bits == 8 && got.v_bits == 4 && got.group_size == 32 && !got.recent_bits && !got.undo &&
          got.remainder && got.attending && !got.kernels && got.saturation[0] == 0 &&
          got.saturation[1] == 3 && got.n_stages == 2 &&
          !memcmp(got.filling, filling, sizeof filling),
      "all of them");
  expect(is_all(got.frame_centre, 0.5f) && is_all(got.frame_scale, 2), "the frame");
  rope(policy, budgets);
  got.size = 0;
  fails_with(mlx_h2o_cache_get_options(&got, cache), MLX_H2O_ERROR_ARGUMENT, "no size");
  got.size = sizeof got;
  size_t count = 0, heads = HEADS, more = HEADS + 1;
  int slots[HEADS] = {0}, spans[4] = {0};
  mlx_h2o_row_types types = {.size = sizeof types};
  expect(!mlx_h2o_cache_budgets(NULL, &count, cache) && count == HEADS, "its heads");
  expect(!mlx_h2o_cache_budgets(slots, &heads, cache) && slots[1] == 16, "its slots");
  fails_with(mlx_h2o_cache_budgets(slots, &more, cache), MLX_H2O_ERROR_ARGUMENT, "other heads");
  fails_with(mlx_h2o_cache_budgets(slots, NULL, cache), MLX_H2O_ERROR_ARGUMENT, "no number");
  fails_with(mlx_h2o_cache_row_types(&types, cache), MLX_H2O_ERROR_STATE, "no rows yet");
  expect(!attend(cache, PROMPT, 1), "a prompt");
  expect(
      !mlx_h2o_cache_row_types(&types, cache) && types.batch == 1 && types.n_kv_heads == HEADS &&
          types.key_width == WIDTH && types.value_width == WIDTH &&
          types.key_dtype == MLX_FLOAT32 && types.value_dtype == MLX_FLOAT32,
      "its rows");
  expect(!mlx_h2o_cache_get_options(&got, cache) && got.n_stages == 1, "the stages to come");
  expect(!mlx_h2o_cache_budgets(slots, &heads, cache) && slots[1] == 14, "slots as they are now");
  types.size = 8;
  fails_with(mlx_h2o_cache_row_types(&types, cache), MLX_H2O_ERROR_ARGUMENT, "a size too small");
  expect(!mlx_h2o_cache_pins(NULL, &count, cache) && !count, "no pins");
  expect(!mlx_h2o_cache_pin(NULL, cache, span, 2, s), "pins");
  expect(!mlx_h2o_cache_pins(NULL, &count, cache) && count <= 2, "how many");
  expect(!mlx_h2o_cache_pins(spans, &count, cache), "which");
  expect(!count || spans[2 * count - 2] == 17 || spans[0] == 3, "these");
  more = count + 1;
  fails_with(mlx_h2o_cache_pins(spans, &more, cache), MLX_H2O_ERROR_ARGUMENT, "more");
  const int all[] = {0, 24}, few[] = {2, 2};
  fails_with(mlx_h2o_cache_pin(NULL, cache, all, 1, s), MLX_H2O_ERROR_SETTINGS, "too many pins");
  fails_with(
      mlx_h2o_cache_resize(cache, few, HEADS, NULL, 0, s), MLX_H2O_ERROR_SETTINGS, "too few slots");
  fails_with(mlx_h2o_cache_trim(cache, 20, s), MLX_H2O_ERROR_STATE, "too many to take back");
  fails_with(mlx_h2o_cache_trim(cache, -1, s), MLX_H2O_ERROR_ARGUMENT, "less than none");
  mlx_array out = mlx_array_new();
  fails_with(
      mlx_h2o_cache_update_and_fetch(&out, &out, &out, cache, out, out, s), MLX_H2O_ERROR_ARGUMENT,
      "empty handles");
  mlx_h2o_cache_free(cache);
}

// Two caches, one of them without kernels: alike in what they give, but for roundings.
static void kernels_of_one(mlx_h2o_policy policy) {
  const int budgets[] = {12, 12};
  mlx_h2o_cache with = mlx_h2o_cache_new(), without = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  expect(!mlx_h2o_cache_make(&with, policy, budgets, HEADS, &options), "kernels");
  options.kernels = false;
  expect(!mlx_h2o_cache_make(&without, policy, budgets, HEADS, &options), "no kernels");
  for (int i = 0; i < 4; ++i) {
    expect(!attend(with, i ? 1 : PROMPT, 100 + i), "a step");
    expect(!attend(without, i ? 1 : PROMPT, 100 + i), "a plain step");
  }
  expect(!mlx_h2o_cache_use_kernels(without, true), "kernels from now on");
  expect(!mlx_h2o_cache_get_options(&options, without) && options.kernels, "it says so");
  expect(!attend(without, 1, 200), "a step by kernels");
  mlx_h2o_cache_free(with), mlx_h2o_cache_free(without);
}

// Other slots, and those that follow them.
static void slots_that_follow(mlx_h2o_policy policy) {
  const int budgets[] = {16, 16}, other[] = {20, 14}, after = PROMPT + 2;
  const int stages[] = {after, 12, 18}, back[] = {after, 12, 18, after, 12, 18};
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options got = {.size = sizeof got};
  int slots[HEADS] = {0};
  size_t heads = HEADS;
  bool fused = true;
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, NULL), "a cache");
  expect(!mlx_h2o_cache_is_fused(&fused, cache) && !fused, "no step yet");
  fails_with(mlx_h2o_cache_is_fused(NULL, cache), MLX_H2O_ERROR_ARGUMENT, "no place");
  expect(!attend(cache, PROMPT, 1), "a prompt");
  expect(!mlx_h2o_cache_is_fused(&fused, cache) && !fused, "a prompt is no fused step");
  fails_with(
      mlx_h2o_cache_resize(cache, other, HEADS, NULL, 1, s), MLX_H2O_ERROR_ARGUMENT, "no stages");
  fails_with(
      mlx_h2o_cache_resize(cache, other, HEADS, back, 2, s), MLX_H2O_ERROR_SETTINGS,
      "stages that do not ascend");
  expect(!mlx_h2o_cache_budgets(slots, &heads, cache) && slots[0] == 16, "what refusals leave");
  expect(!mlx_h2o_cache_resize(cache, other, HEADS, stages, 1, s), "slots that follow");
  expect(!mlx_h2o_cache_get_options(&got, cache) && got.n_stages == 1, "a stage to come");
  for (int i = 0; i < 3; ++i) {
    expect(!mlx_h2o_cache_budgets(slots, &heads, cache) && slots[1] == 14, "slots until then");
    expect(!attend(cache, 1, 10 + i), "a step");
  }
  expect(!mlx_h2o_cache_budgets(slots, &heads, cache) && slots[1] == 18, "slots from then on");
  expect(!mlx_h2o_cache_get_options(&got, cache) && !got.n_stages, "no more stages");
  mlx_h2o_cache_free(cache);
}

static void keep(const char* message, void* kept) {
  snprintf(kept, PROMPT, "%s", message);
}

// Messages name the limit that was passed.
static void limits(mlx_h2o_policy policy) {
  const int budgets[] = {12, 16}, beyond[] = {0, INT_MAX};
  const char* mode = NULL;
  mlx_array mask = mlx_array_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, NULL), "a cache");
#define SAYS(call, words) \
  expect((call) && strstr(mlx_h2o_last_error(), words), #call " must say: " words);
  SAYS(mlx_h2o_cache_make_mask(&mode, &mask, cache, INT_MAX, true, s), "to 1073741824")
  SAYS(mlx_h2o_cache_pin(NULL, cache, beyond, 1, s), "at most 1073741824")
  SAYS(mlx_h2o_cache_pin(NULL, cache, NULL, 1, s), "null")
  SAYS(mlx_h2o_cache_pin(NULL, cache, beyond, 0, s), "The number of spans")
  SAYS(mlx_h2o_cache_resize(cache, NULL, HEADS, NULL, 0, s), "null")
  SAYS(mlx_h2o_cache_make(&cache, policy, NULL, HEADS, NULL), "null")
  SAYS(mlx_h2o_cache_make(&cache, policy, budgets, 0, NULL), "The number of KV heads")
#undef SAYS
  mlx_h2o_cache_free(cache);
}

static void reports(void) {
  static char kept[PROMPT];
  mlx_set_error_handler(keep, kept, NULL);
  fails_with(mlx_h2o_report_error(NULL), MLX_H2O_ERROR_ARGUMENT, "no message");
  expect(!*kept, "nothing is reported");
  expect(!mlx_h2o_report_error("100 % of it"), "an error of the caller's own");
  expect(!strncmp(kept, "100 % of it", 11), "MLX's handler has it");
  mlx_set_error_handler(NULL, NULL, NULL);
}

int main(int argc, char** argv) {
  (void)argv;
  s = mlx_default_cpu_stream_new();
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_NONE, "no error yet");
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  expect(!mlx_h2o_policy_named(&policy, "salient"), "a policy");
  expect(!mlx_h2o_policy_set(policy, "sink", "2"), "sinks");
  // With an argument: only what tests/host_gpu is to see.
  if (argc == 1) {
    reports();
    policies();
    sizes(policy);
    caches(policy);
    slots_that_follow(policy);
    limits(policy);
  }
  kernels_of_one(policy);
  mlx_h2o_policy_free(policy);
  mlx_stream_free(s);
  return failures != 0;
}
