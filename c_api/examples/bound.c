// Bounds a layer: 128 tokens a head, whatever comes. (Your model makes q, k and v.)
#include <mlx_h2o.h>
#include <stdio.h>

static mlx_array made(int heads, int tokens, mlx_stream s) {
  mlx_array x = mlx_array_new(), key = mlx_array_new();
  mlx_random_normal(&x, (int[]){1, heads, tokens, 64}, 4, MLX_FLOAT16, 0, 1, key, s);
  return x;
}

int main(void) {
  mlx_stream s = mlx_default_cpu_stream_new();  // or that of a GPU
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();  // one for each layer
  mlx_h2o_cache_options options = mlx_h2o_cache_options_default();
  options.k_bits = options.v_bits = 8;
  int failed = mlx_h2o_policy_named(&policy, "salient") ||
      mlx_h2o_cache_make(&cache, policy, (int[]){128, 128}, 2, &options);
  for (int step = 0; step < 500 && !failed; ++step) {
    const int tokens = step ? 1 : 300;  // a prompt, then token by token; RoPE at the cache's offset
    mlx_array q = made(8, tokens, s), k = made(2, tokens, s), v = made(2, tokens, s);
    mlx_array out = mlx_array_new(), sinks = mlx_array_new();
    failed =
        mlx_h2o_cache_update_and_attend(&out, cache, q, k, v, 0.125f, "causal", sinks, sinks, s);
    mlx_array_eval(out);
    mlx_array_free(q), mlx_array_free(k), mlx_array_free(v), mlx_array_free(out);
  }
  size_t bytes = 0;
  failed = failed || mlx_h2o_cache_nbytes(&bytes, cache);
  printf("%zu bytes %s\n", bytes, failed ? mlx_h2o_last_error() : "after 799 tokens");
  mlx_h2o_cache_free(cache), mlx_h2o_policy_free(policy), mlx_stream_free(s);
  return failed;
}
