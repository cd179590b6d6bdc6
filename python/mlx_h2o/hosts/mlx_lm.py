"""What the package needs of mlx-lm."""

from __future__ import annotations

from mlx_lm.models import base, cache

from mlx_h2o.hosts.host import Host

MLX_LM = Host(
    name="mlx-lm",
    package="mlx_lm",
    caches=cache,
    make_prompt_cache=cache.make_prompt_cache,
    attention=base.scaled_dot_product_attention,
)
