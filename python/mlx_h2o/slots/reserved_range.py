"""Slots in a reserved range of addresses.

The range has room for all slots of a layer's budgets. A page of it takes memory when a row is first
written there, and can be given back, so the slots in use grow and shrink where they are. Copies of
a conversation share pages until one of them writes (Linux). The extension does all of this
(c_api/src/cpu/reserved_range.h), because MLX never writes in place to memory that it did not
allocate.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from types import ModuleType

import mlx.core as mx

#: A range pays where a head's keys take at least so many bytes: pages at its ends are used in part.
FEWEST_BYTES = 128 << 10
#: The most slots of a field: an axis of MLX's arrays has 32 bits.
MOST_SLOTS = 2**31 - 1
#: Bytes in front of each field, which MLX's allocator takes (kInFront in ranged_arrays.cpp).
IN_FRONT = 64

#: Fields by name.
Fields = dict[str, mx.array]


def is_available() -> bool:
    """Whether slots can lie in ranges: with the extension, and not where MLX has a GPU."""
    extension = _extension()
    return extension is not None and bool(extension.ranges_fit_mlx())


def zeros(like: dict[str, tuple[Sequence[int], mx.Dtype]]) -> Fields | None:
    """Fields of zeros in one range; None, with a notice, where the system refuses it.

    Args:
        like: Shape and dtype of each field, by name.
    """
    extension = _extension()
    if extension is None:
        return None
    shapes, dtypes = zip(*like.values(), strict=True)
    try:
        arrays = extension.reserved([list(shape) for shape in shapes], list(dtypes))
    except RuntimeError as error:
        warnings.warn(
            f"Slots grow by copies, as they would without reserved memory: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return dict(zip(like, arrays, strict=True))


def put_rows(
    fields: Fields, index: mx.array, rows: Fields, unused: Sequence[tuple[int, int]] = ()
) -> Fields:
    """The fields with rows at some slots, in place where no one else holds them.

    Args:
        fields: `[B, S, ...]` by name; more than `rows` has are left alone.
        index: Slots `[B or 1, M]`.
        rows: `[B, M, ...]` by name.
        unused: Slots, from the first to one before the last, whose memory is given back.

    Returns:
        The fields of `rows`.
    """
    extension = _extension()
    assert extension is not None
    into = [fields[name] for name in rows]
    typed = [row.astype(field.dtype) for row, field in zip(rows.values(), into, strict=True)]
    return dict(zip(rows, extension.put_rows(into, index, typed, list(unused)), strict=True))


def is_elsewhere(array: mx.array) -> bool:
    """Whether an array has memory that is no range's; False while it has none."""
    extension = _extension()
    return extension is None or bool(extension.is_elsewhere(array))


def bytes_held() -> int:
    """Bytes of the pages that all ranges have in memory; those that copies share count for none.

    MLX's active memory leaves them out.
    """
    extension = _extension()
    return 0 if extension is None else int(extension.reserved_bytes()[0])


def bytes_taken(row: int, slots: int, batch: int, used: Sequence[tuple[int, int]]) -> int:
    """Bytes of the pages that a field's slots in use lie in, and no more than the field has.

    Args:
        row: Bytes of a row.
        slots: Slots of a sequence, S.
        batch: Sequences, B.
        used: Slots of every sequence that are in use, in order: the first, and how many.
    """
    page, pages, end = page_size(), 0, 0
    for sequence in range(batch):
        for first, count in used:
            if not count:
                continue
            start = IN_FRONT + (sequence * slots + first) * row
            last = -(-(start + count * row) // page)
            pages += max(last - max(start // page, end), 0)
            end = max(last, end)
    return min(pages * page, batch * slots * row)


@functools.cache
def page_size() -> int:
    """Bytes of a page."""
    import mmap

    return mmap.PAGESIZE


@functools.cache
def _extension() -> ModuleType | None:
    try:
        from mlx_h2o import _ext
    except ImportError:
        return None
    return _ext
