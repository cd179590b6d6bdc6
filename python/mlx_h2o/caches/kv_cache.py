"""The bounded KV cache of one layer, as mlx-lm uses caches: over the core's one call, two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.attention.tracing import refuse_tracing
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings, packing_of
from mlx_h2o.caches.base import NOT_ASKED, BoundedKVCache
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.engine import eviction, layer_factory
from mlx_h2o.engine.layer import Layer
from mlx_h2o.engine.step import update_and_attend
from mlx_h2o.policies import Policy
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.pins import true_positions
from mlx_h2o.storage.query_centres import QueryCentres
from mlx_h2o.storage.remainder import SATURATION
from mlx_h2o.storage.softmax import Mask


class H2OKVCache(BoundedKVCache, kind=""):
    """A KV cache that holds a fixed number of tokens and chooses which.

    While decoding, the new row overwrites the slot of the token that the policy chose to forget,
    and that token's row is folded into the remainder. A prompt chunk is attended together with the
    kept slots and then reduced to the budget with one gather. It stands where mlx-lm's `KVCache`
    stands (`update_and_fetch`, `make_mask`, `state`, ...); attention reaches `attend` through
    `mlx_h2o.integration.routing`.

    Models whose attention is another have classes of their own, which `make_prompt_cache` chooses:
    `PlainRowsKVCache` (they attend by themselves; `attending=False` makes one too) and
    `LatentKVCache` (they attend to keys made of the cached ones).

    Args:
        max_size: Slots per KV head on average; the remainder is charged against it.
        max_bytes: Instead: bytes that this layer's cache may take, everything counted.
        policy: A policy or its name.
        remainder: Whether evicted tokens go on answering.
        budgets: Instead of max_size: the slots of each KV head.
        attending: Whether this library computes the attention. False for models that attend by
            themselves: then the policy may look at keys only, all heads of all layers must have one
            budget, and the remainder goes in as plain rows.
        bits: Store keys and values packed in so many bits, in the format of `mx.quantize`; a row
            is packed once, when it comes, and moved as it is from then on.
        k_bits: Of keys alone, instead of `bits`.
        v_bits: Of values alone, instead of `bits`.
        group_size: Elements that share a scale and a bias.
        recent_bits: Store the newest tokens, as many as every head of the layer protects, in so
            many bits instead; 16: in the model's own dtype. `storage/recent_window.py` says what
            becomes of a token that is recent no longer.
        undo: How many of the last tokens can be taken back after evictions (`storage/journal.py`):
            speculative decoding needs as many as it drafts at once. Chunks of at most `undo` + 1
            tokens are then taken token by token. It costs memory.
        saturation: t of the remainder's second-order term (`storage/remainder.py`), for all KV
            heads or for each; 0 is first order.
        frame: In which packed keys are stored (`storage/key_scaling.py`), or None: as they come.
        centres: Of the layer's queries, for policies that use them (`storage/query_centres.py`).

    Raises:
        ValueError: No or several sizes, an unknown policy, a budget without room to evict, or an
            undo that is negative or not this model's to have.
    """

    def __new__(cls, *args: Any, attending: bool = True, **kwargs: Any) -> Any:
        if attending:
            return object.__new__(cls)
        kind = cls.kinds["plain rows"]
        if not issubclass(kind, cls):
            raise ValueError(f"{cls.__name__} attends: attending=False is for {kind.__name__}.")
        return object.__new__(kind)

    def __init__(
        self,
        max_size: int | None = None,
        *,
        max_bytes: int | None = None,
        policy: str | Policy = "distinct",
        remainder: bool = True,
        budgets: Sequence[int] | None = None,
        attending: bool = True,
        bits: int | None = None,
        k_bits: int | None = None,
        v_bits: int | None = None,
        group_size: int = 64,
        recent_bits: int | None = None,
        undo: int = 0,
        saturation: float | Sequence[float] = SATURATION,
        frame: Frame | None = None,
        centres: QueryCentres | None = None,
    ):
        # Budgets are checked now unless they depend on the model's widths.
        settings = CacheSettings(
            max_size,
            max_bytes,
            budgets,  # type: ignore[arg-type]  # made a tuple there, and a policy the next
            policy,  # type: ignore[arg-type]
            remainder,
            packing_of(bits, k_bits, v_bits, group_size, recent_bits),
            attending,
            undo,
            saturation,  # type: ignore[arg-type]  # likewise
            frame,
            centres=centres,
        )
        self._begin(settings)

    def _begin(self, settings: CacheSettings, share: LayerShare | None = None) -> None:
        super()._begin(settings, share)
        # Rows that came and were not attended to yet.
        self._handed: tuple[mx.array, mx.array] | None = None

    @property
    def _between(self) -> bool:
        return self._handed is not None

    # -- mlx-lm's cache protocol ------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The next logical position."""
        waiting = self._handed[0].shape[2] if self._handed is not None else 0
        return super().offset + waiting

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Hold new rows until `attend` comes with their queries.

        Args:
            keys: `[B, Hk, L, D]` with RoPE applied at `offset`.
            values: `[B, Hk, L, Dv]`.

        Returns:
            The same rows: what they attend to beside them is the cache's to know.

        Raises:
            RuntimeError: Within mx.compile, mx.grad or mx.vmap, or the last rows were never
                attended to.
            ValueError: The rows are unlike those held, or the size does not suit them.
        """
        self._opened(keys, values)
        self._handed = keys, values
        return self._handed

    def attend(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Mask = None,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
    ) -> mx.array:
        """Attend to the rows held and those of `update_and_fetch`, then choose what to forget.

        Args:
            q: `[B, Hq, L, D]`.
            keys: What `update_and_fetch` returned.
            values: Likewise.
            scale: Factor on q.k.
            mask: None, "causal" or an array, of which only the last L columns are read, since kept
                slots are always visible.
            sinks: Attention-sink logits `[Hq]`.
            softcap: c of logits capped softly, or 0 (`AttentionCall`).

        Returns:
            `[B, Hq, L, Dv]`.

        Raises:
            RuntimeError: Within mx.compile, mx.grad or mx.vmap; nothing is there to attend to; or
                other keys came than were handed out.
        """
        refuse_tracing()
        layer, (k, v) = self._taken_from_hand()
        if keys is not k or values is not v:
            raise RuntimeError(
                "This model attends to keys derived from the cached ones: it needs "
                'budgets="uniform", remainder=False, no bits and no undo, in a cache of another '
                "kind, which mlx_h2o.make_prompt_cache chooses."
            )
        return update_and_attend(layer, AttentionCall(q, scale, mask, sinks, softcap), k, v)

    def hold(
        self, keys: mx.array, values: mx.array, worths: mx.array, rates: mx.array, room: int = 0
    ) -> None:
        """Take a whole prompt's rows, and keep those that are worth most of each head.

        What a compressor does that read the prompt elsewhere: nothing attends here.

        Args:
            keys: `[B, Hk, T, D]` with RoPE applied at 0 to T - 1.
            values: `[B, Hk, T, Dv]`.
            worths: What each row is worth, `[B, Hk, T]`.
            rates: The attention mass per step that each has received, `[B, Hk, T]`: where scores
                of policies that look at attention begin.
            room: Slots of each head's budget that stay free for tokens to come.

        Raises:
            ValueError: This cache holds something already, or the rows do not suit it.
        """
        if self.offset:
            raise ValueError("This cache holds something already: make a new one.")
        if self._unopened.rope is not None:
            raise ValueError("Rows of a prompt lie where they were read: omit positions.")
        layer = self._opened(keys, values)
        if layer.window is not None:
            raise ValueError("The newest tokens have a width of their own: omit recent_bits.")
        if layer.settings.frame is not None:
            keys = layer.settings.frame.enter(keys)
        attended, of_heads = layer.take_in(keys, values), []
        for run, fields in zip(layer.runs, attended, strict=True):
            if "scores" in fields:
                ages = layer.offset - true_positions(fields["positions"]).astype(mx.float32)
                rate = rates[:, run.first : run.last]
                fields["scores"] = rate * ages if layer.policy.sums_mass else rate
            of_heads.append(worths[:, run.first : run.last])
        eviction.hold_best(layer, attended, of_heads, room)
        mx.eval(self.arrays())

    def _opened(self, keys: mx.array, values: mx.array) -> Layer:
        """The layer, made when the first rows tell the widths; it holds rows like these."""
        refuse_tracing()
        if self._between:
            raise RuntimeError(NOT_ASKED)
        if self._layer is None:
            self._layer, share = layer_factory.open_layer(self._unopened, keys, values)
            self.share = self.share or share
        self._layer.check_rows(keys, values)
        return self._layer

    def _taken_from_hand(self) -> tuple[Layer, tuple[mx.array, mx.array]]:
        """The layer, and what was handed out last."""
        handed, self._handed = self._handed, None
        if handed is None or self._layer is None:
            raise RuntimeError("attend() before update_and_fetch(): there is nothing to attend to.")
        return self._layer, handed

    @classmethod
    def merge(cls, caches: Sequence[H2OKVCache]) -> BatchH2OKVCache:
        """A batch of copies of these caches, by which mlx-lm decodes them side by side.

        Raises:
            ValueError: One is another kind of cache, or holds several sequences.
        """
        return BatchH2OKVCache.merge(caches)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask that mlx-lm asks for before N new tokens.

        Returns:
            None or "causal", or a boolean array `[N, kept + N]` if asked.

        Raises:
            ValueError: A sliding window is asked for.
        """
        if window_size is not None:
            raise ValueError(
                "This model masks a sliding window over a full cache, which a bounded cache cannot "
                "serve: leave that layer's own cache in place."
            )
        if N == 1:
            return None
        if return_array:
            kept = self.size()
            return mx.arange(kept + N) <= mx.arange(kept, kept + N)[:, None]
        return "causal"
