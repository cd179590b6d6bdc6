"""How the attention kernels share out their work: pure functions of sizes.

All launchers of the kernels, in Python, C and Swift, follow these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

#: Widths that the kernels support, in elements.
WIDTHS = range(32, 577, 32)
#: Most queries of one call.
MOST_QUERIES = 8

# How many simdgroups fit a threadgroup, by the words per lane that a simdgroup's rows take: Apple's
# GPUs have 208 KB of registers a core, so 52 words a lane with 32 simdgroups, 104 with 16. No lane
# has more than 128, which 12 simdgroups can always have. The rest is for all other values.
_SIMDGROUPS_BY_WORDS = ((12, 32), (30, 16), (76, 12))
# Words of a row besides its share of the query and of the sum: logit, largest logit, weight.
_WORDS_BESIDES = 3
# Further words to read packed rows.
_WORDS_TO_UNPACK = 6
# Keys per step where a simdgroup reads them itself: enough to make an exponential cheap, few
# enough that short caches occupy all simdgroups.
_KEYS = 16
# Bytes of threadgroup memory for keys and values that several simdgroups share.
_STAGED_BYTES = 16384
# Most bytes of a block's queries and partial results, as a share of those of its keys and values.
_BLOCK_SHARE = 0.015
# On NVIDIA's GPUs MLX takes one pass up to so many slots, and beyond that spreads them over so many
# simdgroups.
_NVIDIA_ONE_PASS = 1024
_NVIDIA_SIMDGROUPS = 256


@dataclass(frozen=True)
class Tiling:
    """The template arguments computed from the sizes of a call.

    Attributes:
        queries: L rounded up to a power of two, so that few variants are compiled.
        rows: Query rows per simdgroup.
        row_groups: Simdgroups with the same keys and different rows.
        row_blocks: Threadgroups with the same keys and different rows: 1, unless the rows of a KV
            head do not fit into one.
        simdgroups: Simdgroups per threadgroup.
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


@cache
def tiling(
    key_width: int,
    value_width: int,
    group: int,
    queries: int,
    itemsize: int,
    packed: bool = False,
) -> Tiling:
    """Share out the query rows of a KV head.

    Args:
        key_width: Width of a key, D.
        value_width: Width of a value, Dv.
        group: Query heads per KV head, G.
        queries: The number of queries L.
        itemsize: Bytes per element of queries, and of keys and values unless they are packed.
        packed: Whether keys or values are packed.
    """
    padded = 1 << (queries - 1).bit_length()
    needed = group * padded
    words = _ceil(key_width * itemsize, 32 * 4) + value_width // 32 + _WORDS_BESIDES
    most_words, fewest_simdgroups = _SIMDGROUPS_BY_WORDS[-1]
    rows = min(needed, most_words // words)
    row_groups = min(_ceil(needed, rows), fewest_simdgroups)
    row_blocks = _ceil(needed, rows * row_groups)
    rows = _ceil(needed, row_groups * row_blocks)
    words_of_tile = min(rows * words + (_WORDS_TO_UNPACK if packed else 0), most_words)
    simdgroups = next(count for most, count in _SIMDGROUPS_BY_WORDS if words_of_tile <= most)
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
    stored: int | None = None,
) -> int | None:
    """The number of slots of a block if two passes pay, or None for one pass.

    All heads are cut into blocks of as many slots, so a long head has more of them. MLX's own rule
    for such a GPU (`sdpa_vector_2pass`) decides whether two passes pay, and over how many
    simdgroups to spread the longest head; the limit on the bytes of partial results is ours.
    (NVIDIA's caches keep partial results until they are merged, so there is no limit there.)

    Args:
        lengths: Slots of each KV head.
        group: Query heads per KV head, G.
        queries: The number of queries L.
        key_width: Width of a key, D.
        value_width: Width of a value, Dv.
        itemsize: Bytes per element of queries, and of keys and values unless they are packed.
        architecture: The GPU's name: "sm_90" is one of NVIDIA's; the last letter of "applegpu_g13s"
            is its size, where "s" and "d" are the large ones.
        stored: Bytes of a slot's key and value, if they are packed.
    """
    longest = max(lengths)
    tiles = tiling(key_width, value_width, group, queries, itemsize, stored is not None)
    if architecture.startswith("sm_"):
        if longest <= _NVIDIA_ONE_PASS:
            return None
        blocks, fewest = _ceil(_NVIDIA_SIMDGROUPS, tiles.splits), 1
    else:
        size = architecture[-1:]
        if not (size in ("s", "d") and longest >= 1024) and not (group > 1 and longest >= 4096):
            return None
        blocks = _ceil(_simdgroups_of_mlx(longest, group * queries, size), tiles.splits)
        # Queries are read; partial results and their lse are written and read again.
        extra = group * queries * (key_width * itemsize + 2 * (value_width * itemsize + 4))
        stored = stored or (key_width + value_width) * itemsize
        fewest = int(extra / (_BLOCK_SHARE * stored)) + 1
    step = tiles.splits * tiles.keys
    slots = _ceil(max(_ceil(longest, blocks), fewest), step) * step
    return slots if slots < longest else None


def _simdgroups_of_mlx(slots: int, rows: int, size: str) -> int:
    """The number of simdgroups over which MLX spreads a head's keys in its first pass."""
    if size == "s":
        if slots <= 1024 or rows <= 4:
            return 64
        steps = ((8192, 128), (32768, 256), (65536, 512))
        return next((blocks for most, blocks in steps if slots <= most), 1024)
    if size == "d":
        if rows <= 2 and slots > 8192:
            return 256
        if rows >= 6 and slots >= 16384:
            return 512 if slots < 65536 else 1024
        return 128
    return 64 if rows >= 4 else 32


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
