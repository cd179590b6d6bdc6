"""What the package needs of a library that runs models: its caches, functions and language models.

Each library has a file of its own, `hosts/mlx_lm.py` and `hosts/mlx_vlm.py`; the rest of the
package reaches both through `hosts/loaded.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Wrap = Callable[[Any], Callable[..., Any]]


@dataclass(frozen=True)
class Host:
    """A library that runs models.

    Attributes:
        name: The library's name, "mlx-lm".
        package: Its top package, "mlx_lm".
        caches: Its module of caches, with `KVCache`, `CacheList`, `RotatingKVCache`,
            `ArraysCache` and `ChunkedKVCache`.
        make_prompt_cache: Its own function that makes a model's caches.
        wraps: Its functions that must know bounded caches, with what wraps each.
        methods: The same for methods, by class and name.
    """

    name: str
    package: str
    caches: Any
    make_prompt_cache: Callable[..., list[Any]]
    wraps: tuple[tuple[Callable[..., Any], Wrap], ...]
    methods: Mapping[tuple[type, str], Wrap] = field(default_factory=dict)
