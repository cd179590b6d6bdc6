// What a program asks and tells without arrays (tests/conformance/test_c_api.py): kinds of errors,
// settings as numbers, options of several sizes, and all that a cache was made with. Ends with 0,
// or with 1 and what was otherwise.
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
      mlx_h2o_cache_update_and_attend(&out, cache, x, x, x, 0.2f, kNone, s) || mlx_array_eval(out);
  mlx_array_free(x), mlx_array_free(out);
  return status;
}

// The setting of a name; of no name: a setting that is none.
static mlx_h2o_setting setting(mlx_h2o_policy policy, const char* name) {
  mlx_h2o_setting found = {0};
  size_t count = 0;
  expect(!mlx_h2o_policy_setting_count(&count, policy) && count >= 9, "a count of settings");
  for (size_t i = 0; i < count; ++i) {
    expect(!mlx_h2o_policy_setting(&found, policy, i), "a setting");
    if (!strcmp(found.name, name)) return found;
  }
  expect(false, name);
  return found;
}

static void policies(void) {
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  const char* name = NULL;
  size_t count = 0;
  mlx_h2o_setting one;
  fails_with(mlx_h2o_policy_named(&policy, "unheard-of"), MLX_H2O_ERROR_SETTINGS, "a name");
  fails_with(mlx_h2o_policy_named(&policy, NULL), MLX_H2O_ERROR_ARGUMENT, "no name");
  expect(!mlx_h2o_policy_named(&policy, "paper"), "a preset");
  expect(!mlx_h2o_policy_name(&name, policy) && !strcmp(name, "ema-logits"), "the name");
  one = setting(policy, "recent");
  expect(one.kind == MLX_H2O_INT && one.as_int == 128, "a count");
  one = setting(policy, "unit");
  expect(one.kind == MLX_H2O_TEXT && !strcmp(one.as_text, "layer"), "a word");
  one = setting(policy, "decay");
  expect(one.kind == MLX_H2O_DOUBLE && one.as_double == 0.95, "a number");
  one = setting(policy, "age_normalised");
  expect(one.kind == MLX_H2O_BOOL && !one.as_bool, "a truth value");
  expect(!mlx_h2o_policy_set_double(policy, "recent", 0.25), "a share");
  one = setting(policy, "recent");
  expect(one.kind == MLX_H2O_DOUBLE && one.as_double == 0.25, "the share");
  expect(!mlx_h2o_policy_set_int(policy, "recent", 7), "a count");
  expect(setting(policy, "recent").as_int == 7, "the count");
  expect(!mlx_h2o_policy_set_int(policy, "decay", 0), "a whole number for a number");
  expect(setting(policy, "decay").as_double == 0, "the number");
  expect(!mlx_h2o_policy_set_bool(policy, "age_normalised", true), "true");
  expect(setting(policy, "age_normalised").as_bool, "it is true");
  fails_with(mlx_h2o_policy_set_int(policy, "sink", -1), MLX_H2O_ERROR_SETTINGS, "below 0");
  fails_with(mlx_h2o_policy_set_double(policy, "sink", 1), MLX_H2O_ERROR_SETTINGS, "a fraction");
  fails_with(mlx_h2o_policy_set_double(policy, "recent", 1), MLX_H2O_ERROR_SETTINGS, "all");
  fails_with(mlx_h2o_policy_set_bool(policy, "pool", true), MLX_H2O_ERROR_SETTINGS, "a switch");
  fails_with(mlx_h2o_policy_set_int(policy, "unit", 1), MLX_H2O_ERROR_SETTINGS, "not a word");
  fails_with(mlx_h2o_policy_set_double(policy, "mass_weight", 1), MLX_H2O_ERROR_SETTINGS, "none");
  fails_with(mlx_h2o_policy_set_int(policy, NULL, 1), MLX_H2O_ERROR_ARGUMENT, "no setting");
  expect(!mlx_h2o_policy_setting_count(&count, policy), "the count");
  fails_with(mlx_h2o_policy_setting(&one, policy, count), MLX_H2O_ERROR_ARGUMENT, "one too many");
  fails_with(mlx_h2o_policy_setting(NULL, policy, 0), MLX_H2O_ERROR_ARGUMENT, "no place");
  fails_with(mlx_h2o_policy_name(NULL, policy), MLX_H2O_ERROR_ARGUMENT, "no place");
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
  const mlx_h2o_rope given = {8, 500, 0.5f, true};
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
  mlx_h2o_policy of_cache = mlx_h2o_policy_new();
  expect(!mlx_h2o_cache_policy(&of_cache, cache), "its policy");
  expect(setting(of_cache, "sink").as_int == 2, "its settings");
  mlx_h2o_policy_free(of_cache);
  size_t count = 0;
  int slots[HEADS] = {0}, spans[4] = {0};
  mlx_h2o_row_types types;
  expect(!mlx_h2o_cache_n_kv_heads(&count, cache) && count == HEADS, "its heads");
  expect(!mlx_h2o_cache_budgets(slots, HEADS, cache) && slots[1] == 16, "its slots");
  fails_with(mlx_h2o_cache_budgets(slots, 3, cache), MLX_H2O_ERROR_ARGUMENT, "other heads");
  fails_with(mlx_h2o_cache_row_types(&types, cache), MLX_H2O_ERROR_STATE, "no rows yet");
  expect(!attend(cache, PROMPT, 1), "a prompt");
  expect(
      !mlx_h2o_cache_row_types(&types, cache) && types.batch == 1 && types.n_kv_heads == HEADS &&
          types.key_width == WIDTH && types.value_width == WIDTH &&
          types.key_dtype == MLX_FLOAT32 && types.value_dtype == MLX_FLOAT32,
      "its rows");
  expect(!mlx_h2o_cache_get_options(&got, cache) && got.n_stages == 1, "the stages to come");
  expect(!mlx_h2o_cache_budgets(slots, HEADS, cache) && slots[1] == 14, "slots as they are now");
  expect(!mlx_h2o_cache_pin_count(&count, cache) && !count, "no pins");
  expect(!mlx_h2o_cache_pin(NULL, cache, span, 2, s), "pins");
  expect(!mlx_h2o_cache_pin_count(&count, cache) && count <= 2, "how many");
  expect(!mlx_h2o_cache_pins(spans, count, cache), "which");
  expect(!count || spans[2 * count - 2] == 17 || spans[0] == 3, "these");
  fails_with(mlx_h2o_cache_pins(spans, count + 1, cache), MLX_H2O_ERROR_ARGUMENT, "more");
  const int all[] = {0, 24}, few[] = {2, 2};
  fails_with(mlx_h2o_cache_pin(NULL, cache, all, 1, s), MLX_H2O_ERROR_SETTINGS, "too many pins");
  fails_with(mlx_h2o_cache_resize(cache, few, HEADS, s), MLX_H2O_ERROR_SETTINGS, "too few slots");
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
  bool fused = true;
  expect(!mlx_h2o_cache_make(&cache, policy, budgets, HEADS, NULL), "a cache");
  expect(!mlx_h2o_cache_is_fused(&fused, cache) && !fused, "no step yet");
  fails_with(mlx_h2o_cache_is_fused(NULL, cache), MLX_H2O_ERROR_ARGUMENT, "no place");
  expect(!attend(cache, PROMPT, 1), "a prompt");
  expect(!mlx_h2o_cache_is_fused(&fused, cache) && !fused, "a prompt is no fused step");
  fails_with(
      mlx_h2o_cache_resize_filling(cache, other, HEADS, NULL, 1, s), MLX_H2O_ERROR_ARGUMENT,
      "no stages");
  fails_with(
      mlx_h2o_cache_resize_filling(cache, other, HEADS, back, 2, s), MLX_H2O_ERROR_SETTINGS,
      "stages that do not ascend");
  expect(!mlx_h2o_cache_budgets(slots, HEADS, cache) && slots[0] == 16, "what refusals leave");
  expect(!mlx_h2o_cache_resize_filling(cache, other, HEADS, stages, 1, s), "slots that follow");
  expect(!mlx_h2o_cache_get_options(&got, cache) && got.n_stages == 1, "a stage to come");
  for (int i = 0; i < 3; ++i) {
    expect(!mlx_h2o_cache_budgets(slots, HEADS, cache) && slots[1] == 14, "slots until then");
    expect(!attend(cache, 1, 10 + i), "a step");
  }
  expect(!mlx_h2o_cache_budgets(slots, HEADS, cache) && slots[1] == 18, "slots from then on");
  expect(!mlx_h2o_cache_get_options(&got, cache) && !got.n_stages, "no more stages");
  mlx_h2o_cache_free(cache);
}

static void keep(const char* message, void* kept) {
  snprintf(kept, PROMPT, "%s", message);
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
  expect(!mlx_h2o_policy_set_int(policy, "sink", 2), "sinks");
  // With an argument: only what tests/host_gpu is to see.
  if (argc == 1) {
    reports();
    policies();
    sizes(policy);
    caches(policy);
    slots_that_follow(policy);
  }
  kernels_of_one(policy);
  mlx_h2o_policy_free(policy);
  mlx_stream_free(s);
  return failures != 0;
}
