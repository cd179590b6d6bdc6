"""Decoding in one fused step on a GPU: overwrite, attend, update; nothing is read back.

The kernels change slots in place, in arrays of the decoder's own (metal/README.md). MLX does not
know that, so every kernel that reads slots takes an array that the kernel before it wrote, and
`end` waits for the last kernel before it returns the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import mlx.core as mx

from mlx_h2o.attention.backends.attention_launches import (
    EXPORT_LOGITS,
    EXPORT_LSE,
    VectorResult,
    attend,
)
from mlx_h2o.attention.backends.decoder import Decoder, DecodeStep, HeadPlan, Lent
from mlx_h2o.attention.backends.launcher import Launcher
from mlx_h2o.attention.backends.step_launches import (
    SlotArrays,
    StepPlan,
    mean_kept_keys,
    overwrite,
    unlike_directions,
    update,
)
from mlx_h2o.attention.backends.tiling import WIDTHS
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.policies.base import kernel_policy_of
from mlx_h2o.policies.terms import FEWEST_FOR_A_MEAN
from mlx_h2o.slots.packed import dense
from mlx_h2o.slots.remainder import STATISTICS

# MLX passes shorter arrays as constants, which cannot be written to.
_FEWEST_SLOTS = 8


def supports(keys: mx.array, values: mx.array) -> bool:
    """Whether there are kernels for rows `[..., D]` and `[..., Dv]`."""
    return keys.shape[-1] in WIDTHS and values.shape[-1] in WIDTHS


class GPUDecoder(Decoder):
    """A layer whose arrays the kernels of a GPU hold.

    Args:
        launcher: The GPU's launcher.
        architecture: The GPU's name, by which attention shares out its work.
        lent: The layer's arrays.
        settings: The layer's settings; `choice.accepts` must be true of them.
    """

    on_gpu = True

    def __init__(self, launcher: Launcher, architecture: str, lent: Lent, settings: CacheSettings):
        self._launcher = launcher
        self._architecture = architecture
        self._settings = settings
        kernel_policy = kernel_policy_of(settings.policy, weigh_values=True)
        assert kernel_policy is not None
        self._policy = kernel_policy
        self._remainder = lent.remainder
        self._victims = lent.victims
        self._count = lent.fields["keys"].shape[1]
        self.nbytes = lent.nbytes(settings.remembers)
        # The kernels change these very arrays.
        self._fields = {name: _own(field) for name, field in lent.fields.items()}
        self._slots = SlotArrays(
            settings.packing.rows("keys", self._fields),
            settings.packing.rows("values", self._fields),
            self._fields["positions"],
            self._fields.get("scores"),
            value_lengths=self._fields.get("value_lengths"),
        )
        if settings.policy.value_weighted:
            values = dense(self._slots.values).astype(mx.float32)
            self._slots.norms = mx.linalg.norm(values, axis=-1)
            self.nbytes += self._slots.norms.nbytes

    def step(self, step: DecodeStep) -> mx.array:
        (token,) = step.tokens
        assert token.recent is None
        if token.before is not None:
            token.before.arrays = self._changed_by(token.heads)
            self._victims = after(self._victims, token.before.arrays.values())
        sink, every = self._settings.policy.sink, self._settings.policy.evict_every
        slots = self._slots.keys.shape[1]
        plan = StepPlan(token.offset, slots, sink, every, token.heads, token.aged_from)
        written, remainder = overwrite(
            self._launcher,
            plan,
            self._slots,
            self._victims,
            step.k,
            step.v,
            self._remainder if self._settings.remembers else None,
            self._settings.frame,
        )
        self._remainder = remainder or self._remainder
        means, worth = self._ranked_by(plan, written)
        attended = self._attend(step, plan, written, means)
        self._victims = update(
            self._launcher,
            plan,
            self._slots,
            self._policy,
            attended,
            self._victims,
            written,
            means,
            worth,
        )
        # So that evaluating the output evaluates the whole step.
        out: mx.array = mx.depends(attended.out.astype(step.q.dtype), self._victims)
        return out

    def _ranked_by(
        self, plan: StepPlan, written: mx.array
    ) -> tuple[mx.array | None, mx.array | None]:
        """The means from which keys' distances are measured, and the priorities by direction."""
        if not any(head.choose for head in plan.heads):
            return None, None
        if self._policy.priority in ("distance", "salience"):
            return self._means(plan, written), None
        if self._policy.priority == "direction":
            return None, unlike_directions(self._launcher, plan, self._slots.keys, written)
        return None, None

    def _attend(
        self, step: DecodeStep, plan: StepPlan, written: mx.array, means: mx.array | None
    ) -> VectorResult:
        """Attention over the slots, after the new row is written."""
        answers = self._settings.remainder and step.tokens[0].evicts
        frame = self._settings.frame
        return attend(
            self._launcher,
            step.q.astype(step.k.dtype),
            self._slots.keys,
            self._slots.values,
            scale=step.scale,
            sinks=step.sinks,
            remainder=self._remainder if answers else None,
            saturation=self._settings.saturations(len(plan.heads)),
            frame_scale=None if frame is None else frame.scale,
            means=means,
            ranges=plan.ranges,
            export=EXPORT_LSE if self._policy.score == "none" else EXPORT_LOGITS,
            architecture=self._architecture,
            after=written,
        )

    def end(self) -> Lent:
        mx.eval(self._victims, *self._remainder.arrays.values())
        fields = {name: field[:, : self._count] for name, field in self._fields.items()}
        return Lent(fields, self._remainder, self._victims)

    def _changed_by(self, heads: tuple[HeadPlan, ...]) -> dict[str, mx.array]:
        """Copies of the arrays that a step changes, made once the step before it has run."""
        arrays = {"victims": self._victims}
        if "scores" in self._fields:
            # The victims are written after the scores.
            arrays["slots.scores"] = after(self._fields["scores"], [self._victims])[
                :, : self._count
            ]
        if not any(head.victim >= 0 for head in heads):
            return arrays
        slots = [
            mx.clip(self._victims[:, h, head.victim], 0, head.length - 1)
            if head.victim >= 0
            else mx.full((self._victims.shape[0],), head.length - 1, mx.int32)
            for h, head in enumerate(heads)
        ]
        arrays["slot"] = mx.stack(slots, axis=1)
        flat = arrays["slot"] + mx.array([head.start for head in heads], mx.int32)
        for name, field in self._fields.items():
            if name != "scores":
                where = flat.reshape(*flat.shape, *[1] * (field.ndim - 2))
                where = mx.broadcast_to(where, (*flat.shape, *field.shape[2:]))
                arrays[f"slots.{name}"] = mx.take_along_axis(field, where, axis=1)
        if self._settings.remembers:
            statistics = self._remainder.arrays
            arrays |= {f"remainder.{name}": statistics[name] for name in STATISTICS}
        return arrays

    def _means(self, plan: StepPlan, written: mx.array) -> mx.array:
        """The mean evicted key, or that of the kept keys while few tokens were evicted."""
        few = [head.evicted < FEWEST_FOR_A_MEAN for head in plan.heads]
        if not any(few):
            return self._remainder.mean_key
        mean = mean_kept_keys(self._launcher, plan, self._slots.keys, written)
        return mx.where(mx.array(few)[:, None], mean, self._remainder.mean_key)


def after(array: mx.array, others: Iterable[mx.array]) -> mx.array:
    """A copy of an array, made on the GPU once the others are written.

    An operation takes a number of each of them, so that their kernels come before this one: a
    kernel that changes slots in place is ordered by its inputs alone.
    """
    order = mx.zeros((1,), mx.uint8)
    for other in others:
        order = order & other.reshape(-1)[:1].view(mx.uint8)[:1]
    return mx.where(order == 0, array, mx.zeros((), array.dtype))


def _own(field: mx.array) -> mx.array:
    """The same values in memory of their own; copied unless this is the only reference."""
    slots = field.shape[1]
    if slots < _FEWEST_SLOTS:
        return mx.pad(field, [(0, 0), (0, _FEWEST_SLOTS - slots), *[(0, 0)] * (field.ndim - 2)])
    return mx.where(True, field, mx.zeros((), field.dtype))


@cache
def writes_in_place(launcher: Launcher) -> bool:
    """Whether a row that a kernel writes into its input is visible to the next reader."""
    head = HeadPlan(start=0, length=1, victim=-1, recent=0, evicted=0, choose=False)
    plan = StepPlan(offset=1, slots=8, sink=0, evict_every=1, heads=(head,))
    keys, values = mx.zeros((1, 8, 32)), mx.zeros((1, 8, 32))
    slots = SlotArrays(keys, values, mx.zeros((1, 8), mx.int32))
    mx.eval(keys, values, slots.positions)
    row = mx.ones((1, 1, 1, 32))
    written, _ = overwrite(launcher, plan, slots, mx.zeros((1, 1, 1), mx.int32), row, row, None)
    mx.eval(written)
    return keys[0, 0].sum().item() == values[0, 0].sum().item() == 32
