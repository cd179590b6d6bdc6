// Prompt-cache files (tests/conformance/test_c_api.py):
//
//   files copy IN OUT COUNT   loads COUNT caches and writes them anew, with what was kept with them
//   files damaged IN COPY     IN with a bit changed, or cut, written to COPY: all are refused
//   files failing IN          IN stays whole where it cannot be replaced
//
// Ends with 0, or with 1 and what was otherwise.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define PROGRAM "files"
#include "expect.h"
#include "mlx_h2o.h"

enum { MOST = 16, FLIPPED = 60, CUT = 40 };

static mlx_stream s;
static mlx_h2o_cache caches[MOST];
static const mlx_h2o_policy kSaved = {NULL};

static int loaded(const char* file, size_t count, mlx_map_string_to_string* texts) {
  return mlx_h2o_load_prompt_cache(caches, count, texts, file, kSaved, s);
}

static void copy(const char* in, const char* out, size_t count) {
  mlx_map_string_to_string texts = mlx_map_string_to_string_new();
  expect(!loaded(in, count, &texts), "a file is loaded");
  expect(!mlx_h2o_save_prompt_cache(out, caches, count, texts, s), "its caches are saved");
  expect(
      loaded(in, count + 1, NULL) && mlx_h2o_last_error_code() == MLX_H2O_ERROR_SAVED,
      "a model of other layers");
  mlx_map_string_to_string_free(texts);
}

static void refused(const char* file, const char* bytes, size_t size, const char* what) {
  FILE* copy = fopen(file, "wb");
  expect(copy && fwrite(bytes, 1, size, copy) == size && !fclose(copy), "a damaged file");
  expect(loaded(file, 1, NULL) && mlx_h2o_last_error_code() == MLX_H2O_ERROR_SAVED, what);
}

static void damaged(const char* in, const char* file) {
  FILE* whole = fopen(in, "rb");
  char* bytes = malloc(1 << 24);
  const size_t size = whole ? fread(bytes, 1, 1 << 24, whole) : 0;
  expect(whole && !fclose(whole) && size > 1000, "a whole file");
  for (size_t i = 0; i < FLIPPED; ++i) {
    // The header, of some thousand bytes, and what follows.
    const size_t at = i % 2 ? i * 31 : i * (size / FLIPPED);
    bytes[at] ^= (char)(1 << i % 8);
    refused(file, bytes, size, "a bit is changed");
    bytes[at] ^= (char)(1 << i % 8);
  }
  for (size_t i = 0; i < CUT; ++i) refused(file, bytes, i * size / CUT, "it is cut");
  const uint64_t longest[] = {size, UINT64_MAX, (uint64_t)1 << 63};
  for (size_t i = 0; i < 3; ++i) {
    memcpy(bytes, &longest[i], 8);
    refused(file, bytes, size, "a header longer than the file");
  }
  expect(
      loaded("/nowhere/at/all", 1, NULL) && mlx_h2o_last_error_code() == MLX_H2O_ERROR_FILE,
      "no file");
  free(bytes);
}

static void failing(const char* in) {
  const mlx_map_string_to_string none = {NULL};
  expect(!loaded(in, 1, NULL), "a file is loaded");
  expect(
      mlx_h2o_save_prompt_cache("/nowhere/at/all", caches, 1, none, s) &&
          mlx_h2o_last_error_code() == MLX_H2O_ERROR_FILE,
      "no folder");
  signal(SIGXFSZ, SIG_IGN);
  const struct rlimit few = {4096, RLIM_INFINITY}, many = {RLIM_INFINITY, RLIM_INFINITY};
  expect(!setrlimit(RLIMIT_FSIZE, &few), "a limit");
  expect(
      mlx_h2o_save_prompt_cache(in, caches, 1, none, s) &&
          mlx_h2o_last_error_code() == MLX_H2O_ERROR_FILE,
      "a file that gets too large");
  expect(!setrlimit(RLIMIT_FSIZE, &many), "no limit");
  expect(!loaded(in, 1, NULL), "the old file is whole");
}

int main(int argc, char** argv) {
  s = mlx_default_cpu_stream_new();
  if (argc == 5 && !strcmp(argv[1], "copy"))
    copy(argv[2], argv[3], (size_t)atoi(argv[4]));
  else if (argc == 4 && !strcmp(argv[1], "damaged"))
    damaged(argv[2], argv[3]);
  else if (argc == 3 && !strcmp(argv[1], "failing"))
    failing(argv[2]);
  else
    return 2;
  for (int i = 0; i < MOST; ++i) mlx_h2o_cache_free(caches[i]);
  mlx_stream_free(s);
  return failures != 0;
}
