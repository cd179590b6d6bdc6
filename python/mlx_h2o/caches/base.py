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
from mlx_h2o.budgets.cost import LayerShare
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.engine import eviction, layer_factory, saved_state
from mlx_h2o.engine.layer import Layer
from mlx_h2o.engine.pins_and_turns import PinAnswer, answer_of, checked_carry, new_turn, repin
from mlx_h2o.engine.policy_view import slots_of
from mlx_h2o.policies import Policy, Slots
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.packed import Packing
from mlx_h2o.storage.pins import Span, checked_spans, joined, without
from mlx_h2o.storage.query_centres import QueryCentres
from mlx_h2o.storage.remainder import Remainder
from mlx_h2o.storage.slot_store import Run, SlotStore

NOT_ASKED = (
    "This model did not ask the cache to attend. Call mlx_h2o.install(), or, for a model that "
    "attends by itself, choose a policy that looks at keys only and pass attending=False."
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
    """

    #: Whether routed attention comes to this cache.
    attending: ClassVar[bool] = True
    #: What a file says of how the model attends: to the cached rows (True, once rows came), to keys
    #: made of them (False) or by itself (None).
    own: ClassVar[bool | None] = True
    sharers = 1  #: How many layers attend to the rows in each step.
    #: Classes by what they are for; a subclass enters itself.
    kinds: ClassVar[dict[str, type[BoundedKVCache]]] = {}

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if kind is not None:
            cls.kinds[kind] = cls

    @classmethod
    def of(
        cls, settings: CacheSettings, kind: str = "", share: LayerShare | None = None
    ) -> BoundedKVCache:
        """A cache with these settings.

        Args:
            settings: Checked already.
            kind: "" (attention through this library to the cached rows), or another of `kinds`.
            share: Its part in its model's budget.
        """
        of_kind = cls.kinds[kind]
        cache = object.__new__(cls if issubclass(cls, of_kind) else of_kind)
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
    def from_state(
        cls, state: tuple[dict[str, mx.array], str], meta_state: Any = None
    ) -> BoundedKVCache:
        """A cache from another's `state`; `meta_state` is for mlx-lm before 0.32.1, and unused.

        Raises:
            ValueError: The state is not one that `state` gave.
        """
        try:
            arrays, text = state
            return cls._restored(arrays, json.loads(text))
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"This is no state of an H2OKVCache: {error!r}.") from error

    @classmethod
    def _restored(cls, arrays: dict[str, mx.array], config: dict[str, Any]) -> BoundedKVCache:
        frame, arrays = saved_state.frame_apart(arrays)
        centres, arrays = saved_state.centres_apart(arrays, config)
        settings, share = saved_state.settings_of(config, frame, centres)
        cache = cls.of(settings, saved_state.kind_of(config), share)
        cache.sharers = saved_state.sharers_of(config)
        if config["runs"]:
            cache._layer, cache.share = layer_factory.restored(settings, share, config, arrays)
        return cache

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
            ValueError: It is none of these.
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
