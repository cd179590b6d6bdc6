"""What one layer keeps so that evicted rows can come back (`engine/returning.py`)."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_h2o._utils import checks
from mlx_h2o.engine.array_owner import Fields
from mlx_h2o.spill.parts import Array
from mlx_h2o.spill.setting import Returns
from mlx_h2o.storage.slot_store import Run


class Credit(NamedTuple):
    """The scores that a head's returned rows were given, `[M]` each."""

    positions: Array
    scores: Array


class Returning:
    """What one layer keeps so that rows can come back.

    Args:
        settings: How they come back.
        heads: The KV heads for which they do; None means all.

    Attributes:
        queries: The last queries, `[1, Hq, L, D]` each, without key scaling.
        credits: By KV head.
        returned: Rows that came back so far.
        rows_read: Rows that were read from the file so far.
    """

    def __init__(self, settings: Returns, heads: frozenset[int] | None = None):
        self.settings, self.heads = settings, heads
        self.queries: list[mx.array] = []
        self.credits: dict[int, Credit] = {}
        self.returned = self.rows_read = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the queries and credits."""
        credits = sum(part.nbytes for credit in self.credits.values() for part in credit)
        return sum(q.nbytes for q in self.queries) + credits

    def note(self, q: mx.array) -> None:
        """Keep the last queries; `q` is `[1, Hq, L, D]`, as the model made it."""
        window = self.settings.window
        kept = [*self.queries, q if q.shape[2] <= window else q[:, :, -window:]]
        while sum(part.shape[2] for part in kept[1:]) >= window:
            kept.pop(0)
        self.queries = kept

    def has(self, run: Run) -> bool:
        """Whether rows come back to a run of heads."""
        return self.heads is None or any(h in self.heads for h in range(run.first, run.last))

    def state(self) -> tuple[Fields, dict[str, Any]]:
        """Arrays by name, and the rest as JSON types, from which `of_state` goes on."""
        arrays: Fields = {}
        if self.queries:
            arrays["queries"] = mx.concatenate(self.queries, axis=2)
        for head, credit in self.credits.items():
            arrays[f"positions.{head}"] = mx.array(credit.positions.astype(np.int32))
            arrays[f"scores.{head}"] = mx.array(credit.scores)
        heads = None if self.heads is None else sorted(self.heads)
        return arrays, {"heads": heads, "returns": asdict(self.settings)}

    @classmethod
    def of_state(cls, arrays: Fields, config: dict[str, Any], group: int) -> Returning:
        """What a layer kept when `state` was called.

        Args:
            arrays: The arrays by name.
            config: The rest.
            group: KV heads of the layer times the width of a key, by which queries must divide.

        Raises:
            ValueError: They do not fit together, or are not of this layer.
        """
        heads = config["heads"]
        back = cls(
            Returns(**config["returns"]),
            None if heads is None else frozenset(checks.wholes("heads", heads, 0)),
        )
        for name, array in arrays.items():
            kind, _, head = name.partition(".")
            if kind == "queries":
                if array.ndim != 4 or array.shape[0] != 1 or (array.size % group):
                    raise ValueError(f"Queries of another layer: {array.shape}.")
                back.queries = [array]
            elif kind == "positions":
                credit = Credit(np.array(array), np.array(arrays[f"scores.{head}"]))
                if credit.positions.shape != credit.scores.shape or credit.positions.ndim != 1:
                    raise ValueError("Positions and scores of returned rows are not paired.")
                back.credits[int(head)] = credit
        return back

    def __deepcopy__(self, memo: dict[int, Any]) -> Returning:
        """A copy; arrays are shared, as they never change."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.queries, new.credits = list(self.queries), dict(self.credits)
        return new
