// Saves a conversation and goes on with it: save FILE
//
// Two layers read a prompt and are saved; what was loaded gives the same next output. Where your
// model computes queries, keys and values, this draws them at random.
#include <mlx_h2o.h>
#include <stdio.h>

enum { LAYERS = 2, HEADS = 2, WIDTH = 64 };

// The sum of what a layer gives for so many tokens, which a seed makes.
static int attend(float* sum, mlx_h2o_cache cache, int tokens, uint64_t seed, mlx_stream s) {
  mlx_array x = mlx_array_new(), key = mlx_array_new(), none = {NULL};
  mlx_array out = mlx_array_new(), all = mlx_array_new();
  const int failed = mlx_random_key(&key, seed) ||
      mlx_random_normal(&x, (int[]){1, HEADS, tokens, WIDTH}, 4, MLX_FLOAT16, 0, 1, key, s) ||
      mlx_h2o_cache_update_and_attend(&out, cache, x, x, x, 0.125f, "causal", none, none, s) ||
      mlx_astype(&out, out, MLX_FLOAT32, s) || mlx_sum(&all, out, false, s) ||
      mlx_array_item_float32(sum, all);
  mlx_array_free(x), mlx_array_free(key), mlx_array_free(out), mlx_array_free(all);
  return failed;
}

int main(int argc, char** argv) {
  const char* file = argc > 1 ? argv[1] : "conversation.safetensors";
  mlx_stream s = mlx_default_cpu_stream_new();
  mlx_h2o_policy policy = mlx_h2o_policy_new(), saved_one = {NULL};
  mlx_h2o_cache caches[LAYERS] = {{NULL}}, loaded[LAYERS] = {{NULL}};
  mlx_map_string_to_string texts = mlx_map_string_to_string_new(), found = texts;
  float sum = 0, again = 1;
  const char* title = "";
  int failed = mlx_h2o_policy_named(&policy, "salient");
  for (int l = 0; l < LAYERS && !failed; ++l)
    failed = mlx_h2o_cache_make(&caches[l], policy, (int[]){128, 128}, HEADS, NULL) ||
        attend(&sum, caches[l], 300, 1, s);

  // An existing file is replaced once all is on disk, and stays what it was if anything fails.
  failed = failed || mlx_map_string_to_string_insert(texts, "title", "A letter") ||
      mlx_h2o_save_prompt_cache(file, caches, LAYERS, texts, s);
  // A file that was cut or changed is an error; the caches are those of Python's and Swift's files.
  found = mlx_map_string_to_string_new();
  failed = failed || mlx_h2o_load_prompt_cache(loaded, LAYERS, &found, file, saved_one, s) ||
      mlx_map_string_to_string_get(&title, found, "title");

  failed = failed || attend(&sum, caches[1], 1, 2, s) || attend(&again, loaded[1], 1, 2, s);
  printf("%s: %s\n", title, failed ? mlx_h2o_last_error() : sum == again ? "the same" : "another");
  for (int l = 0; l < LAYERS; ++l) mlx_h2o_cache_free(caches[l]), mlx_h2o_cache_free(loaded[l]);
  mlx_map_string_to_string_free(texts), mlx_map_string_to_string_free(found);
  mlx_h2o_policy_free(policy), mlx_stream_free(s);
  return failed || sum != again;
}
