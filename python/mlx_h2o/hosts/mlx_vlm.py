"""What the package needs of mlx-vlm; imported once mlx-vlm is."""

from __future__ import annotations

from mlx_vlm.models import base, cache

from mlx_h2o.hosts.host import Host

MLX_VLM = Host(
    name="mlx-vlm",
    package="mlx_vlm",
    caches=cache,
    make_prompt_cache=cache.make_prompt_cache,
    attention=base.scaled_dot_product_attention,
)
