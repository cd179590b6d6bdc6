// A cache refuses to be used in a function that MLX traces, and works outside of it.
#include <cstdio>

#include "mlx/mlx.h"
#include "mlx_h2o.h"

namespace mx = mlx::core;

int main() {
  const mlx_stream s = mlx_default_cpu_stream_new();
  const int budgets[] = {12, 12};
  mlx_h2o_policy policy = mlx_h2o_policy_new();
  mlx_h2o_cache cache = mlx_h2o_cache_new();
  if (mlx_h2o_policy_named(&policy, "h2o") || mlx_h2o_cache_make(&cache, policy, budgets, 2, NULL))
    return 2;
  int refused = 0, worked = 0;
  const auto layer = [&](const std::vector<mx::array>& in) {
    mx::array rows = in[0], out = in[0];
    mlx_array handle{&rows}, result{&out};
    const int status = mlx_h2o_cache_update_and_attend(
        &result, cache, handle, handle, handle, 1, "causal", mlx_array{nullptr}, mlx_array{nullptr},
        s);
    ++(status ? refused : worked);
    return std::vector<mx::array>{out};
  };
  const std::vector<mx::array> rows{mx::ones({1, 2, 1, 32})};
  mx::eval(mx::compile(layer)(rows));
  for (int step = 0; step < 20; ++step) mx::eval(layer(rows));
  int offset = 0;
  mlx_h2o_cache_offset(&offset, cache);
  std::printf("%d refused, %d worked, %d tokens\n", refused, worked, offset);
  mlx_h2o_cache_free(cache);
  mlx_h2o_policy_free(policy);
  mlx_stream_free(s);
  return !(refused == 1 && worked == 20 && offset == 20);
}
