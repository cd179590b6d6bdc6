"""How far an answer leans on evicted tokens, over a whole model's caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.caches.base import BoundedKVCache


def unread_shares(cache: Sequence[Any]) -> list[mx.array]:
    """`BoundedKVCache.unread_mean` of each layer that tells it, `[B, H]` float32, lazy.

    Args:
        cache: From `make_prompt_cache` or `load_prompt_cache`.
    """
    layers = [entry for _, entry in entries(cache) if isinstance(entry, BoundedKVCache)]
    return [mean for layer in layers if (mean := layer.unread_mean) is not None]


def unread_text(share: float | None) -> str:
    """An answer's unread share in words that follow "tokens evicted"; "" for none."""
    return f" ({share:.1%} of the answer's attention)" if share else ""


def unread(cache: Sequence[Any]) -> float | None:
    """The share of an answer's attention that went to evicted tokens, from 0 to 1.

    A mean over the answer's tokens, over query heads and over the layers whose caches are bounded
    and have a remainder. It waits for the last step; reading it once an answer costs nothing.

    Args:
        cache: From `make_prompt_cache` or `load_prompt_cache`. An answer begins with the last token
            of the prompt's last chunk, or after `new_turn` (`BoundedKVCache.unread_mean`).

    Returns:
        The share, or None where no layer tells it: before the first token, without the remainder,
        or for a model that attends by itself.
    """
    shares = unread_shares(cache)
    if not shares:
        return None
    # Layers may differ in KV heads; each stands for as many query heads as any other.
    mean: Any = mx.stack([share.mean() for share in shares]).mean().item()
    return float(mean)
