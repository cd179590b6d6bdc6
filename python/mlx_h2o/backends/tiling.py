"""How the attention kernels share out their work: pure functions of sizes.

Whoever launches the kernels, from Python, C or Swift, decides by these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Widths that the kernels are written for, in elements.
WIDTHS = range(32, 577, 32)
#: Queries of one call.
MOST_QUERIES = 8

# Floats per lane that a simdgroup's rows may take, and how many simdgroups then fit a threadgroup:
# Apple's GPUs have 208 KB of registers a core, so 52 words a lane with 32 simdgroups, 104 with 16,
# and never more than 128. About half of them is left to everything else.
_SIMDGROUPS_BY_FLOATS = ((24, 32), (52, 16), (88, 12))
# What a row takes besides its share of the query and of the sum: logit, largest logit, weight.
_FLOATS_BESIDES = 3
# Keys of a step where a simdgroup reads them itself: enough to make an exponential cheap, few
# enough that short caches occupy all simdgroups.
_KEYS = 16
# Bytes of threadgroup memory for keys and values that several simdgroups share.
_STAGED_BYTES = 16384
# Partial results may cost this share of the bytes of the keys and values that they are made of.
_PARTIAL_SHARE = 0.015


@dataclass(frozen=True)
class Tiling:
    """The template arguments that follow from the sizes of a call.

    Attributes:
        queries: L rounded up to a power of two, so that few variants are compiled.
        rows: Query rows per simdgroup.
        row_groups: Simdgroups with the same keys and different rows.
        row_blocks: Threadgroups with the same keys and different rows: 1, unless the rows of a KV
            head do not fit into one.
        simdgroups: Per threadgroup.
        keys: Keys per simdgroup and step.
    """

    queries: int
    rows: int
    row_groups: int
    row_blocks: int
    simdgroups: int
    keys: int

    @property
    def splits(self) -> int:
        """Simdgroups of a threadgroup that have different keys."""
        return self.simdgroups // self.row_groups


def tiling(key_width: int, value_width: int, group: int, queries: int, itemsize: int) -> Tiling:
    """Share out the query rows of a KV head.

    Args:
        key_width: D.
        value_width: Dv.
        group: G, query heads per KV head.
        queries: L.
        itemsize: Bytes per element of keys and values.
    """
    padded = 1 << (queries - 1).bit_length()
    needed = group * padded
    floats_per_row = (key_width + value_width) // 32 + _FLOATS_BESIDES
    most_floats, fewest_simdgroups = _SIMDGROUPS_BY_FLOATS[-1]
    rows = min(needed, most_floats // floats_per_row)
    row_groups = min(_ceil(needed, rows), fewest_simdgroups)
    row_blocks = _ceil(needed, rows * row_groups)
    rows = _ceil(needed, row_groups * row_blocks)
    simdgroups = next(
        count for floats, count in _SIMDGROUPS_BY_FLOATS if rows * floats_per_row <= floats
    )
    if row_groups == 1:
        return Tiling(padded, rows, 1, row_blocks, simdgroups, _KEYS)
    slots = max(1, _STAGED_BYTES // ((key_width + value_width) * itemsize))
    splits = min(simdgroups // row_groups, slots)
    keys = min(_KEYS, slots // splits)
    return Tiling(padded, rows, row_groups, row_blocks, splits * row_groups, keys)


def slots_per_block(
    lengths: Sequence[int],
    group: int,
    queries: int,
    key_width: int,
    value_width: int,
    itemsize: int,
    architecture: str,
) -> int | None:
    """The slots of a block where two passes pay, or None for one pass.

    All heads are cut into blocks of as many slots, so a long head has more of them. Whether two
    passes pay, and over how many simdgroups to spread the longest head, is MLX's own rule
    (`sdpa_vector_2pass`); that partial results may cost few bytes is ours.

    Args:
        lengths: Slots of each KV head.
        group: G.
        queries: L.
        key_width: D.
        value_width: Dv.
        itemsize: Bytes per element of keys and values.
        architecture: The GPU's, whose last letter is its size: "s" and "d" are the large ones.
    """
    longest, size = max(lengths), architecture[-1:]
    if not (size in ("s", "d") and longest >= 1024) and not (group > 1 and longest >= 4096):
        return None
    tiles = tiling(key_width, value_width, group, queries, itemsize)
    blocks = _ceil(_simdgroups_of_mlx(longest, group * queries, size), tiles.splits)
    partial = 2 * group * queries * (value_width * itemsize + 4)
    fewest = partial / (_PARTIAL_SHARE * (key_width + value_width) * itemsize)
    step = tiles.splits * tiles.keys
    slots = _ceil(max(_ceil(longest, blocks), int(fewest) + 1), step) * step
    return slots if slots < longest else None


def _simdgroups_of_mlx(slots: int, rows: int, size: str) -> int:
    """Over how many simdgroups MLX spreads the keys of a head in its first pass."""
    if size == "s":
        if slots <= 1024 or rows <= 4:
            return 64
        return next((b for most, b in ((8192, 128), (32768, 256), (65536, 512)) if slots <= most), 1024)
    if size == "d":
        if rows <= 2 and slots > 8192:
            return 256
        if rows >= 6 and slots >= 16384:
            return 512 if slots < 65536 else 1024
        return 128
    return 64 if rows >= 4 else 32


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
