"""The journal of decode steps, for undo: a layer before each of its last single-token steps.

A step overwrites one row per head, folds it into the remainder, accumulates scores and names
victims. What cannot be computed backwards is kept here, so that a draft's rejected tokens leave no
trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_h2o.slots.remainder import STATISTICS, Remainder
from mlx_h2o.slots.slot_store import Run, SlotStore, under
from mlx_h2o.slots.softmax import Mask

if TYPE_CHECKING:
    from mlx_h2o.slots.recent_window import RecentWindow

#: Most steps of a journal. Each is held whole, and shorter prompts are read token by token.
MOST_STEPS = 2**16


@dataclass
class StepBefore:
    """A layer before one step.

    Attributes:
        offset: The layer's next logical position.
        runs: The layer's runs; their lengths and layout matter here.
        window: Length and oldest slot of the recent window, if there is one.
        arrays: The arrays that the step changed, as they were before, named as in
            `H2OKVCache.arrays`. Slots and recent window keep only the overwritten row of each head
            `[B, H, ...]` ("slot" `[B, H]` says which), scores are kept whole. An array that is not
            here did not change, or is with the decoder that did the step.
    """

    offset: int
    runs: list[Run]
    window: tuple[int, int] | None = None
    arrays: dict[str, mx.array] = field(default_factory=dict)

    @property
    def evicted(self) -> bool:
        """Whether the layer had evicted any token."""
        recent = self.window[0] if self.window else 0
        return any(self.offset - recent > run.length for run in self.runs)

    def note(self, store: SlotStore, window: RecentWindow | None, victims: mx.array | None) -> None:
        """Keep the arrays replaced whole and the recent window's next row, before a step op by op.

        Args:
            store: The layer's slots.
            window: The recent window, if the layer has one.
            victims: The slots named for the next steps.
        """
        if "scores" in store.fields:
            self.arrays["slots.scores"] = store.fields["scores"]
        if victims is not None:
            self.arrays["victims"] = victims
        if window is not None:
            changed = window.next_overwritten()
            self.arrays |= {f"recent.{name}": array for name, array in changed.items()}

    def of_slots(self) -> dict[str, mx.array]:
        """The overwritten rows of the slots, by field."""
        return under("slots.", self.arrays)

    def of_window(self) -> dict[str, mx.array]:
        """The overwritten rows of the recent window, by field."""
        return under("recent.", self.arrays)


class Journal:
    """The last steps of a layer, oldest first.

    Args:
        size: The most steps that it holds.
    """

    def __init__(self, size: int):
        self.size = size
        self.steps: deque[StepBefore] = deque(maxlen=size)
        self._since_settled = 0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for step in self.steps for array in step.arrays.values())

    @property
    def settled(self) -> bool:
        """Whether no drafted tokens are under way.

        A caller that drafts takes the rejected tokens back within `size` steps. So no drafts are
        under way just after steps were taken back, and after more than `size` steps that were not.
        """
        return self._since_settled == 0 or self._since_settled > self.size

    def settle(self) -> None:
        """Note that no drafted tokens are under way."""
        self._since_settled = 0

    def clear(self) -> None:
        """Forget all steps: the next change cannot be undone."""
        self.steps.clear()
        self.settle()

    def begin(self, store: SlotStore, window: RecentWindow | None, offset: int) -> StepBefore:
        """Begin a step; the caller notes the arrays that it changes.

        Args:
            store: The layer's slots.
            window: The recent window, if the layer has one.
            offset: The next logical position.
        """
        before = StepBefore(
            offset,
            [run.copy() for run in store.runs],
            (window.length, window.oldest) if window else None,
        )
        self.steps.append(before)
        self._since_settled += 1
        return before

    def note_overwritten(
        self, slots: Sequence[mx.array], rows: dict[str, mx.array], remainder: Remainder | None
    ) -> list[mx.array]:
        """Keep the rows that the newest step overwrites, and the remainder that takes them in.

        Args:
            slots: The overwritten slots, `[B, heads]` for each run, counted in each head.
            rows: The overwritten rows `[B, H, ...]` by field.
            remainder: The remainder before the step, or None if the step does not change it.

        Returns:
            The arrays to read before the rows are written.
        """
        slot = slots[0] if len(slots) == 1 else mx.concatenate(list(slots), axis=1)
        changed = {"slot": slot}
        changed |= {f"slots.{name}": row for name, row in rows.items() if name != "scores"}
        self.steps[-1].arrays |= changed
        if remainder is not None:
            of_remainder = remainder.arrays.items()
            self.steps[-1].arrays |= {f"remainder.{name}": array for name, array in of_remainder}
        return list(changed.values())

    def newest(self) -> list[mx.array]:
        """The newest step's arrays."""
        return list(self.steps[-1].arrays.values()) if self.steps else []

    def trimmable(self, offset: int, evicted: bool) -> int:
        """How many tokens can be taken back, from the layer's next position and evictions."""
        if self.steps:
            first = self.steps[0]
            offset, evicted = first.offset, first.evicted
        return len(self.steps) + (0 if evicted else offset)

    def pop(self, count: int) -> list[StepBefore]:
        """The last `count` steps, newest first, which are undone."""
        return [self.steps.pop() for _ in range(count)]


def put_back(
    steps: Sequence[StepBefore], store: SlotStore, window: RecentWindow | None
) -> tuple[Remainder | None, mx.array | None]:
    """Restore the arrays that steps changed.

    Args:
        steps: The steps to undo, newest first.
        store: The layer's slots, with the lengths that they had before these steps.
        window: The recent window, if the layer has one.

    Returns:
        The remainder and the victims, or None if the steps did not change them.
    """
    statistics: dict[str, mx.array] = {}
    victims = None
    for step in steps:
        if "slot" in step.arrays:
            _put_back(step, store)
        if window is not None and step.window is not None:
            window.put_back(step.window[1], step.of_window())
        statistics |= under("remainder.", step.arrays)
        victims = step.arrays.get("victims", victims)
    first = steps[-1]
    if "slots.scores" in first.arrays:
        scores = first.arrays["slots.scores"]
        store.write("scores", [store.slots_of(scores, run) for run in first.runs])
    remainder = Remainder(**{n: statistics[n] for n in STATISTICS}) if statistics else None
    return remainder, victims


def step_bytes(
    row_bytes: int, recent_row_bytes: int, remainder_bytes: int, evict_every: int
) -> int:
    """Bytes of one step of one KV head in a journal, without its scores.

    Args:
        row_bytes: Bytes of a row of the slots.
        recent_row_bytes: Bytes of a row of the recent window, or 0.
        remainder_bytes: Bytes of a head's statistics, or 0.
        evict_every: The policy's setting: tokens between two evictions.
    """
    slot_and_position = 8
    return row_bytes + recent_row_bytes + slot_and_position + remainder_bytes + 4 * evict_every


def single_steps(mask: Mask, L: int, empty: bool) -> list[Mask]:
    """The masks of a chunk's L tokens when they are processed one by one.

    Args:
        mask: As in `H2OKVCache.attend`; the last L columns of an array are the chunk's.
        L: The number of tokens.
        empty: Whether the cache holds nothing before them.
    """
    if mask is None or isinstance(mask, str):
        return [None] * L
    visible = mx.ones if mask.dtype == mx.bool_ else mx.zeros
    masks: list[Mask] = []
    for i in range(L):
        row = mask[..., i : i + 1, :] if mask.shape[-2] > 1 else mask
        if mask.shape[-1] > 1:
            own = mask.shape[-1] - L + i
            row = row[..., own : own + 1]
            if i or not empty:  # A single column would apply to every slot.
                row = mx.concatenate([visible(row.shape, row.dtype), row], axis=-1)
        masks.append(row)
    return masks


def _put_back(step: StepBefore, store: SlotStore) -> None:
    """Restore the rows that a step overwrote, wherever their heads' slots lie now."""
    slots = step.arrays["slot"]
    flat = store.flat_index_of_heads([slots[:, run.first : run.last] for run in store.runs])
    store.put(flat, {name: row for name, row in step.of_slots().items() if name != "scores"})
