"""The class of a saved cache."""

from __future__ import annotations

import json

import mlx.core as mx

from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.caches.latent import LatentKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.caches.shared import SharedKVCache

CLASSES = (H2OKVCache, PlainRowsKVCache, LatentKVCache, SharedKVCache)


def restored(state: tuple[dict[str, mx.array], str]) -> BoundedKVCache:
    """A cache of the class that a `state` belongs to.

    Args:
        state: Arrays by name, and the configuration as JSON.

    Raises:
        ValueError: It is not a state of a bounded cache.
    """
    try:
        config = json.loads(state[1])
        matches = [cls for cls in CLASSES if cls.is_described_by(config)]
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"This is no state of a bounded cache: {error!r}.") from error
    if not matches:
        raise ValueError("This state describes no known kind of cache.")
    return matches[0].from_state(state)
