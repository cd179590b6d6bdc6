"""What the package needs of mlx-lm."""

from __future__ import annotations

from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import base, cache

from mlx_h2o.hosts import trimming
from mlx_h2o.hosts.attending import refusing, routed
from mlx_h2o.hosts.host import Host

MLX_LM = Host(
    name="mlx-lm",
    package="mlx_lm",
    caches=cache,
    make_prompt_cache=cache.make_prompt_cache,
    wraps=(
        (base.scaled_dot_product_attention, routed),
        (cache.save_prompt_cache, refusing),
        (cache.trim_prompt_cache, trimming.trimming),
        (cache.can_trim_prompt_cache, trimming.asking),
        (speculative_generate_step, trimming.speculating),
    ),
    methods={
        (cache.LRUPromptCache, name): trimming.by_any_number
        for name in ("fetch_nearest_cache", "insert_cache")
    },
)
