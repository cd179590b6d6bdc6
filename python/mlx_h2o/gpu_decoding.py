"""Decoding in one fused step on a GPU: overwrite, attend, update; nothing is read back.

The kernels change slots in place, in arrays that nobody else has seen (metal/README.md). MLX knows
nothing of that, so every kernel that reads slots takes an array that the one before it wrote, and
`end` waits for the last of them before it hands the arrays out.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from mlx_h2o.backends.attention_launches import EXPORT_LOGITS, EXPORT_LSE, attend
from mlx_h2o.backends.launcher import Launcher
from mlx_h2o.backends.step_launches import (
    Ranking,
    SlotArrays,
    StepPlan,
    mean_kept_keys,
    overwrite,
    unlike_directions,
    update,
)
from mlx_h2o.backends.tiling import WIDTHS
from mlx_h2o.decode_step import Decoding, HeadStep
from mlx_h2o.packed import Packing, dense
from mlx_h2o.policies import Policy
from mlx_h2o.policies.base import kernel_form_of
from mlx_h2o.policies.distinct import FEWEST_FOR_A_MEAN
from mlx_h2o.recent import RecentStep
from mlx_h2o.remainder import Remainder
from mlx_h2o.store import SlotStore

# MLX passes shorter arrays as constants, which nobody can write.
_FEWEST_SLOTS = 8


def supports(policy: Policy, keys: mx.array, values: mx.array) -> bool:
    """Whether there are kernels for this policy and rows `[..., D]` and `[..., Dv]`."""
    widths = keys.shape[-1] in WIDTHS and values.shape[-1] in WIDTHS
    return widths and kernel_form_of(policy, weigh_values=True) is not None


def ranking_of(policy: Policy) -> Ranking:
    """A policy that `supports` accepts, in the kernels' terms."""
    form = kernel_form_of(policy, weigh_values=True)
    assert form is not None
    return Ranking(
        form.score,
        form.priority,
        per_layer=policy.unit == "layer",
        age_normalised=policy.age_normalised,
        weights=(form.decay, 1.0, form.mass_weight, -form.age_weight),
    )


class GPUDecoding(Decoding):
    """A layer whose arrays are with the kernels of a GPU.

    Args:
        launcher: Of the GPU.
        architecture: Its name, by which attention shares out its work.
        store: As of `CPUDecoding`, and so are the others.
    """

    def __init__(
        self,
        launcher: Launcher,
        architecture: str,
        store: SlotStore,
        packing: Packing,
        remainder: Remainder,
        victims: mx.array,
        policy: Policy,
        remembers: bool,
        answers: bool,
    ):
        self._launcher = launcher
        self._architecture = architecture
        self._policy = policy
        self._ranking = ranking_of(policy)
        self._answers = answers
        self._remembers = remembers
        self._remainder = remainder
        self._victims = victims
        self._count = store.fields["keys"].shape[1]
        self.nbytes = sum(field.nbytes for field in store.fields.values()) + victims.nbytes
        self.nbytes += remainder.nbytes if remembers else 0
        # The kernels change these very arrays.
        self._fields = {name: _own(field) for name, field in store.fields.items()}
        self._slots = SlotArrays(
            packing.rows("keys", self._fields),
            packing.rows("values", self._fields),
            self._fields["positions"],
            self._fields.get("scores"),
        )
        if policy.value_weighted:
            values = dense(self._slots.values).astype(mx.float32)
            self._slots.norms = mx.linalg.norm(values, axis=-1)
            self.nbytes += self._slots.norms.nbytes
        store.fields = {}

    def step(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        sinks: mx.array | None,
        offset: int,
        heads: list[HeadStep],
        recent: RecentStep | None = None,
    ) -> mx.array:
        assert recent is None
        policy, slots = self._policy, self._slots
        plan = StepPlan(offset, slots.keys.shape[1], policy.sink, policy.evict_every, tuple(heads))
        written, remainder = overwrite(
            self._launcher,
            plan,
            slots,
            self._victims,
            k,
            v,
            self._remainder if self._remembers else None,
        )
        self._remainder = remainder or self._remainder
        choose = any(head.choose for head in heads)
        means = worth = None
        if choose and self._ranking.priority == "distance":
            means = self._means(plan, written)
        if choose and self._ranking.priority == "direction":
            worth = unlike_directions(self._launcher, plan, slots.keys, written)
        attended = attend(
            self._launcher,
            q.astype(k.dtype),
            slots.keys,
            slots.values,
            scale=scale,
            sinks=sinks,
            remainder=self._remainder if self._answers and _evicted(heads) else None,
            means=means,
            ranges=plan.ranges,
            export=EXPORT_LSE if self._ranking.score == "none" else EXPORT_LOGITS,
            architecture=self._architecture,
            after=written,
        )
        self._victims = update(
            self._launcher,
            plan,
            slots,
            self._ranking,
            attended,
            self._victims,
            written,
            means,
            worth,
        )
        # Whoever evaluates the output evaluates all of the step.
        out: mx.array = mx.depends(attended.out.astype(q.dtype), self._victims)
        return out

    def end(self, store: SlotStore) -> tuple[Remainder, mx.array]:
        mx.eval(self._victims, *self._remainder.arrays.values())
        store.fields = {name: field[:, : self._count] for name, field in self._fields.items()}
        return self._remainder, self._victims

    def _means(self, plan: StepPlan, written: mx.array) -> mx.array:
        """The mean evicted key, or that of the kept ones while too few were evicted."""
        few = [head.evicted < FEWEST_FOR_A_MEAN for head in plan.heads]
        if not any(few):
            return self._remainder.mean_key
        kept = mean_kept_keys(self._launcher, plan, self._slots.keys, written)
        return mx.where(mx.array(few)[:, None], kept, self._remainder.mean_key)


def _evicted(heads: list[HeadStep]) -> bool:
    return any(head.evicted > 0 for head in heads)


def _own(field: mx.array) -> mx.array:
    """The same values in memory of their own: copied unless nobody else holds them."""
    slots = field.shape[1]
    if slots < _FEWEST_SLOTS:
        return mx.pad(field, [(0, 0), (0, _FEWEST_SLOTS - slots), *[(0, 0)] * (field.ndim - 2)])
    return mx.where(True, field, mx.zeros((), field.dtype))


@cache
def writes_in_place(launcher: Launcher) -> bool:
    """Whether a row that a kernel writes into its input is there for the next reader."""
    head = HeadStep(start=0, length=1, victim=-1, recent=0, evicted=0, choose=False)
    plan = StepPlan(offset=1, slots=8, sink=0, evict_every=1, heads=(head,))
    keys, values = mx.zeros((1, 8, 32)), mx.zeros((1, 8, 32))
    slots = SlotArrays(keys, values, mx.zeros((1, 8), mx.int32))
    mx.eval(keys, values, slots.positions)
    row = mx.ones((1, 1, 1, 32))
    written, _ = overwrite(launcher, plan, slots, mx.zeros((1, 1, 1), mx.int32), row, row, None)
    mx.eval(written)
    return keys[0, 0].sum().item() == values[0, 0].sum().item() == 32
