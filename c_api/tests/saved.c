// Goes on with a cache that Python saved (tests/conformance/test_c_api.py):
//
//   saved IN OUT     restores the cache of a file, takes its tokens in one by one, and writes what
//   came
//                    out and the cache as it is then
//   saved refuse IN  succeeds if what the file holds is refused as no saved cache, or can be used
//
// A file is arrays "cache.<name>" with the settings as metadata, and tokens "in.q", "in.k", "in.v"
// [B, H, L, width]; then "out", of a model that attends by itself the keys of the last step.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mlx_h2o.h"

static const mlx_array kNone = {NULL};
static mlx_stream s;

#define MUST(call)                                                     \
  do {                                                                 \
    if (call) {                                                        \
      fprintf(stderr, "saved: %s: %s\n", #call, mlx_h2o_last_error()); \
      exit(1);                                                         \
    }                                                                  \
  } while (0)

static mlx_array token(mlx_map_string_to_array all, const char* name, int i) {
  mlx_array rows = mlx_array_new(), one = mlx_array_new();
  MUST(mlx_map_string_to_array_get(&rows, all, name));
  const int* shape = mlx_array_shape(rows);
  const int start[] = {0, 0, i, 0}, stop[] = {shape[0], shape[1], i + 1, shape[3]};
  const int steps[] = {1, 1, 1, 1};
  MUST(mlx_slice(&one, rows, start, 4, stop, 4, steps, 4, s));
  mlx_array_free(rows);
  return one;
}

static int tokens(mlx_map_string_to_array all) {
  mlx_array rows = mlx_array_new();
  MUST(mlx_map_string_to_array_get(&rows, all, "in.k"));
  const int count = mlx_array_dim(rows, 2);
  mlx_array_free(rows);
  return count;
}

// The arrays of the cache, without "cache.".
static mlx_map_string_to_array of_cache(mlx_map_string_to_array all) {
  mlx_map_string_to_array found = mlx_map_string_to_array_new();
  mlx_map_string_to_array_iterator it = mlx_map_string_to_array_iterator_new(all);
  const char* name;
  mlx_array array = mlx_array_new();
  while (!mlx_map_string_to_array_iterator_next(&name, &array, it))
    if (!strncmp(name, "cache.", 6)) MUST(mlx_map_string_to_array_insert(found, name + 6, array));
  mlx_map_string_to_array_iterator_free(it);
  mlx_array_free(array);
  return found;
}

static int step(mlx_array* out, mlx_h2o_cache cache, mlx_map_string_to_array all, int i) {
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  MUST(mlx_h2o_cache_get_options(&options, cache));
  mlx_array k = token(all, "in.k", i), v = token(all, "in.v", i), q = mlx_array_new();
  int status;
  if (options.attending) {
    q = token(all, "in.q", i);
    status = mlx_h2o_cache_update_and_attend(out, cache, q, k, v, 0.2f, "causal", kNone, kNone, s);
  } else {
    mlx_array values = mlx_array_new(), mask = mlx_array_new();
    status = mlx_h2o_cache_update_and_fetch(out, &values, &mask, cache, k, v, s);
    mlx_array_free(values), mlx_array_free(mask);
  }
  mlx_array_free(k), mlx_array_free(v), mlx_array_free(q);
  return status ? status : mlx_array_eval(*out);
}

static void write(const char* path, mlx_h2o_cache cache, mlx_array out) {
  mlx_map_string_to_array held = mlx_map_string_to_array_new(), all = mlx_map_string_to_array_new();
  mlx_map_string_to_string metadata = mlx_map_string_to_string_new();
  mlx_string settings = mlx_string_new();
  MUST(mlx_h2o_cache_arrays(&held, &settings, cache, s));
  mlx_map_string_to_array_iterator it = mlx_map_string_to_array_iterator_new(held);
  const char* name;
  char with[256];
  mlx_array array = mlx_array_new();
  while (!mlx_map_string_to_array_iterator_next(&name, &array, it)) {
    snprintf(with, sizeof with, "cache.%s", name);
    MUST(mlx_map_string_to_array_insert(all, with, array));
  }
  mlx_map_string_to_array_iterator_free(it);
  MUST(mlx_map_string_to_array_insert(all, "out", out));
  MUST(mlx_map_string_to_string_insert(metadata, "settings", mlx_string_data(settings)));
  MUST(mlx_save_safetensors(path, all, metadata));
  mlx_array_free(array), mlx_string_free(settings), mlx_map_string_to_string_free(metadata);
  mlx_map_string_to_array_free(held), mlx_map_string_to_array_free(all);
}

int main(int argc, char** argv) {
  s = mlx_default_cpu_stream_new();
  const bool refuse = argc == 3 && !strcmp(argv[1], "refuse");
  mlx_map_string_to_array all = mlx_map_string_to_array_new();
  mlx_map_string_to_string metadata = mlx_map_string_to_string_new();
  const char* settings = NULL;
  MUST(mlx_load_safetensors(&all, &metadata, argv[refuse ? 2 : 1], s));
  MUST(mlx_map_string_to_string_get(&settings, metadata, "settings"));
  mlx_map_string_to_array held = of_cache(all);
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  mlx_array out = mlx_array_new();
  const int status = mlx_h2o_cache_restore(&cache, mlx_h2o_policy_new(), held, settings, s);
  int wrong = 0;
  if (status && refuse) {
    printf("refused: %s\n", mlx_h2o_last_error());
    wrong = mlx_h2o_last_error_code() != MLX_H2O_ERROR_SAVED || cache.ctx;
  } else {
    MUST(status);
    // (Rows of another form than the model's are refused, which is not the file's fault.)
    for (int i = 0; i < tokens(all); ++i)
      if (step(&out, cache, all, i)) {
        if (!refuse) MUST(1);
        break;
      }
    if (!refuse) write(argv[2], cache, out);
    if (refuse) printf("used\n");
  }
  mlx_h2o_cache_free(cache);
  mlx_array_free(out);
  mlx_map_string_to_array_free(all), mlx_map_string_to_array_free(held);
  mlx_map_string_to_string_free(metadata);
  mlx_stream_free(s);
  return wrong;
}
