"""What the package needs of a library that runs models: its attention, its caches, and their maker.

Each library has a file of its own, `hosts/mlx_lm.py` and `hosts/mlx_vlm.py`; the rest of the
package reaches both through `hosts/loaded.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Host:
    """A library that runs models.

    Attributes:
        name: The library's name, "mlx-lm".
        package: Its top package, "mlx_lm".
        caches: Its module of caches, with `KVCache`, `CacheList`, `RotatingKVCache`,
            `ArraysCache` and `ChunkedKVCache`.
        make_prompt_cache: Its own function that makes a model's caches.
        attention: Its own function through which models attend.
    """

    name: str
    package: str
    caches: Any
    make_prompt_cache: Callable[..., list[Any]]
    attention: Callable[..., Any]
