// Files of rows (tests/conformance/test_c_api.py):
//
//   rows write FOLDER TOKENS OUT    decodes, takes tokens back, decodes, leaves the file of rows
//   where it is as OUT, and prints
//                                   how many positions it has
//   rows read FILE LAYER HEAD FIRST END OUT    rows FIRST to END - 1 of a file, as safetensors
//   rows refuse FILE                must be refused; prints why
//   rows leave FOLDER TOKENS        decodes, records the state, and prints the path of the file
//   rows resume FILE TOKENS OUT     goes on from it up to so many tokens, records the state again,
//   and
//                                   saves the outputs of each layer and the tokens that it began
//                                   with
//   rows refuse-to-resume FILE      must be refused; prints why
//   rows resume-and-leave FILE      resumes and ends before any token comes; prints how many were
//                                   seen
//   rows check FOLDER               tokens taken back, copies, failures, what is left of files
//
// With CIPHER="TO FROM" in the environment files are sealed by the process at the other end of two
// pipes.
//
// Ends with 0, or with 1 and what went wrong.
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ciphers.h"
#include "mlx_h2o_golden.h"
#include "numbers.h"
#define PROGRAM "rows"
#include "expect.h"

enum { LAYERS = 2, Hq = 4, Hk = 2, D = 32, MOST = 512 };

static const mlx_array kNone = {NULL};
static mlx_stream s;
// The cipher of conversations that begin or go on now; of none if its key is 0 and nothing is
// piped.
static CipherUse use;
static int toy_key, to_cipher = -1, from_cipher = -1;

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

static bool seals(void) {
  return toy_key || to_cipher >= 0;
}

static mlx_h2o_seal cipher(void) {
  return toy_key ? toy_cipher(&use, toy_key) : piped_cipher(to_cipher, from_cipher);
}

// A conversation of so many layers with a file.
typedef struct Conversation_ {
  mlx_h2o_cache caches[LAYERS];
  mlx_h2o_spill spill;
} Conversation;

static Conversation begun(const char* folder, int bits, int recent_bits, int undo) {
  Conversation c = {.spill = mlx_h2o_spill_new()};
  const mlx_h2o_returns returns = often();
  expect(!mlx_h2o_spill_make(&c.spill, folder, LAYERS, &returns), "a file's handle");
  if (seals()) {
    const mlx_h2o_seal seal = cipher();
    expect(!mlx_h2o_spill_seal(c.spill, &seal), "a sealed file");
  }
  for (size_t l = 0; l < LAYERS; ++l) {
    c.caches[l] = made(bits, recent_bits, undo);
    expect(!mlx_h2o_cache_spill_to(c.caches[l], c.spill, l, NULL, 0), "a layer's file");
  }
  return c;
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
      !mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.2f, kNone, s) &&
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

// How many files there are, but for those that begin with a dot.
static int files_in(const char* folder) {
  int count = 0;
  DIR* all = opendir(folder);
  for (struct dirent* one; all && (one = readdir(all));) count += one->d_name[0] != '.';
  if (all) closedir(all);
  return count;
}

// -- files for Python, and of it ------------------------------------------------------------------

static int writes(const char* folder, int tokens, const char* out) {
  Conversation c = begun(folder, 4, 8, 0);
  // Back into a block that is in the file, which is read to be gone on with.
  bool whole = false;
  step(&c, 0, 5), decoded(&c, 7000, 7015);
  expect(!mlx_h2o_spill_flush(&whole, c.spill, s) && whole, "the block is on the disk");
  for (int l = 0; l < LAYERS; ++l)
    expect(!mlx_h2o_cache_trim(c.caches[l], 15, s), "tokens are taken back");
  decoded(&c, 5, tokens);
  int64_t written = 0;
  const char* path = "";
  expect(!mlx_h2o_spill_flush(&whole, c.spill, s) && whole, "all is on the disk");
  expect(!mlx_h2o_spill_written(&written, c.spill), "how much is written");
  expect(!mlx_h2o_spill_path(&path, c.spill) && *path, "where it is");
  struct stat about;
  expect(!stat(path, &about) && (about.st_mode & 0777) == 0600, "only the user may read it");
  expect(!link(path, out), "the file stays under another name");
  printf("%lld\n", (long long)written);
  ended(c);
  expect(!files_in(folder), "the file is removed");
  return failures;
}

static int reads(char** given) {
  const int layer = atoi(given[1]), head = atoi(given[2]), first = atoi(given[3]);
  const int count = atoi(given[4]) - first;
  mlx_array positions = mlx_array_new();
  mlx_arange(&positions, first, first + count, 1, MLX_INT32, s);
  mlx_map_string_to_array rows = mlx_map_string_to_array_new();
  mlx_map_string_to_string notes = mlx_map_string_to_string_new();
  int64_t delivered = 0;
  expect(
      !mlx_h2o_row_file_read(&rows, &delivered, given[0], (size_t)layer, head, positions, s),
      "rows of a file");
  if (!failures) expect(!mlx_save_safetensors(given[5], rows, notes), "rows are saved");
  printf("%lld\n", (long long)delivered);
  mlx_array_free(positions), mlx_map_string_to_array_free(rows);
  mlx_map_string_to_string_free(notes);
  return failures;
}

static int refuses(const char* path) {
  mlx_array positions = mlx_array_new();
  mlx_arange(&positions, 0, 1, 1, MLX_INT32, s);
  mlx_map_string_to_array rows = mlx_map_string_to_array_new();
  expect(mlx_h2o_row_file_read(&rows, NULL, path, 0, 0, positions, s), "a file is refused");
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_SAVED, "as one that cannot be read");
  printf("%s\n", mlx_h2o_last_error());
  mlx_array_free(positions), mlx_map_string_to_array_free(rows);
  return failures;
}

// -- conversations that go on from their files ----------------------------------------------------

static void keep_and_record(Conversation* c) {
  bool recorded = false;
  expect(!mlx_h2o_spill_record(&recorded, c->spill, c->caches, LAYERS, s), "a record");
  expect(recorded, failure_of(c));
}

static Conversation resumed(const char* path) {
  Conversation c = {.spill = mlx_h2o_spill_new()};
  for (int l = 0; l < LAYERS; ++l) c.caches[l] = mlx_h2o_cache_new();
  if (seals()) {
    const mlx_h2o_seal seal = cipher();
    expect(
        !mlx_h2o_spill_resume_sealed(&c.spill, c.caches, LAYERS, path, &seal, s),
        "a sealed file is gone on with");
  } else {
    expect(!mlx_h2o_spill_resume(&c.spill, c.caches, LAYERS, path, s), "a file is gone on with");
  }
  return c;
}

static int leaves(const char* folder, int tokens) {
  Conversation c = begun(folder, 4, 8, 0);
  const char* path = "";
  expect(!mlx_h2o_spill_keep(c.spill), "a file that stays");
  step(&c, 0, 40);
  expect(!mlx_h2o_spill_keep(c.spill), "which may be said twice");
  decoded(&c, 40, tokens);
  keep_and_record(&c);
  expect(!mlx_h2o_spill_path(&path, c.spill), "where it is");
  printf("%s\n", path);
  ended(c);
  return failures;
}

static int goes_on(const char* path, int end, const char* out) {
  Conversation c = resumed(path);
  mlx_map_string_to_array outs = mlx_map_string_to_array_new();
  mlx_map_string_to_string notes = mlx_map_string_to_string_new();
  int first = 0;
  if (!failures) expect(!mlx_h2o_cache_offset(&first, c.caches[0]), "how much was seen");
  for (int at = first; !failures && at < end; ++at)
    for (int l = 0; l < LAYERS; ++l) {
      const int seed = 1000 * at + 10 * l;
      char name[32];
      snprintf(name, sizeof name, "%d.%d", at, l);
      mlx_array q = numbers(Hq, 1, seed), k = numbers(Hk, 1, seed + 1);
      mlx_array v = numbers(Hk, 1, seed + 2), o = mlx_array_new();
      expect(
          !mlx_h2o_cache_update_and_attend(&o, c.caches[l], q, k, v, 0.2f, kNone, s) &&
              !mlx_map_string_to_array_insert(outs, name, o),
          "a step");
      mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(o);
    }
  if (!failures) expect(!mlx_save_safetensors(out, outs, notes), "outputs are saved");
  if (!failures) keep_and_record(&c);
  printf("%d\n", first);
  mlx_map_string_to_array_free(outs), mlx_map_string_to_string_free(notes);
  ended(c);
  return failures;
}

static int refuses_to_resume(const char* path) {
  mlx_h2o_spill spill = mlx_h2o_spill_new();
  mlx_h2o_cache caches[LAYERS];
  for (int l = 0; l < LAYERS; ++l) caches[l] = mlx_h2o_cache_new();
  if (seals()) {
    const mlx_h2o_seal seal = cipher();
    expect(
        mlx_h2o_spill_resume_sealed(&spill, caches, LAYERS, path, &seal, s),
        "a sealed file is refused");
  } else {
    expect(mlx_h2o_spill_resume(&spill, caches, LAYERS, path, s), "a file is refused");
  }
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_SAVED, "as one that cannot be read");
  expect(!spill.ctx && !caches[0].ctx, "nothing is changed");
  printf("%s\n", mlx_h2o_last_error());
  return failures;
}

// As who finds that the caches are another model's.
static int goes_on_with_nothing(const char* path) {
  Conversation c = resumed(path);
  int seen = 0;
  if (!failures) expect(!mlx_h2o_cache_offset(&seen, c.caches[0]), "how much was seen");
  printf("%d\n", seen);
  ended(c);
  return failures;
}

// One that ends within a block and goes on is as one that never ended.
static void is_as_if_it_never_ended(const char* folder, int bits, int recent_bits) {
  Conversation never = begun(folder, bits, recent_bits, 0);
  Conversation c = begun(folder, bits, recent_bits, 0);
  expect(!mlx_h2o_spill_keep(c.spill), "a file that stays");
  double sum = step(&never, 0, 40), same = step(&c, 0, 40);
  expect(mlx_h2o_spill_keep(never.spill), "once rows have come it is too late");
  int at = 40;
  // Within the first block after a chunk, at its end, and within a later one.
  for (const int* end = (const int[]){45, 64, 91, 130, 0}; *end; ++end) {
    for (; at < *end; ++at)
      sum = sum * 1.0001 + step(&never, at, 1), same = same * 1.0001 + step(&c, at, 1);
    keep_and_record(&c);
    char path[4096];
    const char* where = "";
    expect(!mlx_h2o_spill_path(&where, c.spill), "where it is");
    snprintf(path, sizeof path, "%s", where);
    ended(c);
    c = resumed(path);
    if (failures) return;
    int seen = 0;
    expect(!mlx_h2o_cache_offset(&seen, c.caches[1]) && seen == at, "all tokens are known");
  }
  expect(sum == same, "the outputs are the same");
  bool recorded = true;
  expect(!mlx_h2o_spill_record(&recorded, never.spill, never.caches, LAYERS, s), "no error");
  expect(!recorded, "a file that does not stay has no record");
  mlx_h2o_cache swapped[LAYERS] = {c.caches[1], c.caches[0]};
  expect(mlx_h2o_spill_record(&recorded, c.spill, swapped, LAYERS, s), "caches of other layers");
  expect(mlx_h2o_spill_record(&recorded, c.spill, c.caches, 1, s), "too few caches");
  char path[4096], records[2][4200];
  const char* where = "";
  expect(!mlx_h2o_spill_path(&where, c.spill), "where it is");
  snprintf(path, sizeof path, "%s", where);
  ended(c), ended(never);
  for (int i = 0; i < 2; ++i) {
    snprintf(records[i], sizeof records[i], "%s.state-%c", path, "ab"[i]);
    expect(!unlink(records[i]), "its records are beside it");
  }
  expect(!unlink(path), "the file stayed");
}

// -- conversations --------------------------------------------------------------------------------

static bool same_rows(const char* one, const char* other, int end) {
  bool same = true;
  for (int layer = 0; layer < LAYERS; ++layer)
    for (int head = 0; head < Hk; ++head) {
      mlx_array positions = mlx_array_new(), a = mlx_array_new(), b = mlx_array_new();
      mlx_array equal = mlx_array_new();
      mlx_arange(&positions, 0, end, 1, MLX_INT32, s);
      mlx_map_string_to_array rows = mlx_map_string_to_array_new(), twin = rows;
      twin = mlx_map_string_to_array_new();
      bool alike = false;
      same = same && !mlx_h2o_row_file_read(&rows, NULL, one, (size_t)layer, head, positions, s) &&
          !mlx_h2o_row_file_read(&twin, NULL, other, (size_t)layer, head, positions, s) &&
          !mlx_map_string_to_array_get(&a, rows, "keys") &&
          !mlx_map_string_to_array_get(&b, twin, "keys") &&
          !mlx_array_equal(&equal, a, b, false, s) && !mlx_array_item_bool(&alike, equal) && alike;
      mlx_array_free(positions), mlx_array_free(a), mlx_array_free(b), mlx_array_free(equal);
      mlx_map_string_to_array_free(rows), mlx_map_string_to_array_free(twin);
    }
  return same;
}

// All that waits for the disk is there, and the file stays under another name.
static void linked(const Conversation* c, const char* name) {
  bool whole = false;
  const char *path = "", *failed = failure_of(c);
  expect(!*failed, failed);
  expect(!mlx_h2o_spill_flush(&whole, c->spill, s) && whole, "it is on the disk");
  expect(!mlx_h2o_spill_path(&path, c->spill) && !link(path, name), "another name");
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
  char paths[2][4096];
  snprintf(paths[0], sizeof paths[0], "%s/plain", folder);
  snprintf(paths[1], sizeof paths[1], "%s/drafting", folder);
  linked(&plain, paths[0]), linked(&drafting, paths[1]);
  ended(plain), ended(drafting);
  expect(same_rows(paths[0], paths[1], 128), "the files have the same rows");
  unlink(paths[0]), unlink(paths[1]);
}

// A conversation that is taken back to a place within a block has the file of one that never went
// beyond it.
static void has_the_same_file(const char* folder, int back_to, int undo) {
  Conversation went = begun(folder, 4, 0, undo), never = begun(folder, 4, 0, undo);
  char paths[2][4096];
  // Nothing is evicted before the budget is full: all can be taken back.
  step(&never, 0, back_to);
  step(&went, 0, back_to), decoded(&went, 7000, 7000 + 20 - back_to);
  for (int l = 0; l < LAYERS; ++l)
    expect(!mlx_h2o_cache_trim(went.caches[l], 20 - back_to, s), "tokens are taken back");
  Conversation* both[] = {&went, &never};
  for (int i = 0; i < 2; ++i) {
    decoded(both[i], back_to, 70);
    snprintf(paths[i], sizeof paths[i], "%s/linked-%d", folder, i);
    linked(both[i], paths[i]);
    ended(*both[i]);
  }
  expect(same_rows(paths[0], paths[1], 64), "the files have the same rows");
  unlink(paths[0]), unlink(paths[1]);
}

// A conversation from whose file nothing comes back.
static Conversation begun_silent(const char* folder, int bits, int recent_bits) {
  Conversation c = {.spill = mlx_h2o_spill_new()};
  mlx_h2o_returns none = mlx_h2o_returns_default();
  none.rows = 0, none.window = 1;
  expect(!mlx_h2o_spill_make(&c.spill, folder, LAYERS, &none), "a file without returns");
  for (size_t l = 0; l < LAYERS; ++l) {
    c.caches[l] = made(bits, recent_bits, 0);
    expect(!mlx_h2o_cache_spill_to(c.caches[l], c.spill, l, NULL, 0), "a layer's file");
  }
  return c;
}

// After no chunk, the first among them, do more rows wait for the file than are documented.
static void few_rows_wait(const char* folder, int chunk, int bits, int recent_bits) {
  // As they came and as they are stored, which takes no more (docs/how-it-works/index.md); and the
  // last query, in 16 bits.
  const size_t most = (size_t)Hk * (7 + 16) * 2 * D * sizeof(float) + (size_t)Hq * D * 2;
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

  // A block that was damaged is not given out.
  c = begun(folder, 0, 0, 0);
  step(&c, 0, 40), decoded(&c, 40, 72);
  bool whole = false;
  const char* path = "";
  expect(!mlx_h2o_spill_flush(&whole, c.spill, s) && whole, "it is on the disk");
  expect(!mlx_h2o_spill_path(&path, c.spill), "where it is");
  FILE* damaged = fopen(path, "r+");
  for (long at = 16384; damaged && at < 200000; at += 512)
    fseek(damaged, at, SEEK_SET), fputc('x', damaged);
  if (damaged) fclose(damaged);
  decoded(&c, 72, 130);
  expect(strstr(failure_of(&c), "cannot be read") != NULL, "damage is told");
  ended(c);
}

// -- sealed files ---------------------------------------------------------------------------------

// Tokens that are taken back, and rows that come back, are those of a file that is not sealed.
static double with_drafts(const char* folder, int64_t* came, bool* in_the_open) {
  Conversation c = begun(folder, 0, 0, 4);
  double sum = step(&c, 0, 40);
  for (int at = 40; at < 130; ++at) {
    sum = sum * 1.0001 + step(&c, at, 1);
    if (at % 24 != 1) continue;
    step(&c, 5000 + at, 4);
    for (int l = 0; l < LAYERS; ++l)
      expect(!mlx_h2o_cache_trim(c.caches[l], 4, s), "tokens are taken back");
  }
  expect(!*failure_of(&c), failure_of(&c));
  *came = returned(&c);
  // Whether the first token's first key lies in the file as it is.
  bool whole = false;
  const char* path = "";
  expect(!mlx_h2o_spill_flush(&whole, c.spill, s) && whole, "it is on the disk");
  expect(!mlx_h2o_spill_path(&path, c.spill), "where it is");
  float key[Hk * 40 * D];
  fill_numbers(key, Hk * 40 * D, 1, 0);
  FILE* file = fopen(path, "r");
  static char bytes[1 << 20];
  const size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
  if (file) fclose(file);
  *in_the_open = false;
  for (size_t at = 0; at + sizeof(float) * D <= size; at += 4)
    *in_the_open = *in_the_open || !memcmp(bytes + at, key, sizeof(float) * D);
  expect(size > 16384, "a file with rows");
  ended(c);
  return sum;
}

static void is_sealed(const char* folder) {
  int64_t came = 0, came_sealed = 0;
  bool in_the_open = false;
  const double sum = with_drafts(folder, &came, &in_the_open);
  expect(in_the_open, "keys lie in the file");
  use = (CipherUse){0}, toy_key = 5;
  const double same = with_drafts(folder, &came_sealed, &in_the_open);
  expect(sum == same, "sealing changes no output");
  expect(came > 0 && came == came_sealed, "the same rows come back");
  expect(!in_the_open, "no key of a sealed file lies in the open");
  expect(use.encrypted > 0 && use.decrypted > 0, "the program's cipher is used");
  expect(use.opened == 1 && use.closed == 1 && use.released == 1, "and let go");
  is_as_if_it_never_ended(folder, 4, 8);
  toy_key = 0;
}

static void does_without_a_cipher_that_fails(const char* folder) {
  // Of the header, of the first block, and of a later one.
  for (const int* in = (const int[]){1, 3, 30, 0}; *in; ++in) {
    use = (CipherUse){.fails_in = *in}, toy_key = 5;
    Conversation c = begun(folder, 0, 0, 0);
    step(&c, 0, 40), decoded(&c, 40, 130);
    expect(strstr(failure_of(&c), "could not be sealed") != NULL, "the cipher's failure is told");
    ended(c);
    expect(use.released == 1 && use.opened == use.closed, "it is let go");
  }
  use = (CipherUse){0};
  Conversation c = begun(folder, 4, 8, 0);
  expect(!mlx_h2o_spill_keep(c.spill), "a file that stays");
  step(&c, 0, 40), decoded(&c, 40, 71);
  keep_and_record(&c);
  char path[4096], records[2][4200];
  const char* where = "";
  expect(!mlx_h2o_spill_path(&where, c.spill), "where it is");
  snprintf(path, sizeof path, "%s", where);
  const mlx_h2o_seal late = cipher();
  expect(mlx_h2o_spill_seal(c.spill, &late), "once rows have come it is too late");
  expect(mlx_h2o_last_error_code() == MLX_H2O_ERROR_STATE, "which is a wrong state");
  expect(use.released == 1, "and lets the second cipher go");
  ended(c);
  toy_key = 6, refuses_to_resume(path);
  toy_key = 0, refuses_to_resume(path);
  toy_key = 5;
  c = resumed(path), ended(c);
  mlx_h2o_seal half = cipher(), small = cipher();
  half.encrypt = NULL, small.size = 8;
  mlx_h2o_spill other = mlx_h2o_spill_new();
  expect(!mlx_h2o_spill_make(&other, folder, 1, NULL), "another file");
  expect(mlx_h2o_spill_seal(other, &half), "half a cipher");
  expect(mlx_h2o_spill_seal(other, &small), "a struct of another size");
  expect(mlx_h2o_spill_seal(other, NULL), "no cipher");
  const mlx_h2o_seal whole = cipher(), second = cipher();
  expect(!mlx_h2o_spill_seal(other, &whole), "a cipher");
  expect(mlx_h2o_spill_seal(other, &second), "only one");
  small.release(small.context);
  mlx_h2o_spill_free(other);
  for (int i = 0; i < 2; ++i) {
    snprintf(records[i], sizeof records[i], "%s.state-%c", path, "ab"[i]);
    unlink(records[i]);
  }
  expect(!unlink(path), "the file stayed");
  toy_key = 0;
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
  is_as_if_it_never_ended(folder, 0, 0), is_as_if_it_never_ended(folder, 4, 8);
  is_sealed(folder), does_without_a_cipher_that_fails(folder);
  expect(!files_in(folder), "no file is left");
  return failures;
}

int main(int argc, char** argv) {
  s = mlx_default_cpu_stream_new();
  int status = 2;
  const char* const pipes = getenv("CIPHER");
  if (pipes && sscanf(pipes, "%d %d", &to_cipher, &from_cipher) != 2) return 1;
  if (argc == 5 && !strcmp(argv[1], "write")) status = writes(argv[2], atoi(argv[3]), argv[4]);
  if (argc == 8 && !strcmp(argv[1], "read")) status = reads(argv + 2);
  if (argc == 4 && !strcmp(argv[1], "leave")) status = leaves(argv[2], atoi(argv[3]));
  if (argc == 5 && !strcmp(argv[1], "resume")) status = goes_on(argv[2], atoi(argv[3]), argv[4]);
  if (argc == 3 && !strcmp(argv[1], "refuse-to-resume")) status = refuses_to_resume(argv[2]);
  if (argc == 3 && !strcmp(argv[1], "resume-and-leave")) status = goes_on_with_nothing(argv[2]);
  if (argc == 3 && !strcmp(argv[1], "refuse")) status = refuses(argv[2]);
  if (argc == 3 && !strcmp(argv[1], "check")) status = checks(argv[2]);
  mlx_stream_free(s);
  if (status == 2)
    fprintf(
        stderr,
        "rows write|read|refuse|leave|resume|refuse-to-resume|resume-and-leave|check ...\n");
  return status > 0 ? 1 : 0;
}
