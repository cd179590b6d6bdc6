"""A batch of conversations: mlx-lm's batching interface over one bounded cache for each of them.

Sequences share only the call: each has its own slots, positions, scores and victims, so a sequence
that joins, leaves or is padded changes nothing for the others, and each may have another budget,
policy or packing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import mlx.core as mx

from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.caches.base import NO_KV_BITS, NOT_ASKED, BoundedKVCache
from mlx_h2o.layer.step import decode_together
from mlx_h2o.slots.softmax import Mask


class BatchH2OKVCache(Looking):
    """The caches of B sequences in one layer, in place of mlx-lm's `BatchKVCache`.

    `H2OKVCache.merge` makes it, as mlx-lm's `BatchGenerator` and server do. Rows come for all
    sequences at once; each sequence's own rows go to its own cache, and padding is dropped.

    Args:
        caches: An `H2OKVCache` of one sequence for each; from now on the batch owns them.

    Raises:
        ValueError: One is not such a cache, or holds several sequences.
    """

    traceable = False

    def __init__(self, caches: Sequence[BoundedKVCache]):
        for cache in caches:
            _require_one_sequence(cache)
        self.caches: list[Any] = list(caches)
        # For each sequence, rows of padding before its own, and its own rows before padding (None:
        # no padding follows).
        self._before = [0] * len(caches)
        self._due: list[int | None] = [None] * len(caches)
        # Rows that came and were not attended to yet.
        self._handed: tuple[mx.array, mx.array] | None = None

    @classmethod
    def merge(cls, caches: Sequence[BoundedKVCache]) -> BatchH2OKVCache:
        """A batch of copies of these caches, which stay as they are.

        Raises:
            ValueError: As for the class.
        """
        return cls([_going_on(cache) for cache in caches])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.caches)}: {', '.join(map(repr, self.caches))}>"

    # -- joining and leaving ----------------------------------------------------------------------

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep the sequences at these indices, in this order."""
        self.require_at_rest()
        listed: Any = (
            batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        )
        members: list[int] = list(listed)
        self.caches = [self.caches[i] for i in members]
        self._before = [self._before[i] for i in members]
        self._due = [self._due[i] for i in members]

    def extend(self, other: BatchH2OKVCache) -> None:
        """Add another batch's sequences after these.

        Raises:
            ValueError: `other` is another kind of cache.
        """
        if not isinstance(other, BatchH2OKVCache):
            raise ValueError(
                f"A batch of bounded caches cannot take in a {type(other).__name__}: make all of "
                "its caches with mlx_h2o.make_prompt_cache, or all after mlx_h2o.install(...)."
            )
        self.require_at_rest()
        self.caches += other.caches
        self._before += other._before
        self._due += other._due

    def extract(self, idx: int) -> BoundedKVCache:
        """A copy of one sequence's cache; both share memory until one of them changes."""
        self.require_at_rest()
        return _going_on(self.caches[idx])

    # -- padding ----------------------------------------------------------------------------------

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Set which of the next rows are padding.

        Args:
            left_padding: For each sequence, rows of padding before its own.
            lengths: For each sequence, the number of its own rows, with `right_padding`.
            right_padding: For each sequence, rows of padding after its own; `finalize` ends it.

        Raises:
            ValueError: Left padding for a sequence that holds tokens, or right padding without
                lengths.
            RuntimeError: The last rows were not attended to yet.
        """
        self.require_at_rest()
        if left_padding is not None:
            for cache, rows in zip(self.caches, left_padding, strict=True):
                if rows and not cache.empty():
                    raise ValueError("Left padding can only come before a sequence's first token.")
            sums = zip(self._before, left_padding, strict=True)
            self._before = [length + int(rows) for length, rows in sums]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right_padding needs lengths: the sequences' own rows.")
            self._due = [int(rows) for rows in lengths]
            if len(self._due) != len(self.caches):
                raise ValueError(
                    f"{len(self._due)} lengths were given for {len(self.caches)} sequences."
                )

    def finalize(self) -> None:
        """End right padding."""
        self.require_at_rest()
        self._due = [None] * len(self.caches)

    def _own_rows(self, length: int) -> Iterator[slice]:
        """The range of each sequence's own rows among the next `length` rows."""
        for before, due in zip(self._before, self._due, strict=True):
            first = min(before, length)
            yield slice(first, length if due is None else min(first + due, length))

    # -- mlx-lm's cache protocol ------------------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """The position of the next row of each sequence, `[B]` int32; negative within padding."""
        waiting = self._handed[0].shape[2] if self._handed is not None else 0
        sequences = zip(self.caches, self._before, strict=True)
        return mx.array([cache.offset - before + waiting for cache, before in sequences])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Hold new rows until `attend` comes with their queries.

        Args:
            keys: `[B, Hk, L, D]` with RoPE applied at each sequence's `offset`.
            values: `[B, Hk, L, Dv]`.

        Returns:
            The same rows.

        Raises:
            RuntimeError: As in `H2OKVCache`.
            ValueError: The number of sequences is not the batch's.
        """
        if self._handed is not None:
            raise RuntimeError(NOT_ASKED)
        if keys.shape[0] != len(self.caches):
            raise ValueError(
                f"Rows of {keys.shape[0]} sequences came for a batch of {len(self.caches)}."
            )
        self._handed = keys, values
        return self._handed

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to each sequence's own rows; padding gets zeros.

        Arguments as in `Looking`; an array mask may have a batch of 1 or B.

        Raises:
            ValueError: The rows differ from those held in type, or the size does not suit them.
        """
        handed, self._handed = self._handed, None
        if handed is None:
            raise RuntimeError("attend() before update_and_fetch(): there is nothing to attend to.")
        if keys is not handed[0] or values is not handed[1]:
            raise RuntimeError("This model attends to keys derived from the cached ones.")
        mask, length = call.mask, call.q.shape[2]
        own = list(self._own_rows(length))
        if length == 1 and mask is None and all(rows.stop > rows.start for rows in own):
            layers = [cache.layer for cache in self.caches]
            opened = [layer for layer in layers if layer is not None]
            if len(opened) == len(layers):
                out = decode_together(opened, call, keys, values)
                if out is not None:
                    self._came(own)
                    return out
        parts = zip(self.caches, own, _each(call.q), _each(keys), _each(values), strict=True)
        outs = []
        for i, (cache, rows, *one) in enumerate(parts):
            mine = call.of_sequence(one[0], _mask_of(mask, i, rows, length))
            outs.append(_attended(cache, rows, mine, *one[1:]))
        self._came(own)
        return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=0)

    def _came(self, own: Sequence[slice]) -> None:
        """Count the new rows, of which `own` are each sequence's own."""
        for i, rows in enumerate(own):
            self._before[i] -= rows.start
            due = self._due[i]
            self._due[i] = None if due is None else due - (rows.stop - rows.start)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """As in `BoundedKVCache`; the batch itself drops padding, not the mask."""
        most: BoundedKVCache = max(self.caches, key=lambda cache: cache.size())
        return most.make_mask(N, return_array, window_size)

    def size(self) -> int:
        """Tokens held by the head that holds the most."""
        return max((cache.size() for cache in self.caches), default=0)

    def empty(self) -> bool:
        """Whether no rows have come yet."""
        return all(cache.empty() for cache in self.caches)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def undo(self) -> int:
        """How many of each sequence's last tokens can be taken back after evictions."""
        return min((cache.undo for cache in self.caches), default=0)

    @property
    def trimmable(self) -> int:
        """How many of the newest tokens `trim` can take back now, from every sequence."""
        return min((cache.trimmable for cache in self.caches), default=0)

    def is_trimmable(self) -> bool:
        """Whether any token can be taken back from every sequence."""
        return all(cache.is_trimmable() for cache in self.caches)

    def require_trimmable(self, n: int) -> None:
        """Raise ValueError unless `trim` can take n tokens back from every sequence."""
        self.require_at_rest()
        for cache in self.caches:
            cache.require_trimmable(n)

    def trim(self, n: int) -> int:
        """Take back the newest n tokens from every sequence, or from none.

        Returns:
            The number of tokens taken back from the sequence that lost most.

        Raises:
            ValueError: So many cannot be undone; nothing was changed.
        """
        self.require_trimmable(n)
        return max((cache.trim(n) for cache in self.caches), default=0)

    @property
    def state(self) -> list[Any]:
        """The states of all sequences, for evaluation; files hold sequences one by one."""
        self.require_at_rest()
        return [cache.state for cache in self.caches]

    @property
    def to_quantized(self) -> NoReturn:
        """Refuse, as in `H2OKVCache`."""
        raise ValueError(NO_KV_BITS)

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy."""
        self.require_at_rest()
        return vars(self)

    def require_at_rest(self) -> None:
        """Raise RuntimeError unless queries have attended to every row that came."""
        if self._handed is not None:
            raise RuntimeError(
                "This batch is in the middle of a step: rows came with update_and_fetch and were "
                "not attended to. Let sequences join or leave, and copy or trim them, between two "
                "calls of the model."
            )


def _require_one_sequence(cache: Any) -> None:
    """Raise ValueError unless a cache attends and has at most one sequence."""
    if not isinstance(cache, BoundedKVCache) or not hasattr(cache, "merge"):
        raise ValueError(f"A batch is made of H2OKVCaches; got a {type(cache).__name__}.")
    sequences = 1 if cache.layer is None else cache.layer.types["keys"].batch
    if sequences != 1:
        raise ValueError(
            f"A batch is made of caches of one sequence each; got one of {sequences} sequences."
        )


def _attended(
    cache: Any, rows: slice, call: AttentionCall, keys: mx.array, values: mx.array
) -> mx.array:
    """The attention output of one sequence's own rows, `[1, Hq, L, Dv]`, with zeros for padding.

    Args:
        cache: The sequence's cache.
        rows: The range of its own rows.
        call: Queries of all L rows, with the mask of its own rows.
        keys: `[1, H, L, D]`.
        values: `[1, H, L, Dv]`.
    """
    length = call.q.shape[2]
    if rows.start >= rows.stop:
        return mx.zeros((*call.q.shape[:3], values.shape[3]), call.q.dtype)
    k, v = cache.update_and_fetch(_rows_of(keys, rows), _rows_of(values, rows))
    q = _rows_of(call.q, rows)
    out: mx.array = cache.attend(
        q, k, v, scale=call.scale, mask=call.mask, sinks=call.sinks, softcap=call.softcap
    )
    if out.shape[2] == length:
        return out
    return mx.pad(out, [(0, 0), (0, 0), (rows.start, length - rows.stop), (0, 0)])


def _each(rows: mx.array) -> list[mx.array]:
    """The sequences of `[B, ...]`, `[1, ...]` each."""
    return [rows] if rows.shape[0] == 1 else list(mx.split(rows, rows.shape[0]))


def _rows_of(part: mx.array, rows: slice) -> mx.array:
    """A range of rows of `[1, H, L, ...]`."""
    return part if rows.stop - rows.start == part.shape[2] else part[:, :, rows]


def _mask_of(mask: Mask, sequence: int, rows: slice, length: int) -> Mask:
    """The part of a mask `[B or 1, H or 1, L or 1, N]` for one sequence's own rows."""
    if mask is None or isinstance(mask, str):
        return None if rows.stop - rows.start == 1 else mask  # one query attends to all
    if mask.ndim > 3 and mask.shape[0] > 1:
        mask = mask[sequence : sequence + 1]
    if rows.stop - rows.start == length:
        return mask
    if mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if mask.shape[-1] == 1:
        return mask
    first = mask.shape[-1] - length
    return mask[..., first + rows.start : first + rows.stop]


def _going_on(cache: BoundedKVCache) -> BoundedKVCache:
    """A copy that goes on for its original, in the same file of rows (`spill/layer_rows.py`)."""
    memo: dict[int, Any] = {}
    # Layers are copied one by one, and belong to one conversation. (Other kinds are refused later.)
    if isinstance(cache, BoundedKVCache) and cache.spill is not None:
        memo[id(cache.spill.conversation)] = cache.spill.conversation
    return copy.deepcopy(cache, memo)
