"""Packed caches of other packages for MLX: turboquant-mlx-full and veloxquant-mlx, from PyPI.

They keep every token, in fewer bits. Their GPU kernels need a Mac; here they compute with MLX's own
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.board.packages import imported
from benchmarks.board.reading import Sized, having_read, through
from benchmarks.board.rivals import Rival
from benchmarks.board.tasks import Task
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.hosts.stock_caches import stock_caches

TURBOQUANT = "turboquant-mlx-full==0.30.0"
VELOXQUANT = "veloxquant-mlx==0.94.15"
#: Bits of keys and values, and why these.
WIDTHS = {
    (8, 3): "its README's recommended default",
    (4, 3): "where its README sees keys degrade",
    (3, 3): "its historical default",
}
#: KIVI's settings in its paper: 2 bits in groups of 32, and the newest tokens unpacked.
KIVI = {"bit_width_inlier": 2, "kivi_group_size": 32, "residual_length": 32}


def rivals() -> list[Rival]:
    """TurboQuant in several widths, and KIVI."""
    turbo = [
        Rival(
            f"turboquant-mlx-full, {k} and {v} bits",
            "https://pypi.org/project/turboquant-mlx-full/",
            f"bits of keys and values: {why}",
            through(_turboquant(k, v), one_by_one=True),
            keeps_all=True,
        )
        for (k, v), why in WIDTHS.items()
    ]
    kivi = Rival(
        "veloxquant-mlx, KIVI, 2 bits",
        "https://pypi.org/project/veloxquant-mlx/",
        "groups of 32, newest 32 unpacked; bytes as the package says, which it holds unpacked",
        through(_kivi, one_by_one=True, count=_said_by_kivi),
        keeps_all=True,
    )
    return [*turbo, kivi]


def _turboquant(k_bits: int, v_bits: int) -> Sized:
    def sized(reader: Reader, part: Task, share: float) -> list[Any]:
        module = imported(TURBOQUANT, "turboquant_mlx.layers.polar_kv_cache")
        of = {"k_bits": k_bits, "v_bits": v_bits}
        caches = [module.TurboQuantKVCache(**of) for _ in stock_caches(reader.model)]
        return having_read(reader, caches, part)

    return sized


def _kivi(reader: Reader, part: Task, share: float) -> list[Any]:
    module = imported(VELOXQUANT, "veloxquant_mlx")
    config = module.KVCacheConfig(method="kivi", seed=0, **KIVI)
    caches = list(module.KVCacheBuilder.for_model(reader.model, config))
    return having_read(reader, caches, part)


def _said_by_kivi(cache: Sequence[Any]) -> int:
    """What a packed form would take, by the package's own account."""
    return sum(
        entry.compressed_key_bytes + entry.compressed_value_bytes + entry.residual_fp16_bytes
        for entry in cache
    )
