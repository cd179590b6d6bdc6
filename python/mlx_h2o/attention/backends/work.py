"""The work of an attention launch as integers, in the layout of metal/work.h."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import mlx.core as mx

_UNUSED = 0


@dataclass(frozen=True)
class Ranges:
    """The slots of KV heads of different lengths in a flat buffer `[B, S, D]`.

    Attributes:
        starts: First slot of each head.
        lengths: Slots of each head that are attended to.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """The KV heads of a launch and the blocks that they are cut into.

    Attributes:
        lengths: Slots of each head.
        starts: First slot of each head in its buffer.
        memory_heads: The index of each head in the buffer.
        block: Slots of a block, or None if heads are not cut.
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    memory_heads: tuple[int, ...]
    block: int | None

    @property
    def slots(self) -> int:
        return sum(self.lengths)

    @cached_property
    def items(self) -> int:
        """Blocks of all heads."""
        return len(self.lines())

    def lines(self) -> list[list[int]]:
        """A line of the table for each block, head after head."""
        lines, prefix = [], 0
        heads = zip(self.memory_heads, self.starts, self.lengths, strict=True)
        for head, (memory_head, start, length) in enumerate(heads):
            step = self.block or max(length, 1)
            for offset in range(0, max(length, 1), step):
                count = min(step, length - offset)
                where = [head, memory_head, start, length, prefix, offset, count]
                lines.append([*where, _UNUSED])
            prefix += length
        return lines

    def firsts(self) -> list[int]:
        """Each head's first line, and the line after the last head's."""
        heads = [line[0] for line in self.lines()]
        return [heads.index(head) for head in range(len(self.lengths))] + [len(heads)]


# Cached, as are the integers: lengths change with every step only until a cache is full, and the
# lines of a long head take longer to list than its attention takes on a GPU.
@lru_cache(maxsize=64)
def work_of(lengths: tuple[int, ...], ranges: Ranges | None, block: int | None) -> Work:
    """The work on equal heads, or on heads in ranges.

    Args:
        lengths: Slots of each KV head.
        ranges: The ranges of heads' slots in flat arrays, or None.
        block: As in `Work`.
    """
    heads = len(lengths)
    if ranges is None:
        return Work(lengths, (0,) * heads, tuple(range(heads)), block)
    return Work(lengths, ranges.starts, (0,) * heads, block)


@lru_cache(maxsize=64)
def params(work: Work, queries: int, mask_columns: int) -> mx.array:
    """The launch's integers, its table and the heads' first lines, int32.

    Args:
        work: The launch's work.
        queries: The number of queries L.
        mask_columns: Columns of an array mask, or 0.
    """
    lines = work.lines()
    of_launch = [queries, work.slots, mask_columns, len(work.lengths), len(lines)]
    of_launch += [_UNUSED] * (8 - len(of_launch))
    return mx.array([*of_launch, *chain.from_iterable(lines), *work.firsts()], mx.int32)
