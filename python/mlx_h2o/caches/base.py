"""The base of every bounded cache: settings, size, trimming, saving, pins, turns and copies.

A copy shares every array with its original until one of the two changes its own. MLX's arrays never
change, except those that decoders have taken out of its graph, and a decoder copies an array that
anyone else still holds (`Memory.lent`).
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import mlx.core as mx

from mlx_h2o import _checks
from mlx_h2o.attention.backends.choice import pack
from mlx_h2o.attention.call import AttentionCall, Looking
from mlx_h2o.attention.tracing import REFUSED, tracing
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings, packing_of
from mlx_h2o.layer import eviction, layer_factory, saved_state
from mlx_h2o.layer.layer import Layer
from mlx_h2o.layer.pins_and_turns import PinAnswer, answer_of, checked_carry, new_turn, repin
from mlx_h2o.layer.policy_view import slots_of
from mlx_h2o.policies import Policy, Slots
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import Packing
from mlx_h2o.slots.pins import Span, checked_spans, joined, without
from mlx_h2o.slots.remainder import SATURATION, Remainder
from mlx_h2o.slots.slot_store import Run, SlotStore
from mlx_h2o.spill.setting import Spill, spill_setting

if TYPE_CHECKING:
    from mlx_h2o.layer.return_state import ReturnState
    from mlx_h2o.spill.layer_rows import LayerRows

NOT_ASKED = (
    "This model did not ask the cache to attend. Call mlx_h2o.install(), or, for a model that "
    "attends by itself, make a PlainRowsKVCache with a policy that uses keys alone."
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


class PastTraining(UserWarning):
    """A conversation is longer than what its model was trained for."""


def past_training_text(tokens: int, trained: int) -> str:
    """What to say about so many tokens for a model that was trained on fewer."""
    return (
        f"{tokens:,} tokens are more than the {trained:,} that the model was trained for, so "
        'answers may get worse: a conversation that begins with positions="rolling" '
        "(--positions rolling) stays at positions that the model knows."
    )


class BoundedKVCache(Looking):
    """The bounded memory of one layer, with the methods that mlx-lm needs of a cache.

    Subclasses define how rows come in and how queries attend to them.

    Args:
        max_size: Slots per KV head on average; the remainder is charged against it.
        max_bytes: Bytes that this layer's cache may take, everything counted, instead of max_size.
        policy: A policy or its name.
        remainder: Whether evicted tokens keep contributing through the remainder.
        budgets: The slots of each KV head, instead of max_size.
        bits: Bits of packed keys and values, in the format of `mx.quantize`; a row is packed once,
            when it comes, and moved as it is from then on. None for dense rows.
        k_bits: Bits of keys, instead of `bits`.
        v_bits: Bits of values, instead of `bits`.
        group_size: Elements that share a scale and a bias.
        recent_bits: Bits of the newest tokens, as many as every head of the layer protects; 16 is
            the model's own dtype. `slots/recent_window.py` describes how a token leaves the
            window.
        undo: How many of the last tokens can be taken back after evictions (`slots/journal.py`):
            speculative decoding needs as many as it drafts at once. Chunks of at most `undo` + 1
            tokens are then processed token by token. It costs memory.
        saturation: t of the remainder's second-order term (`slots/remainder.py`), for all KV
            heads or for each; 0 is first order.
        frame: The key scaling (`Frame`, `slots/key_scaling.py`) of packed keys, or None.
        spill: A folder for a file of all rows (`spill/`), "auto", a `Spill`, or None.

    Raises:
        ValueError: No or several sizes, an unknown policy, a budget without room to evict, or an
            undo that is negative or that this model cannot have.
    """

    traceable = False
    #: The value of "own" in a file. True: queries attend to the cached rows (known once rows came);
    #: False: to keys derived from them; None: the model computes attention itself.
    own: ClassVar[bool | None] = True
    #: Whether several layers attend to the rows in each step.
    is_shared: ClassVar[bool] = False
    #: Whether evicted rows can come back from a file: queries attend to the cached rows alone.
    rows_return: ClassVar[bool] = False
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
        spill: str | Path | Spill | None = None,
    ):
        # Budgets are checked now unless they depend on the model's widths.
        settings = CacheSettings(
            max_size,
            max_bytes,
            budgets,  # type: ignore[arg-type]  # converted there, as is the next
            policy,  # type: ignore[arg-type]
            remainder,
            packing_of(bits, k_bits, v_bits, group_size, recent_bits),
            self.attending,
            undo,
            saturation,  # type: ignore[arg-type]  # converted there
            frame,
        )
        where = spill_setting(spill)
        self._begin(settings)
        if where is not None:
            from mlx_h2o.spill.layer_rows import spilling

            self.spill_to(spilling(where, [(self.packing, self.frame)], pack)[0])

    @classmethod
    def of(cls, settings: CacheSettings, share: LayerShare | None = None) -> Self:
        """A cache of this class with these settings.

        Args:
            settings: Settings that are checked already.
            share: The cache's share of its model's budget.
        """
        cache = object.__new__(cls)
        cache._begin(settings, share)
        return cache

    def _begin(self, settings: CacheSettings, share: LayerShare | None = None) -> None:
        self._unopened = settings
        self._layer: Layer | None = None
        #: The way of its rows into a file, or None. Files of prompt caches do not hold it.
        self.spill: LayerRows | None = None
        #: What is kept so that evicted rows come back from the file, or None.
        self.back: ReturnState | None = None
        #: The cache's share of its model's budget, for `mlx_h2o.resize`; if the cache was made
        #: alone, it is known from the first rows on.
        self.share = share
        #: The tokens to which "25%" refers, of a cache made for a model; files do not hold it.
        self.context: int | None = None
        #: The tokens on which the model was trained, in the one cache of a model that warns where a
        #: conversation is longer; else 0. Files do not hold it.
        self.trained = 0
        self._warned = False
        self.choice = ""  # how the bits of its rows were chosen; files do not hold it
        self.label = ""  # its owner's name for its settings; copies keep it, files do not

    def __repr__(self) -> str:
        name = self.policy.name or type(self.policy).__name__
        rest = " in a frame" * bool(self.frame) + ", no remainder" * (not self.answers)
        what = f"{type(self).__name__}: {name}, {self.settings.size}{self.packing}{rest}"
        return f"<{what}; {self.size()} of {self.offset} tokens in {self.nbytes:,} bytes>"

    # -- properties -------------------------------------------------------------------------------

    @property
    def settings(self) -> CacheSettings:
        """The cache's settings; from the first rows on with budgets of its heads."""
        return self._layer.settings if self._layer else self._unopened

    @property
    def policy(self) -> Policy:
        """The eviction policy."""
        return self._unopened.policy

    @property
    def packing(self) -> Packing:
        """How rows are stored."""
        return self._unopened.packing

    @property
    def answers(self) -> bool:
        """Whether evicted tokens keep contributing through the remainder."""
        return self._unopened.remainder

    @property
    def undo(self) -> int:
        """How many of the last tokens can be taken back after evictions."""
        return self._unopened.undo

    @property
    def frame(self) -> Frame | None:
        """The key scaling (`Frame`) of packed keys, or None."""
        return self._unopened.frame

    @property
    def budgets(self) -> list[int] | None:
        """Slots of each KV head, once they are known."""
        budgets = self.settings.budgets
        return None if budgets is None else list(budgets)

    @property
    def layer(self) -> Layer | None:
        """The layer's memory, once rows have come."""
        return self._layer

    @property
    def store(self) -> SlotStore | None:
        """The layer's slots, once the first rows have come."""
        return self._layer.store if self._layer else None

    @property
    def remainder(self) -> Remainder | None:
        """The statistics of evicted tokens."""
        return self._layer.remainder if self._layer else None

    def slots(self, run: Run) -> Slots:
        """The slots of a run of `store.runs`, as its policy sees them."""
        self.require_at_rest()
        layer = self._require_layer()
        return slots_of(layer, run, layer.store.views(run), layer.lost(run))

    def budget_of(self, run: Run) -> int:
        """Tokens that each head of a run may hold, including the newest."""
        return self._require_layer().budget_of(run)

    def _require_layer(self) -> Layer:
        if self._layer is None:
            raise RuntimeError("This cache holds nothing yet.")
        return self._layer

    def spill_to(self, spill: LayerRows, heads: frozenset[int] | None = None) -> None:
        """Write every row that comes from now on to a file, too, from which evicted ones come back.

        Args:
            spill: The way into the file.
            heads: The KV heads to which evicted rows come back; None means all.
        """
        from mlx_h2o.layer.return_state import ReturnState

        self.spill = spill
        if self.rows_return:
            self.back = ReturnState(spill.conversation.spill.returns, heads)
        if self._layer is not None:
            self._layer.spill, self._layer.back = self.spill, self.back

    # -- new rows and attention -------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new rows, and return the rows that the model continues with, as each class defines.

        Args:
            keys: `[B, Hk, L, D]`, with RoPE applied at `offset`.
            values: `[B, Hk, L, Dv]`.

        Raises:
            RuntimeError: Within mx.compile, mx.grad or mx.vmap, or the last rows were never
                attended to.
            ValueError: The rows differ from those held in type, or the size does not suit them.
        """
        raise NotImplementedError

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to the rows held, then choose the tokens to evict; as in `Looking`."""
        raise RuntimeError(f"A {type(self).__name__} is for a model that attends by itself.")

    # -- mlx-lm's cache protocol ------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """The next logical position."""
        return self._layer.offset if self._layer else 0

    def size(self) -> int:
        """Tokens held by the head that holds the most."""
        return self._layer.length if self._layer else 0

    def empty(self) -> bool:
        """Whether no rows have come yet."""
        return self._layer is None

    @property
    def to_quantized(self) -> None:
        """Refuse, where mlx-lm first calls it: at the first step with `kv_bits`."""
        raise ValueError(NO_KV_BITS)

    @property
    def nbytes(self) -> int:
        """Bytes of everything held: rows, remainder, key scaling, journal."""
        frame = self.frame.nbytes if self.frame is not None else 0
        return frame + (self._layer.nbytes if self._layer else 0)

    @property
    def evicted(self) -> int:
        """Tokens evicted so far, mean over KV heads (rounded down)."""
        if self._layer is None:
            return 0
        runs = self._layer.runs
        return sum(run.heads * self._layer.lost(run) for run in runs) // runs[-1].last

    def is_trimmable(self) -> bool:
        """Whether any token can be taken back: none was evicted, or `undo` kept steps."""
        return self.offset == 0 or self.trimmable > 0

    @property
    def trimmable(self) -> int:
        """How many of the newest tokens `trim` can take back now."""
        return self._layer.trimmable if self._layer else 0

    def trim(self, n: int) -> int:
        """Take back the newest n tokens (all, if there are fewer).

        Steps within `undo` are undone without a trace. Older tokens can go only if nothing was
        evicted; their attention stays in the scores.

        Returns:
            The number of tokens taken back.

        Raises:
            ValueError: Tokens were evicted, and so many steps cannot be undone; nothing was
                changed.
        """
        n = min(n, self.offset)
        if n <= 0:
            if self._layer is not None:
                self._layer.journal.settle()  # every draft was accepted
            return 0
        self.require_trimmable(n)
        self._require_layer().trim(n)
        self._evaluate()
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
        """Change this layer's budget; tokens that no longer fit go into the remainder.

        Args:
            max_size: Slots for every KV head, or a list with each head's. The remainder is not
                charged again.

        Raises:
            ValueError: The slots are not whole numbers, too small, or not one for each head.
        """
        self.follow(self.resized_settings(max_size))

    def follow(self, settings: CacheSettings) -> None:
        """Apply other settings of this cache, from `resized_settings`."""
        self.require_at_rest()
        if self._layer is None:
            self._unopened = settings
        else:
            eviction.resize(self._layer, settings)
            self._evaluate()

    def resized_settings(self, max_size: int | Sequence[int]) -> CacheSettings:
        """The settings that `resize` would set; same arguments and errors."""
        self.require_at_rest()
        counts = self._unopened.checked_budgets("max_size", max_size)
        heads = self._layer.runs[-1].last if self._layer else 1
        budgets = counts if _checks.is_list(max_size) else counts * heads
        if self._layer and len(budgets) != heads:
            raise ValueError(
                f"Give one budget for each of {heads} KV heads; got {len(budgets)}: "
                f"{list(budgets)}."
            )
        if self.packing.recent is not None:
            eviction.recent_size(self._unopened, budgets)
        alike = self._layer is None and not _checks.is_list(max_size)
        return self.settings.resized(budgets, alike)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask that mlx-lm asks for before N new tokens.

        Args:
            N: New tokens.
            return_array: Whether to return an array instead of "causal".
            window_size: The size of a sliding window, which bounded caches refuse.

        Returns:
            None or "causal", or a boolean array `[N, keys]` if asked, for the keys that
            `update_and_fetch` returns.

        Raises:
            ValueError: A sliding window is requested.
        """
        if window_size is not None:
            raise ValueError(
                "This model masks a sliding window over a full cache, which a bounded cache cannot "
                "serve: leave that layer's own cache in place."
            )
        if N == 1:
            return None
        if return_array:
            # Models cut it to the keys that they get: all rows, or the new ones alone.
            length = 0 if self.own else self.size()
            return mx.arange(length + N) <= mx.arange(length, length + N)[:, None]
        return "causal"

    def _opened(self, keys: mx.array, values: mx.array) -> Layer:
        """The layer, created by the first rows; these rows must be of its type."""
        if tracing():
            raise RuntimeError(REFUSED)
        if self._between:
            raise RuntimeError(NOT_ASKED)
        if self.spill is not None:
            self.spill.step_begins()
        if self._layer is None:
            self._layer, share = layer_factory.open_layer(self._unopened, keys, values)
            self._layer.spill, self._layer.back = self.spill, self.back
            self.share = self.share or share
        self._layer.check_rows(keys, values)
        if self.trained and not self._warned and self.offset + keys.shape[2] > self.trained:
            self._warned = True
            text = past_training_text(self.offset + keys.shape[2], self.trained)
            warnings.warn(text, PastTraining, stacklevel=2)
        return self._layer

    # -- saving -----------------------------------------------------------------------------------

    def arrays(self) -> dict[str, mx.array]:
        """Every array held, by name; RuntimeError within a step."""
        self.require_at_rest()
        frame = saved_state.frame_arrays(self.frame)
        return frame | (self._layer.arrays() if self._layer else {})

    def config(self) -> dict[str, Any]:
        """The rest of the state as JSON types; RuntimeError within a step."""
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
            ValueError: The state is not one from `state`, or of another class.
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
        settings, share = saved_state.settings_of(config, frame)
        cache = cls.of(settings, share)
        cache.sharers = saved_state.sharers_of(config)
        if config["runs"]:
            cache._layer, cache.share = layer_factory.restored(settings, share, config, arrays)
        return cache

    @classmethod
    def is_described_by(cls, config: dict[str, Any]) -> bool:
        """Whether a configuration is of this class (`own` is null before the first rows)."""
        several = saved_state.sharers_of(config) > 1
        own = None if not config["attending"] else config["own"] is not False
        return own is cls.own and several == cls.is_shared

    @property
    def meta_state(self) -> str:
        """Unused state, for mlx-lm before 0.32.1."""
        return ""

    @property
    def _between(self) -> bool:
        """Whether rows came to which no query has attended yet."""
        return False

    def require_at_rest(self) -> None:
        """Raise RuntimeError unless queries have attended to every row that came."""
        if self._between:
            raise RuntimeError(IN_A_STEP if self._require_layer().offset else NOT_ASKED)

    @property
    def pins(self) -> tuple[Span, ...]:
        """Spans of positions whose tokens are never evicted."""
        return self.settings.pins

    def pin(self, spans: Sequence[Span]) -> PinAnswer:
        """Never evict the tokens at some positions, whatever the policy.

        Tokens that are held can be pinned, and tokens still to come. Pins count against the budget.
        A head that is too small for them gets slots of the layer's larger heads. Pins stay with
        their positions through resizing, trimming, copies and files. Earlier steps can no longer be
        taken back.

        Args:
            spans: Pairs (first position, one past the last).

        Returns:
            Which positions are pinned, and which were evicted already.

        Raises:
            ValueError: They are not spans, or too many for the budget; nothing was changed.
            RuntimeError: The last rows were not attended to yet.
        """
        settings, answer = self.pinned_settings(spans)
        self.pin_as(settings)
        return answer

    def unpin(self, spans: Sequence[Span] | None = None) -> None:
        """Allow pinned tokens to be evicted; all of them without `spans`."""
        pins = () if spans is None else without(self.pins, checked_spans("spans", spans))
        self.pin_as(replace(self.settings, pins=pins))

    def pinned_settings(self, spans: Sequence[Span]) -> tuple[CacheSettings, PinAnswer]:
        """The settings that `pin` would set and its result; same arguments and errors."""
        pins, answer = self.pins_beside(spans)
        return replace(self.settings, pins=pins), answer

    def pins_beside(self, spans: Sequence[Span]) -> tuple[tuple[Span, ...], PinAnswer]:
        """The pins that there would be after `pin`, whether or not there is room, and its result.

        Args:
            spans: As in `pin`.

        Raises:
            ValueError: They are not spans.
            RuntimeError: The last rows were not attended to yet.
        """
        self.require_at_rest()
        spans = checked_spans("spans", spans)
        answer = PinAnswer(spans) if self._layer is None else answer_of(self._layer, spans)
        return joined((*self.pins, *answer.pinned, *answer.partly)), answer

    def pin_as(self, settings: CacheSettings) -> None:
        """Apply the pins, and the budgets with room for them, of other settings of this cache."""
        self.require_at_rest()
        if self._layer is None:
            self._unopened = settings
        else:
            repin(self._layer, settings)
            self._evaluate()

    def new_turn(self, carry: float | str = 1.0) -> None:
        """Begin a turn, and set how much of the attention so far still counts.

        Args:
            carry: 1: all of it, as without this call. Less: scores cover the last `carry` times as
                many steps as before. 0 or "reset": none. Details are in `layer/pins_and_turns.py`.

        Raises:
            ValueError: It is not a number from 0 to 1, nor "reset".
            RuntimeError: The last rows were not attended to yet.
        """
        part = checked_carry(carry)
        self.require_at_rest()
        if self._layer is not None:
            new_turn(self._layer, part)
            self._evaluate()

    def _evaluate(self) -> None:
        """Leave nothing lazy: the next call may come in another thread than the last one."""
        if self._layer is None or self._layer.decoder is None:  # else steps were undone in place
            mx.eval(self.arrays())

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy."""
        self.require_at_rest()
        return vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy that shares every array until one of the two changes it."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        state = self.__getstate__()
        # Besides arrays a copy shares settings that never change.
        shared: list[Any] = [self._unopened, self.share]
        if self.layer is not None:
            shared += [self.layer.settings, *_arrays(self.layer)]
        memo.update((id(value), value) for value in shared)
        vars(new).update(copy.deepcopy(state, memo))
        self._evaluate()
        return new

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # two caches with one store would overwrite each other's slots

    def pieces(self) -> dict[int, int]:
        """The bytes of `nbytes`, by an identity that copies share while they hold the same arrays.

        A union over several caches counts shared arrays once.
        """
        frame = {id(self.frame): self.frame.nbytes} if self.frame is not None else {}
        return frame | (_pieces(self.layer) if self.layer else {})


def _arrays(layer: Layer) -> list[mx.array]:
    """All arrays of a layer, with those of the journal."""
    remainder = layer.remainder.arrays.values()
    return [*layer.arrays().values(), *remainder, *_undone(layer)]


def _pieces(layer: Layer) -> dict[int, int]:
    """Bytes of all that a layer holds, by identity."""
    if layer.decoder is not None:  # its arrays are not shared
        own = layer.array_bytes
        return {id(layer.decoder): own, id(layer.journal): layer.journal_bytes}
    pieces = {id(array): array.nbytes for array in (*layer.arrays().values(), *_undone(layer))}
    return pieces | {id(a): layer.store.nbytes_of(n) for n, a in layer.store.fields.items()}


def _undone(layer: Layer) -> list[mx.array]:
    return [array for step in layer.journal.steps for array in step.arrays.values()]
