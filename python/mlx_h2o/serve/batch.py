"""A batch: sequences whose next tokens are computed in one call of the model.

While one step's tokens are looked at, the next step is being computed already (`mx.async_eval`). So
when a sequence ends, its caches have read its last token too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.serve.sequence import Sequence


class Batch:
    """Sequences that take their steps together.

    Args:
        model: The model.
        joins: Whether the sequences' caches are merged. If not, there is one sequence.

    Attributes:
        model: The model.
        sequences: The sequences, by their rows.
    """

    def __init__(self, model: nn.Module, joins: bool):
        self.model, self.joins = model, joins
        self.sequences: list[Sequence] = []
        self._caches: list[Any] = []
        # The tokens that are read next, `[B]`, and the log-probabilities they were drawn from.
        self._tokens: mx.array | None = None
        self._rows: list[mx.array | None] = []

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(entry.nbytes for entry in self._caches)

    @property
    def slots(self) -> float:
        """The tokens that all sequences hold, mean over layers."""
        bounded = [e for _, e in entries(self._caches) if isinstance(e, BatchH2OKVCache)]
        count = sum(cache.size() for entry in bounded for cache in entry.caches)
        return count / len(bounded) if bounded else 0.0

    def add(self, sequence: Sequence) -> None:
        """Let a sequence begin to generate, from its prompt's last token."""
        assert sequence.cache is not None
        first = mx.array([sequence.prompt.tokens[-1]], mx.uint32)
        sequence.sampler.begin(sequence.tokens)
        caches = sequence.cache
        if self.joins:
            caches = [entry.merge([entry]) for entry in caches]
            for entry, other in zip(self._caches, caches, strict=True) if self._caches else ():
                entry.extend(other)
        self._caches = self._caches or caches
        self._tokens = first if self._tokens is None else mx.concatenate([self._tokens, first])
        self._rows.append(None)
        self.sequences.append(sequence)
        sequence.cache = None

    def step(self) -> list[tuple[Sequence, int, mx.array | None]]:
        """Read every sequence's next token.

        Returns:
            The sequences that generated the token that they read (others read their prompt's last),
            the token, and its log-probabilities `[V]` if they are wanted.

        Raises:
            Exception: Whatever the model raises; all caches are in an unknown state then.
        """
        inputs, rows = self._tokens, self._rows
        assert inputs is not None
        logits = self.model(inputs[:, None], cache=self._caches)[:, -1]
        if all(
            one.sampler.is_plain and not (one.wants_row or one.replay) for one in self.sequences
        ):
            self._tokens, self._rows = mx.argmax(logits, axis=-1), [None] * len(self)
            for one in self.sequences:
                one.drawn += 1
        else:
            drawn = [
                one.draw(inputs[i : i + 1], logits[i : i + 1])
                for i, one in enumerate(self.sequences)
            ]
            self._tokens = mx.concatenate([token for token, _ in drawn])
            self._rows = [row for _, row in drawn]
        mx.async_eval(self._tokens, [row for row in self._rows if row is not None])
        tokens: Any = inputs.tolist()
        generated = []
        for sequence, token, row in zip(self.sequences, tokens, rows, strict=True):
            if not sequence.left:
                generated.append((sequence, token, row))
            sequence.tokens.append(token)
        return generated

    def settle(self) -> None:
        """Compute everything that is still lazy, so that an error in it comes to light."""
        mx.eval(self._tokens, [entry.state for entry in self._caches])

    def remove(self, gone: Collection[Sequence]) -> dict[Sequence, list[Any]]:
        """Let sequences leave; their caches."""
        left = [i for i, one in enumerate(self.sequences) if one in gone]
        stay = [i for i in range(len(self)) if i not in left]
        caches = {self.sequences[i]: self._own(i) for i in left}
        self.sequences = [self.sequences[i] for i in stay]
        self._rows = [self._rows[i] for i in stay]
        if not stay:
            self._caches, self._tokens = [], None
        elif left:
            for entry in self._caches:
                entry.filter(stay)
            assert self._tokens is not None
            self._tokens = self._tokens[mx.array(stay)]
        return caches

    def _own(self, row: int) -> list[Any]:
        return [entry.extract(row) for entry in self._caches] if self.joins else self._caches

    def view(self, sequence: Sequence) -> list[Any]:
        """A sequence's own caches, not copied: they change with the next step.

        Caches without a bound are those of the whole batch.
        """
        row = self.sequences.index(sequence)
        return [_part(entry, row) for entry in self._caches] if self.joins else self._caches


def _part(entry: Any, row: int) -> Any:
    """One sequence's part of a batch's cache, members of a CacheList too."""
    if isinstance(entry, CacheList):
        return CacheList(*(_part(member, row) for member in entry.caches))
    return entry.caches[row] if isinstance(entry, BatchH2OKVCache) else entry
