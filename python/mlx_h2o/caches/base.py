"""What every bounded cache has: settings, size, trimming, saving, pins, turns and copies.

A copy shares every array with its original until one of the two changes its own. MLX's arrays never
change, but for those that decoders have taken out of its graph, and a decoder copies what anyone
else still holds (`Memory.lent`).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import mlx.core as mx

from mlx_h2o._utils import checks
from mlx_h2o.attention.tracing import REFUSED, tracing
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings, packing_of
from mlx_h2o.engine import eviction, layer_factory, saved_state
from mlx_h2o.engine.layer import Layer
from mlx_h2o.engine.pins_and_turns import PinAnswer, answer_of, checked_carry, new_turn, repin
from mlx_h2o.engine.policy_view import slots_of
from mlx_h2o.policies import Policy, Slots
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.packed import Packing
from mlx_h2o.storage.pins import Span, checked_spans, joined, without
from mlx_h2o.storage.query_centres import QueryCentres
from mlx_h2o.storage.remainder import SATURATION, Remainder
from mlx_h2o.storage.slot_store import Run, SlotStore
from mlx_h2o.storage.softmax import Mask

NOT_ASKED = (
    "This model did not ask the cache to attend. Call mlx_h2o.install(), or, for a model that "
    "attends by itself, make a PlainRowsKVCache with a policy that looks at keys only."
)
IN_A_STEP = (
    "This cache is in the middle of a step: its last rows were not attended to. Save, copy, trim, "
    "resize, pin or read it between two calls of the model; after a call that failed, go on from a "
    "copy or a file made before it."
)
NO_KV_BITS = (
    "kv_bits cannot pack a bounded cache later on: omit it, and give bits=8 (or k_bits, "
    "v_bits) to make_prompt_cache or install."
)


class BoundedKVCache:
    """The bounded memory of one layer, with what mlx-lm asks of any cache.

    Subclasses say how rows come in and how they are attended to.

    Args:
        max_size: Slots per KV head on average; the remainder is charged against it.
        max_bytes: Instead: bytes that this layer's cache may take, everything counted.
        policy: A policy or its name.
        remainder: Whether evicted tokens go on answering.
        budgets: Instead of max_size: the slots of each KV head.
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

    #: Whether routed attention comes to this cache.
    attending: ClassVar[bool] = True
    #: What a file says of how the model attends: to the cached rows (True, once rows came), to keys
    #: made of them (False) or by itself (None).
    own: ClassVar[bool | None] = True
    #: Whether several layers attend to the rows in each step, and how many do.
    is_shared: ClassVar[bool] = False
    sharers = 1

    def __init__(
        self,
        max_size: int | None = None,
        *,
        max_bytes: int | None = None,
        policy: str | Policy = "distinct",
        remainder: bool = True,
        budgets: Sequence[int] | None = None,
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
            self.attending,
            undo,
            saturation,  # type: ignore[arg-type]  # made a float or a tuple there
            frame,
            centres=centres,
        )
        self._begin(settings)

    @classmethod
    def of(cls, settings: CacheSettings, share: LayerShare | None = None) -> Self:
        """A cache of this class with these settings.

        Args:
            settings: Checked already.
            share: Its part in its model's budget.
        """
        cache = object.__new__(cls)
        cache._begin(settings, share)
        return cache

    def _begin(self, settings: CacheSettings, share: LayerShare | None = None) -> None:
        self._unopened = settings
        self._layer: Layer | None = None
        #: Its part in its model's budget, for `mlx_h2o.resize`; of a cache that was made by itself
        #: it is known from the first rows on.
        self.share = share
        self.choice = ""  # how the bits of its rows were chosen; files do not hold it
        self.label = ""  # what its owner calls its settings; copies keep it, files do not

    def __repr__(self) -> str:
        name = self.policy.name or type(self.policy).__name__
        rest = " in a frame" * bool(self.frame) + ", no remainder" * (not self.answers)
        what = f"{type(self).__name__}: {name}, {self.settings.size}{self.packing}{rest}"
        return f"<{what}; {self.size()} of {self.offset} tokens in {self.nbytes:,} bytes>"

    # -- what it is -------------------------------------------------------------------------------

    @property
    def settings(self) -> CacheSettings:
        """What it may hold, and how; from the first rows on as budgets of its heads."""
        return self._layer.settings if self._layer else self._unopened

    @property
    def policy(self) -> Policy:
        """What chooses."""
        return self._unopened.policy

    @property
    def packing(self) -> Packing:
        """How rows are stored."""
        return self._unopened.packing

    @property
    def answers(self) -> bool:
        """Whether evicted tokens go on answering."""
        return self._unopened.remainder

    @property
    def undo(self) -> int:
        """How many of the last tokens can be taken back after evictions."""
        return self._unopened.undo

    @property
    def frame(self) -> Frame | None:
        """In which packed keys are stored; None: as they come."""
        return self._unopened.frame

    @property
    def centres(self) -> QueryCentres | None:
        """Of the layer's queries, where the policy uses them."""
        return self._unopened.centres

    @property
    def budgets(self) -> list[int] | None:
        """Slots of each KV head, once they are known."""
        budgets = self.settings.budgets
        return None if budgets is None else list(budgets)

    @property
    def layer(self) -> Layer | None:
        """What it holds, once rows have come."""
        return self._layer

    @property
    def store(self) -> SlotStore | None:
        """Where the rows lie, once the first have come."""
        return self._layer.store if self._layer else None

    @property
    def remainder(self) -> Remainder | None:
        """What stays of the evicted."""
        return self._layer.evictions.remainder if self._layer else None

    def slots(self, run: Run) -> Slots:
        """What a run of `store.runs` holds, as its policy sees it."""
        self.require_at_rest()
        layer = self._held()
        return slots_of(layer, run, layer.store.views(run), layer.lost(run))

    def budget_of(self, run: Run) -> int:
        """Tokens that each head of a run may hold, the newest included."""
        return self._held().budget_of(run)

    def _held(self) -> Layer:
        if self._layer is None:
            raise RuntimeError("This cache holds nothing yet.")
        return self._layer

    # -- rows come in, and are attended to --------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take new rows in, and return what the model goes on with, which each class tells.

        Args:
            keys: `[B, Hk, L, D]`, with RoPE applied at `offset`.
            values: `[B, Hk, L, Dv]`.

        Raises:
            RuntimeError: Within mx.compile, mx.grad or mx.vmap, or the last rows were never
                attended to.
            ValueError: The rows are unlike those held, or the size does not suit them.
        """
        raise NotImplementedError

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
        """Attend to the rows held, then choose what to forget.

        Args:
            q: `[B, Hq, L, D]`.
            keys: What `update_and_fetch` returned, or what the model made of it.
            values: The same of the values.
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
        raise RuntimeError(f"A {type(self).__name__} is of a model that attends by itself.")

    # -- mlx-lm's cache protocol ------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The next logical position."""
        return self._layer.offset if self._layer else 0

    def size(self) -> int:
        """Tokens physically held by the head that holds most."""
        return self._layer.held if self._layer else 0

    def empty(self) -> bool:
        """Whether no rows have come yet."""
        return self._layer is None

    @property
    def to_quantized(self) -> None:
        """Refused, where mlx-lm first asks for it: at the first step with `kv_bits`."""
        raise ValueError(NO_KV_BITS)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held: rows and their own, remainder, frame, centres, undo."""
        constants = sum(part.nbytes for part in (self.frame, self.centres) if part is not None)
        return constants + (self._layer.nbytes if self._layer else 0)

    @property
    def evicted(self) -> int:
        """Tokens dropped so far, mean over KV heads (rounded down)."""
        if self._layer is None:
            return 0
        runs = self._layer.runs
        return sum(run.heads * self._layer.lost(run) for run in runs) // runs[-1].last

    def is_trimmable(self) -> bool:
        """Whether any token can be taken back: nothing was evicted, or `undo` remembers steps."""
        return self.offset == 0 or self.trimmable > 0

    @property
    def trimmable(self) -> int:
        """How many of the newest tokens `trim` can take back now."""
        return self._layer.trimmable if self._layer else 0

    def trim(self, n: int) -> int:
        """Take back the newest n tokens (all, if there are fewer).

        Those that were steps within `undo` leave no trace. The attention of older ones, which go
        only where nothing was evicted, stays in the scores.

        Returns:
            How many were taken back.

        Raises:
            ValueError: Something was evicted, and that many steps cannot be undone; nothing was
                changed.
        """
        n = min(n, self.offset)
        if n <= 0:
            if self._layer is not None:
                self._layer.journal.settle()  # every draft was accepted
            return 0
        self.require_trimmable(n)
        self._held().trim(n)
        return n

    def require_trimmable(self, n: int) -> None:
        """Raise ValueError unless `trim` can take n tokens back, RuntimeError within a step."""
        self.require_at_rest()
        n = min(n, self.offset)
        if n > self.trimmable:
            raise ValueError(
                f"Cannot take back {n} tokens: after evictions only the last {self.trimmable} "
                f"steps can be undone (undo={self.undo}). Make the cache with undo={n} or more to "
                "take back as many single-token steps."
            )

    def resize(self, max_size: int | Sequence[int]) -> None:
        """Change this layer's budget; what no longer fits goes into the remainder.

        Args:
            max_size: Slots for every KV head, or a list with each head's. The remainder is not
                charged again.

        Raises:
            ValueError: They are no whole numbers, too small, or not one for each head.
        """
        self.follow(self.resized_settings(max_size))

    def follow(self, settings: CacheSettings) -> None:
        """Hold what other settings of its own (`resized_settings`) allow."""
        self.require_at_rest()
        if self._layer is None:
            self._unopened = settings
        else:
            eviction.resize(self._layer, settings)

    def resized_settings(self, max_size: int | Sequence[int]) -> CacheSettings:
        """What `resize` would set; arguments and errors are its own."""
        self.require_at_rest()
        counts = self._unopened.checked_budgets("max_size", max_size)
        heads = self._layer.runs[-1].last if self._layer else 1
        budgets = counts if checks.is_list(max_size) else counts * heads
        if self._layer and len(budgets) != heads:
            raise ValueError(
                f"Give one budget for each of {heads} KV heads; got {len(budgets)}: "
                f"{list(budgets)}."
            )
        if self.packing.recent is not None:
            eviction.recent_size(self._unopened, budgets)
        alike = self._layer is None and not checks.is_list(max_size)
        return self.settings.resized(budgets, alike)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask that mlx-lm asks for before N new tokens.

        Args:
            N: New tokens.
            return_array: Whether an array is asked for, and not "causal".
            window_size: Of a sliding window, which bounded caches refuse.

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

    def _opened(self, keys: mx.array, values: mx.array) -> Layer:
        """The layer, made when the first rows tell the widths; it holds rows like these."""
        if tracing():
            raise RuntimeError(REFUSED)
        if self._between:
            raise RuntimeError(NOT_ASKED)
        if self._layer is None:
            self._layer, share = layer_factory.open_layer(self._unopened, keys, values)
            self.share = self.share or share
        self._layer.check_rows(keys, values)
        return self._layer

    # -- saving -----------------------------------------------------------------------------------

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name; RuntimeError within a step."""
        self.require_at_rest()
        constants = saved_state.constant_arrays(self.frame, self.centres)
        return constants | (self._layer.arrays() if self._layer else {})

    def config(self) -> dict[str, Any]:
        """Everything else that a copy needs, as JSON types; RuntimeError within a step."""
        self.require_at_rest()
        return {
            **self.settings.config(),
            "own": self.own if self._layer or not self.own else None,
            **layer_factory.config_of(self._layer),
            "share": self.share.config() if self.share else None,
        }

    @property
    def state(self) -> tuple[dict[str, mx.array], str]:
        """Arrays by name, and the configuration as JSON."""
        return self.arrays(), json.dumps(self.config())

    @classmethod
    def from_state(cls, state: tuple[dict[str, mx.array], str], meta_state: Any = None) -> Self:
        """A cache of this class from another's `state`; `kinds.restored` finds the class.

        Args:
            state: Arrays by name, and the configuration as JSON.
            meta_state: Unused; mlx-lm before 0.32.1 passes it.

        Raises:
            ValueError: The state is not one that `state` gave, or of another class.
        """
        try:
            arrays, text = state
            return cls._restored(arrays, json.loads(text))
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"This is no state of an H2OKVCache: {error!r}.") from error

    @classmethod
    def _restored(cls, arrays: dict[str, mx.array], config: dict[str, Any]) -> Self:
        if not cls.is_described_by(config):
            raise ValueError(f"This is the state of another kind of cache than {cls.__name__}.")
        frame, arrays = saved_state.frame_apart(arrays)
        centres, arrays = saved_state.centres_apart(arrays, config)
        settings, share = saved_state.settings_of(config, frame, centres)
        cache = cls.of(settings, share)
        cache.sharers = saved_state.sharers_of(config)
        if config["runs"]:
            cache._layer, cache.share = layer_factory.restored(settings, share, config, arrays)
        return cache

    @classmethod
    def is_described_by(cls, config: dict[str, Any]) -> bool:
        """Whether a configuration is one of this class (`own` is null before the first rows)."""
        several = saved_state.sharers_of(config) > 1
        own = None if not config["attending"] else config["own"] is not False
        return own is cls.own and several == cls.is_shared

    @property
    def meta_state(self) -> str:
        """For mlx-lm before 0.32.1."""
        return ""

    @property
    def _between(self) -> bool:
        """Whether rows came that were not attended to yet."""
        return False

    def require_at_rest(self) -> None:
        """Raise RuntimeError unless every row that came was attended to."""
        if self._between:
            raise RuntimeError(IN_A_STEP if self._held().offset else NOT_ASKED)

    @property
    def pins(self) -> tuple[Span, ...]:
        """Spans of positions whose tokens are never evicted."""
        return (self._layer.settings if self._layer else self._unopened).pins

    def pin(self, spans: Sequence[Span]) -> PinAnswer:
        """Never evict the tokens at some positions, whatever the policy.

        Tokens that are still to come can be pinned, and those that are held. Pins count against the
        budget. A head that is too small for them gets slots of the layer's larger heads. They stay
        with their positions through resizing, trimming, copies and files. Steps before this cannot
        be taken back any more.

        Args:
            spans: Pairs (first position, one past the last).

        Returns:
            Which are pinned, and which were gone already.

        Raises:
            ValueError: They are no spans, or too many for the budget; nothing was changed.
            RuntimeError: The last rows were not attended to yet.
        """
        settings, answer = self.pinned_settings(spans)
        self.pin_as(settings)
        return answer

    def unpin(self, spans: Sequence[Span] | None = None) -> None:
        """Let tokens go as any others; all without `spans`."""
        kept = () if spans is None else without(self.pins, checked_spans("spans", spans))
        self.pin_as(replace(self._layer.settings if self._layer else self._unopened, pins=kept))

    def pinned_settings(self, spans: Sequence[Span]) -> tuple[CacheSettings, PinAnswer]:
        """What `pin` would set and answer; arguments and errors are its own."""
        self.require_at_rest()
        asked = checked_spans("spans", spans)
        if self._layer is None:
            return replace(self._unopened, pins=joined((*self.pins, *asked))), PinAnswer(asked)
        answer = answer_of(self._layer, asked)
        pins = joined((*self.pins, *answer.pinned, *answer.partly))
        return replace(self._layer.settings, pins=pins), answer

    def pin_as(self, settings: CacheSettings) -> None:
        """Have the pins, and the room for them, that other settings of its own have."""
        self.require_at_rest()
        if self._layer is None:
            self._unopened = settings
        else:
            repin(self._layer, settings)

    def new_turn(self, carry: float | str = 1.0) -> None:
        """Say how much of what was attended to before still counts.

        Args:
            carry: 1: all of it, as if nothing had been said. Less: scores speak of the last `carry`
                times as many steps as before. 0 or "reset": of none. `engine/pins_and_turns.py`
                says how.

        Raises:
            ValueError: It is no number from 0 to 1, nor "reset".
            RuntimeError: The last rows were not attended to yet.
        """
        part = checked_carry(carry)
        self.require_at_rest()
        if self._layer is not None:
            new_turn(self._layer, part)

    def __getstate__(self) -> dict[str, Any]:
        """What pickle and copy take along."""
        self.require_at_rest()
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares every array until one of the two changes it."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        state = self.__getstate__()
        # Beside the arrays, settings that never change.
        shared: list[Any] = [self._unopened, self.share]
        if self.layer is not None:
            shared += [self.layer.settings, *_arrays(self.layer)]
        memo.update((id(value), value) for value in shared)
        vars(new).update(copy.deepcopy(state, memo))
        return new

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # two caches over one store would overwrite each other's slots

    def pieces(self) -> dict[int, int]:
        """The bytes of `nbytes`, by an identity that copies share while they hold the same arrays.

        The union over several caches counts what they share once.
        """
        held = [part for part in (self.frame, self.centres) if part is not None]
        constants = {id(part): part.nbytes for part in held}
        return constants | (_pieces(self.layer) if self.layer else {})


def _arrays(layer: Layer) -> list[mx.array]:
    """All arrays of a layer, those of the steps to undo too."""
    remainder = layer.evictions.remainder.arrays.values()
    return [*layer.arrays().values(), *remainder, *_undone(layer)]


def _pieces(layer: Layer) -> dict[int, int]:
    """Bytes of everything that a layer holds, by identity."""
    if (decoder := layer.memory.decoder) is not None:  # whose arrays are its own
        return {id(decoder): decoder.nbytes, id(layer.journal): layer.journal.nbytes}
    return {id(array): array.nbytes for array in (*layer.arrays().values(), *_undone(layer))}


def _undone(layer: Layer) -> list[mx.array]:
    return [array for step in layer.journal.steps for array in step.arrays.values()]
