"""Rows of one layer that are not in the file yet, as they were delivered.

MLX evaluates a graph on streams that belong to a thread, so only the thread of the model may
evaluate these arrays. The writer's thread only reads arrays that are evaluated: they are scheduled
(`mx.async_eval`) once the step that brought them is complete, and handed over when `PASSED` further
tokens have come (`ready_from`). By then the queue has passed them, so that reading them neither
waits for the device nor holds Python's lock meanwhile. Rows of a chunk are too many to wait for
that: they are evaluated (`evaluate`) when all layers have delivered them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_h2o.spill.layout import DTYPES, Array, LayerForm

#: Tokens after which scheduled arrays count as evaluated: a generator that builds the next step
#: while one runs has read the token before that.
PASSED = 4


def bits_of(rows: mx.array) -> mx.array:
    """Rows in a dtype that numpy has: bfloat16 as its bits, in uint16."""
    return rows.view(mx.uint16) if rows.dtype == mx.bfloat16 else rows


def of_bits(rows: Array, *, bfloat16: bool) -> mx.array:
    """Rows as MLX has them; uint16 as the bits of bfloat16, if that is what they are."""
    made = mx.array(rows)
    return made.view(mx.bfloat16) if bfloat16 else made


@dataclass
class Part:
    """Consecutive rows of one layer.

    Attributes:
        first: Position of the first row.
        count: Rows.
        fields: `[1, H, count, width]` by name: MLX's arrays as they came, or numpy's from the file.
        ready_from: How many positions every layer must have delivered before another thread may
            read the arrays; None until they are scheduled.
    """

    first: int
    count: int
    fields: dict[str, mx.array] | dict[str, Array]
    ready_from: int | None = None

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.first + self.count

    def rows(self, name: str) -> Array:
        """A field's rows, `[H, count, width]`; in the thread of the model, or when ready."""
        rows: Array = np.asarray(self.fields[name])[0]
        return rows

    def cut(self, end: int) -> None:
        """Forget the rows from a position on."""
        self.count = end - self.first

    def piece(self, first: int, end: int) -> Part:
        """Some of the rows of a part of MLX's arrays, in arrays of their own."""
        rows = slice(first - self.first, end - self.first)
        fields = {name: array[:, :, rows] for name, array in self.fields.items()}
        own = {name: mx.contiguous(cast(mx.array, array)) for name, array in fields.items()}
        return Part(first, end - first, own, self.ready_from)


def part_of(form: LayerForm, first: int, fields: dict[str, mx.array]) -> Part:
    """New rows as a part.

    Args:
        form: The layer's form.
        first: Position of the first row.
        fields: `[1, H, L, width]` by name, all of the form's fields; others are left out.
    """
    rows = {field.name: bits_of(fields[field.name]) for field in form.fields}
    return Part(first, next(iter(rows.values())).shape[2], rows)


def schedule(parts: Iterable[Part], complete: int) -> None:
    """Let MLX evaluate the parts' arrays without waiting for them.

    Args:
        parts: Parts of MLX's arrays that every layer has delivered.
        complete: Positions that every layer has delivered.
    """
    waiting = [part for part in parts if part.ready_from is None]
    mx.async_eval([array for part in waiting for array in part.fields.values()])
    for part in waiting:
        part.ready_from = complete + PASSED


def evaluate(parts: Iterable[Part]) -> None:
    """Evaluate the parts' arrays, which another thread may read then."""
    parts = list(parts)
    mx.eval([rows for one in parts for rows in one.fields.values() if isinstance(rows, mx.array)])
    for part in parts:
        part.ready_from = 0


def gathered(parts: Iterable[Part], form: LayerForm, head: int, positions: Array) -> dict[str, Any]:
    """Rows of one head, `[M, width]` by field.

    Args:
        parts: The layer's parts, which have all positions.
        form: The layer's form.
        head: KV head.
        positions: `[M]`.
    """
    M = len(positions)
    rows = {f.name: np.empty((M, f.width), DTYPES[f.dtype]) for f in form.fields}
    for part in parts:
        at = np.flatnonzero((positions >= part.first) & (positions < part.end))
        if len(at):
            for name, out in rows.items():
                out[at] = part.rows(name)[head, positions[at] - part.first]
    return rows
