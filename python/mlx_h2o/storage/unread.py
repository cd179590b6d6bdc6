"""The unread share: how much of a token's attention went to evicted tokens.

Evicted tokens answer as one softmax column, the remainder's, with the logit r
(`storage/remainder.py`). Of a query's attention it receives

    exp(r - lse)                  lse over all columns, this one included

so the unread share says how far the next token leans on rows that are no longer there. The kernels
hand out its numbers beside their output, and nothing waits for them: they are added up lazily.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import mlx.core as mx

# Steps whose shares are added up at once, so that a step costs no operation of its own.
SUMMED_AT_ONCE = 16


class Share(NamedTuple):
    """One token's unread shares in a layer, as a kernel hands them out.

    Attributes:
        numbers: The shares `[B, H]` float32, or the column's logits and the lse, `[B, Hq, 1]`
            float32 each.
        sequence: The only sequence of `[B, ...]` that is meant, or None for all of them.
    """

    numbers: tuple[mx.array, ...]
    sequence: int | None = None


def shares(columns: mx.array, lse: mx.array, heads: int) -> mx.array:
    """The unread share of each KV head, a mean over its query heads, `[..., H]` float32.

    Args:
        columns: The remainder's logits `[..., Hq]`.
        lse: The log-sum-exp over all columns, `[..., Hq]`.
        heads: KV heads, H.
    """
    finite = mx.where(lse == -mx.inf, 0.0, lse)
    of_heads: mx.array = mx.exp(columns - finite).reshape(*lse.shape[:-1], heads, -1).mean(axis=-1)
    return of_heads


class UnreadShares:
    """The unread shares of a layer's newest tokens, and their sum since a prompt began an answer.

    Args:
        batch: Sequences, B.
        heads: KV heads, H.
        undo: How many of the newest tokens `take_back` can be asked for after evictions.
    """

    def __init__(self, batch: int, heads: int, undo: int):
        self._shape = batch, heads
        self._kept = undo + 1
        self.restart()

    def restart(self) -> None:
        """Begin an answer: the mean is over the tokens from here on."""
        self._newest = list[Share | None]()
        self._older: mx.array | None = None
        self._summed = 0

    def note(self, share: Share | None) -> list[mx.array]:
        """Take in the newest token's share; None: the layer has evicted nothing.

        Returns:
            Arrays to evaluate with the step, most often none.
        """
        self._newest.append(share)
        if len(self._newest) < self._kept + SUMMED_AT_ONCE:
            return []
        due, self._newest = self._newest[:SUMMED_AT_ONCE], self._newest[SUMMED_AT_ONCE:]
        self._summed += len(due)
        self._older = self._with_older(due)
        return [] if self._older is None else [self._older]

    def take_back(self, tokens: int) -> None:
        """Forget the newest tokens' shares."""
        del self._newest[max(len(self._newest) - tokens, 0) :]

    @property
    def newest(self) -> mx.array | None:
        """The newest token's shares `[B, H]` float32; None before the first token."""
        return self._of(self._newest[-1:]) if self._newest else None

    @property
    def mean(self) -> mx.array | None:
        """The mean over the answer's tokens, `[B, H]` float32; None before the first."""
        tokens = self._summed + len(self._newest)
        if not tokens:
            return None
        total = self._with_older(self._newest)
        return mx.zeros(self._shape) if total is None else total / tokens

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate with a step that went op by op."""
        newest = self._newest[-1] if self._newest else None
        return [] if newest is None else list(newest.numbers)

    def _of(self, listed: Sequence[Share | None]) -> mx.array:
        total = self._sum(listed)
        return mx.zeros(self._shape) if total is None else total

    def _with_older(self, listed: Sequence[Share | None]) -> mx.array | None:
        parts = [part for part in (self._older, self._sum(listed)) if part is not None]
        return parts[0] + parts[1] if len(parts) == 2 else (parts[0] if parts else None)

    def _sum(self, listed: Sequence[Share | None]) -> mx.array | None:
        """The sum of some tokens' shares `[B, H]`, or None if all of them are 0."""
        heads, ready, pairs = self._shape[1], list[mx.array](), list[list[mx.array]]()
        for share in listed:
            if share is None:
                continue
            at = share.sequence
            numbers = [x if at is None else x[at : at + 1] for x in share.numbers]
            if len(numbers) == 1:
                ready.append(numbers[0])
            else:
                pairs.append(numbers)
        if pairs:
            columns, lse = (mx.stack(list(x)).squeeze(-1) for x in zip(*pairs, strict=True))
            ready.append(shares(columns, lse, heads).sum(axis=0))
        if not ready:
            return None
        total: mx.array = ready[0] if len(ready) == 1 else mx.stack(ready).sum(axis=0)
        return total

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares the arrays, which never change."""
        twin = copy.copy(self)
        twin._newest = list(self._newest)
        return twin
