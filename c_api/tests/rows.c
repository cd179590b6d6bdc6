// Files of rows (tests/conformance/test_c_api.py):
//
//   rows save FOLDER TOKENS OUT    decodes, takes tokens back, decodes, and saves the rows of each
//                                  layer and head
//   rows check FOLDER              tokens taken back, copies, failures, what is left of files
//
// Ends with 0, or with 1 and what went wrong.
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mlx_h2o_golden.h"
#include "numbers.h"
#define PROGRAM "rows"
#include "expect.h"

enum { LAYERS = 2, Hq = 4, Hk = 2, D = 32, MOST = 512 };

static const mlx_array kNone = {NULL};
static mlx_stream s;

static mlx_array numbers(int heads, int tokens, int seed) {
  const int shape[] = {1, heads, tokens, D};
  float all[Hq * MOST * D];
  fill_numbers(all, (size_t)heads * tokens * D, (uint64_t)seed, 0);
  return mlx_array_new_data(all, shape, 4, MLX_FLOAT32);
}

static mlx_h2o_cache made(int bits, int recent_bits, int undo) {
  const int budgets[Hk] = {24, 32};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.k_bits = options.v_bits = bits, options.group_size = 32, options.undo = undo;
  options.recent_bits = recent_bits;
  expect(
      !mlx_h2o_policy_named(&policy, "salient") &&
          !mlx_h2o_cache_make(&cache, policy, budgets, Hk, &options),
      "a cache");
  mlx_h2o_policy_free(policy);
  return cache;
}

static mlx_h2o_returns often(void) {
  mlx_h2o_returns returns = mlx_h2o_returns_default();
  returns.every = 8, returns.window = 4, returns.pages = 1, returns.rows = 6, returns.ahead = 3;
  return returns;
}

// A conversation of so many layers with a file.
typedef struct Conversation_ {
  mlx_h2o_cache caches[LAYERS];
  mlx_h2o_spill spill;
} Conversation;

// Rows come back to heads of the caches, or to none.
static Conversation begun_with(
    const char* folder, int bits, int recent_bits, int undo, bool returning) {
  Conversation c = {.spill = mlx_h2o_spill_new()};
  const mlx_h2o_returns returns = often();
  const bool heads[Hk] = {returning, returning};
  expect(!mlx_h2o_spill_make(&c.spill, folder, LAYERS, &returns), "a file's handle");
  for (size_t l = 0; l < LAYERS; ++l) {
    c.caches[l] = made(bits, recent_bits, undo);
    expect(!mlx_h2o_cache_spill_to(c.caches[l], c.spill, l, heads, Hk), "a layer's file");
  }
  return c;
}

static Conversation begun(const char* folder, int bits, int recent_bits, int undo) {
  return begun_with(folder, bits, recent_bits, undo, true);
}

static Conversation begun_silent(const char* folder, int bits, int recent_bits) {
  return begun_with(folder, bits, recent_bits, 0, false);
}

static void ended(Conversation c) {
  for (int l = 0; l < LAYERS; ++l) mlx_h2o_cache_free(c.caches[l]);
  mlx_h2o_spill_free(c.spill);
}

// Tokens from a position on: the same ones wherever it is called. The sum tells outputs apart.
static double taken(mlx_h2o_cache cache, int layer, int first, int tokens) {
  double sum = 0;
  const int seed = 1000 * first + 10 * layer;
  mlx_array q = numbers(Hq, tokens, seed), k = numbers(Hk, tokens, seed + 1);
  mlx_array v = numbers(Hk, tokens, seed + 2), out = mlx_array_new(), flat = mlx_array_new();
  expect(
      !mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.2f, "causal", kNone, kNone, s) &&
          !mlx_contiguous(&flat, out, false, s) && !mlx_array_eval(flat),
      "a step");
  const float* data = mlx_array_data_float32(flat);
  for (int i = 0; data && i < Hq * tokens * D; ++i) sum = sum * 1.0001 + data[i];
  mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  mlx_array_free(flat);
  return sum;
}

static double step(Conversation* c, int first, int tokens) {
  double sum = 0;
  for (int l = 0; l < LAYERS; ++l) sum += taken(c->caches[l], l, first, tokens);
  return sum;
}

static double decoded(Conversation* c, int first, int end) {
  double sum = 0;
  for (int at = first; at < end; ++at) sum = sum * 1.0001 + step(c, at, 1);
  return sum;
}

static const char* failure_of(const Conversation* c) {
  const char* why = "?";
  expect(!mlx_h2o_spill_failure(&why, c->spill), "a failure's text");
  return why;
}

static int64_t returned(const Conversation* c) {
  int64_t all = 0, one = 0;
  for (int l = 0; l < LAYERS; ++l)
    if (!mlx_h2o_cache_returned(&one, c->caches[l])) all += one;
  return all;
}

// How many files there are.
static int files_in(const char* folder) {
  int count = 0;
  DIR* all = opendir(folder);
  for (struct dirent* one; all && (one = readdir(all));)
    count += strcmp(one->d_name, ".") && strcmp(one->d_name, "..");
  if (all) closedir(all);
  return count;
}

// Rows 0 to `end` - 1 of one head, once they are in the file.
static mlx_map_string_to_array rows_of(const Conversation* c, int layer, int head, int end) {
  mlx_array positions = mlx_array_new();
  mlx_map_string_to_array rows = mlx_map_string_to_array_new();
  mlx_arange(&positions, 0, end, 1, MLX_INT32, s);
  expect(!mlx_h2o_spill_rows(&rows, c->spill, (size_t)layer, head, positions, s), failure_of(c));
  mlx_array_free(positions);
  return rows;
}

// -- rows for Python ------------------------------------------------------------------------------

static int saves(const char* folder, int tokens, const char* out) {
  Conversation c = begun_silent(folder, 4, 8);
  // Back into a block that is in the file, which is read to be gone on with.
  step(&c, 0, 5), decoded(&c, 7000, 7015);
  mlx_map_string_to_array_free(rows_of(&c, 0, 0, 16));
  for (int l = 0; l < LAYERS; ++l)
    expect(!mlx_h2o_cache_trim(c.caches[l], 15, s), "tokens are taken back");
  decoded(&c, 5, tokens);
  mlx_map_string_to_string notes = mlx_map_string_to_string_new();
  for (int l = 0; l < LAYERS; ++l)
    for (int head = 0; head < Hk; ++head) {
      char path[4096];
      snprintf(path, sizeof path, "%s/%d.%d.safetensors", out, l, head);
      mlx_map_string_to_array rows = rows_of(&c, l, head, tokens / 8 * 8);
      expect(!mlx_save_safetensors(path, rows, notes), "rows are saved");
      mlx_map_string_to_array_free(rows);
    }
  mlx_map_string_to_string_free(notes);
  ended(c);
  expect(!files_in(folder), "no file is left");
  return failures;
}

// -- conversations --------------------------------------------------------------------------------

static bool same_rows(const Conversation* one, const Conversation* other, int end) {
  bool same = true;
  for (int layer = 0; layer < LAYERS; ++layer)
    for (int head = 0; head < Hk; ++head) {
      mlx_array a = mlx_array_new(), b = mlx_array_new(), equal = mlx_array_new();
      mlx_map_string_to_array rows = rows_of(one, layer, head, end);
      mlx_map_string_to_array twin = rows_of(other, layer, head, end);
      bool alike = false;
      same = same && !mlx_map_string_to_array_get(&a, rows, "keys") &&
          !mlx_map_string_to_array_get(&b, twin, "keys") &&
          !mlx_array_equal(&equal, a, b, false, s) && !mlx_array_item_bool(&alike, equal) && alike;
      mlx_array_free(a), mlx_array_free(b), mlx_array_free(equal);
      mlx_map_string_to_array_free(rows), mlx_map_string_to_array_free(twin);
    }
  return same;
}

// Drafts that are taken back leave outputs, rows that come back, and the file as they were without.
// (Right after some no rows come back, so they are made where none would.)
static void takes_back(const char* folder, int bits, int recent_bits) {
  Conversation plain = begun(folder, bits, recent_bits, 4);
  Conversation drafting = begun(folder, bits, recent_bits, 4);
  double sum = step(&plain, 0, 40), same = step(&drafting, 0, 40);
  for (int at = 40; at < 130; ++at) {
    sum = sum * 1.0001 + step(&plain, at, 1), same = same * 1.0001 + step(&drafting, at, 1);
    if (at % 8 != 1) continue;
    step(&drafting, 5000 + at, 4);
    for (int l = 0; l < LAYERS; ++l)
      expect(!mlx_h2o_cache_trim(drafting.caches[l], 4, s), "tokens are taken back");
  }
  expect(returned(&plain) > 0 && returned(&plain) == returned(&drafting), "rows come back");
  expect(sum == same, "drafts change nothing");
  expect(same_rows(&plain, &drafting, 128), "the files have the same rows");
  ended(plain), ended(drafting);
}

// A conversation that is taken back to a place within a block has the file of one that never went
// beyond it.
static void has_the_same_file(const char* folder, int back_to, int undo) {
  Conversation went = begun(folder, 4, 0, undo), never = begun(folder, 4, 0, undo);
  // Nothing is evicted before the budget is full: all can be taken back.
  step(&never, 0, back_to);
  step(&went, 0, back_to), decoded(&went, 7000, 7000 + 20 - back_to);
  for (int l = 0; l < LAYERS; ++l)
    expect(!mlx_h2o_cache_trim(went.caches[l], 20 - back_to, s), "tokens are taken back");
  decoded(&went, back_to, 70), decoded(&never, back_to, 70);
  expect(same_rows(&went, &never, 64), "the files have the same rows");
  ended(went), ended(never);
}

// After no chunk, the first among them, do more rows wait for the file than are documented.
static void few_rows_wait(const char* folder, int chunk, int bits, int recent_bits) {
  // As they came and as they are stored, which takes no more (docs/how-it-works/index.md).
  const size_t most = (size_t)Hk * (7 + 16) * 2 * D * sizeof(float);
  Conversation c = begun_silent(folder, bits, recent_bits);
  mlx_h2o_cache bare[LAYERS];
  for (int l = 0; l < LAYERS; ++l) bare[l] = made(bits, recent_bits, 0);
  for (int at = 0; at < 80 || at < 3 * chunk; at += chunk) {
    step(&c, at, chunk);
    for (int l = 0; l < LAYERS; ++l) {
      size_t with = 0, without = 0;
      taken(bare[l], l, at, chunk);
      expect(
          !mlx_h2o_cache_nbytes(&with, c.caches[l]) && !mlx_h2o_cache_nbytes(&without, bare[l]),
          "bytes");
      expect(with >= without && with - without <= most, "few rows wait");
    }
    expect(!*failure_of(&c), failure_of(&c));
  }
  for (int l = 0; l < LAYERS; ++l) mlx_h2o_cache_free(bare[l]);
  ended(c);
}

// Without rows that come back a file changes nothing; a copy goes on without it.
static void changes_nothing(const char* folder) {
  Conversation with = begun(folder, 0, 0, 0), silent = begun_silent(folder, 0, 0);
  mlx_h2o_cache bare[LAYERS], twin = mlx_h2o_cache_new();
  for (int l = 0; l < LAYERS; ++l) bare[l] = made(0, 0, 0);
  double sum = 0, same = 0, other = 0;
  for (int at = 0; at < 100; at = at ? at + 1 : 40) {
    const int tokens = at ? 1 : 40;
    double plain = 0;
    for (int l = 0; l < LAYERS; ++l) plain += taken(bare[l], l, at, tokens);
    sum = sum * 1.0001 + plain, same = same * 1.0001 + step(&silent, at, tokens);
    other = other * 1.0001 + step(&with, at, tokens);
  }
  expect(sum == same && !returned(&silent), "a file from which nothing comes changes nothing");
  expect(sum != other && returned(&with) > 0, "rows that come back change outputs");
  expect(!mlx_h2o_cache_copy(&twin, with.caches[0], s), "a copy");
  const int64_t before = returned(&with);
  taken(twin, 0, 100, 20);
  int64_t of_twin = -1;
  expect(!mlx_h2o_cache_returned(&of_twin, twin) && !of_twin, "nothing comes back to a copy");
  expect(returned(&with) == before && !*failure_of(&with), "and the original goes on");
  mlx_h2o_cache_free(twin);
  for (int l = 0; l < LAYERS; ++l) mlx_h2o_cache_free(bare[l]);
  ended(with), ended(silent);
}

static void goes_on_without(const char* folder) {
  char missing[4096];
  snprintf(missing, sizeof missing, "%s/file/below", folder);
  char file[4096];
  snprintf(file, sizeof file, "%s/file", folder);
  FILE* made = fopen(file, "w");
  if (made) fclose(made);
  Conversation c = begun(missing, 0, 0, 0);
  step(&c, 0, 40), decoded(&c, 40, 80);
  expect(strstr(failure_of(&c), "no file can be made") != NULL, "a folder that cannot be made");
  expect(!returned(&c), "nothing came back");
  ended(c);
  unlink(file);

  // Freed before its caches, which go on.
  c = begun(folder, 0, 0, 0);
  step(&c, 0, 40), decoded(&c, 40, 60);
  mlx_h2o_spill_free(c.spill);
  expect(!files_in(folder), "the file went with its handle");
  c.spill = mlx_h2o_spill_new();
  decoded(&c, 60, 80);
  ended(c);

  // Files that lost their rows.
  c = begun(folder, 0, 0, 0);
  step(&c, 0, 40), decoded(&c, 40, 72);
  mlx_map_string_to_array_free(rows_of(&c, 0, 0, 72));
  struct stat about;
  for (int file = 3; file < 256; ++file)
    if (!fstat(file, &about) && S_ISREG(about.st_mode) && !about.st_nlink)
      expect(!ftruncate(file, 0), "a file without a name");
  decoded(&c, 72, 130);
  expect(strstr(failure_of(&c), "cannot be read") != NULL, "lost rows are told");
  ended(c);
}

static void refuses_what_does_not_fit(const char* folder) {
  Conversation c = begun(folder, 0, 0, 0);
  mlx_h2o_cache other = made(0, 0, 0);
  const bool heads[3] = {true, true, true};
  expect(mlx_h2o_cache_spill_to(other, c.spill, 0, NULL, 0), "a layer that has a cache");
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_STATE, "is a wrong state");
  expect(mlx_h2o_cache_spill_to(other, c.spill, LAYERS, NULL, 0), "a layer that there is not");
  expect(mlx_h2o_cache_spill_to(other, c.spill, 1, heads, 3), "heads that there are not");
  expect(mlx_h2o_cache_spill_to(other, mlx_h2o_spill_new(), 0, NULL, 0), "no file");
  expect(mlx_h2o_cache_spill_to(c.caches[0], c.spill, 0, NULL, 0), "a cache that has a file");
  taken(other, 0, 0, 8);
  mlx_h2o_spill late = mlx_h2o_spill_new();
  expect(!mlx_h2o_spill_make(&late, folder, 1, NULL), "another file, by the defaults");
  expect(mlx_h2o_cache_spill_to(other, late, 0, NULL, 0), "a cache that has seen tokens");
  mlx_h2o_returns wrong = mlx_h2o_returns_default();
  expect(wrong.every == 32 && wrong.rows == 64 && wrong.room == 0.5, "the defaults");
  wrong.room = 0;
  expect(mlx_h2o_spill_make(&late, folder, 1, &wrong), "no room");
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_SETTINGS, "is a wrong setting");
  wrong = mlx_h2o_returns_default(), wrong.every = 0;
  expect(mlx_h2o_spill_make(&late, folder, 1, &wrong), "every 0 tokens");
  wrong = mlx_h2o_returns_default(), wrong.rows = 0;
  expect(mlx_h2o_spill_make(&late, folder, 1, &wrong), "no rows");
  wrong = mlx_h2o_returns_default(), wrong.size = 8;
  expect(mlx_h2o_spill_make(&late, folder, 1, &wrong), "a struct of another size");
  expect(mlx_h2o_spill_make(&late, NULL, 1, NULL), "no folder");
  expect(mlx_h2o_spill_make(&late, "", 1, NULL), "a folder without a name");
  expect(mlx_h2o_spill_make(&late, folder, 0, NULL), "no layers");
  mlx_h2o_spill_free(late), mlx_h2o_cache_free(other);
  ended(c);
}

static int checks(const char* folder) {
  refuses_what_does_not_fit(folder);
  changes_nothing(folder);
  takes_back(folder, 0, 0), takes_back(folder, 4, 8);
  for (const int* chunk = (const int[]){1, 7, 64, 512, 0}; *chunk; ++chunk)
    few_rows_wait(folder, *chunk, 0, 0), few_rows_wait(folder, *chunk, 4, 8);
  has_the_same_file(folder, 5, 0), has_the_same_file(folder, 16, 0),
      has_the_same_file(folder, 19, 3);
  goes_on_without(folder);
  expect(!files_in(folder), "no file is left");
  return failures;
}

int main(int argc, char** argv) {
  s = mlx_default_cpu_stream_new();
  int status = 2;
  if (argc == 5 && !strcmp(argv[1], "save")) status = saves(argv[2], atoi(argv[3]), argv[4]);
  if (argc == 3 && !strcmp(argv[1], "check")) status = checks(argv[2]);
  mlx_stream_free(s);
  if (status == 2) fprintf(stderr, "rows save|check ...\n");
  return status > 0 ? 1 : 0;
}
