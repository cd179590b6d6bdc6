"""Launches of the kernels around attention in a decode step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import mlx.core as mx

from mlx_h2o.attention.backends.attention_launches import REMAINDER, VectorResult
from mlx_h2o.attention.backends.decoder import HeadPlan
from mlx_h2o.attention.backends.launcher import SIMDGROUP, Launcher, Outputs
from mlx_h2o.attention.backends.row_buffers import buffers, packing
from mlx_h2o.attention.backends.work import Ranges
from mlx_h2o.policies.base import KernelPolicy
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows, Rows
from mlx_h2o.slots.remainder import Remainder

# Names of scores and priorities, in the order of priority.h.
SCORES = ("none", "sum", "ema", "ema_logits", "last")
PRIORITIES = ("score", "age", "distance", "direction", "salience")

_REMAINDER_OUT = {f"{name}_out": statistic for name, statistic in REMAINDER.items()}
_KEPT_KEYS_SIMDGROUPS = 8
_UPDATE_SIMDGROUPS = 16


@dataclass(frozen=True)
class StepPlan:
    """A layer's plan for a step.

    Attributes:
        offset: The next logical position; the new token's is one less.
        slots: Slots of the flat buffers, S.
        sink: How many of the first positions are protected.
        evict_every: Victims named at once.
        heads: Each KV head's plan.
        aged_from: The position from which ages count.
    """

    offset: int
    slots: int
    sink: int
    evict_every: int
    heads: tuple[HeadPlan, ...]
    aged_from: int = 0

    @property
    def ranges(self) -> Ranges:
        return Ranges(tuple(h.start for h in self.heads), tuple(h.length for h in self.heads))

    @property
    def attended(self) -> int:
        """Slots that all heads attend to."""
        return sum(head.length for head in self.heads)


# Most layers of a model have the same plan.
@lru_cache(maxsize=64)
def plan_array(plan: StepPlan) -> mx.array:
    """The plan's integers, in the layout of metal/decode_step.h."""
    of_layer = [plan.offset, plan.slots, plan.attended, len(plan.heads)]
    of_layer += [plan.evict_every, plan.sink, plan.aged_from, 0]
    before = accumulate((head.length for head in plan.heads), initial=0)
    lines = [
        [head.start, head.length, prefix, head.recent, head.victim, int(head.choose), 0, 0]
        for head, prefix in zip(plan.heads, before, strict=False)
    ]
    return mx.array([*of_layer, *chain.from_iterable(lines)], mx.int32)


@dataclass
class SlotArrays:
    """A layer's slots in flat buffers, which the kernels change in place.

    Attributes:
        keys: `[B, S, D]`, dense or packed.
        values: `[B, S, Dv]`, dense or packed.
        positions: `[B, S]` int16 or int32.
        scores: `[B, S]` float32, or None if the policy accumulates none.
        norms: ||v|| `[B, S]` float32 of the values as stored, or None if the policy does not weight
            by it.
        value_lengths: log ||v||^2 `[B, S]` float16 of dense values as they came, or None if the
            policy does not rank by it; packed values need none, since their scales rank them.
    """

    keys: Rows
    values: Rows
    positions: mx.array
    scores: mx.array | None = None
    norms: mx.array | None = None
    value_lengths: mx.array | None = None

    @property
    def of_values(self) -> dict[str, mx.array]:
        """The arrays of values' sizes, by the names of the kernels' buffers."""
        arrays = {"norms": self.norms, "value_lengths": self.value_lengths}
        return {name: array for name, array in arrays.items() if array is not None}


def overwrite(
    launcher: Launcher,
    plan: StepPlan,
    slots: SlotArrays,
    victims: mx.array,
    new_keys: mx.array,
    new_values: mx.array,
    remainder: Remainder | None,
    frame: Frame | None = None,
) -> tuple[mx.array, Remainder | None]:
    """Write each head's new row, in place, and fold the row that was there.

    Args:
        launcher: The GPU's launcher.
        plan: The step's plan.
        slots: The layer's slots.
        victims: `[B, H, evict_every]` int32.
        new_keys: `[B, H, 1, D]`, in the dtype of the stored ones; the kernel packs them if those
            are packed.
        new_values: `[B, H, 1, Dv]`, likewise in the dtype of the stored ones.
        remainder: The statistics of evicted tokens, or None if the layer keeps none.
        frame: The key scaling (`Frame`) of stored keys; new keys are unscaled.

    Returns:
        The slots that were written `[B, H]` int32, counted in their heads, and the remainder. A
        kernel that reads the slots afterwards must take one of these arrays, so that it runs later.
    """
    B, H, _, D = new_keys.shape
    Dv = new_values.shape[-1]
    inputs = {
        "plan": plan_array(plan),
        "victims": victims,
        "new_keys": new_keys,
        "new_values": new_values,
        **buffers(keys=slots.keys, values=slots.values),
        "positions": slots.positions,
        **slots.of_values,
    }
    outputs: Outputs = {"slots_out": ((B, H), mx.int32)}
    if frame is not None:
        inputs |= {"frame_centre": frame.centre, "frame_scale": frame.scale}
    if remainder is not None:
        statistics = remainder.arrays
        inputs |= {name: mx.contiguous(statistics[of]) for name, of in REMAINDER.items()}
        outputs |= {name: (statistics[of].shape, mx.float32) for name, of in _REMAINDER_OUT.items()}
    template = {
        "T": slots.keys.dtype,
        "D": D,
        "DV": Dv,
        **packing(keys=slots.keys, values=slots.values),
        "REMEMBERS": remainder is not None,
        "NORMS": slots.norms is not None,
        "LENGTHS": slots.value_lengths is not None,
        "POSITION": slots.positions.dtype,
        "FRAME": frame is not None,
    }
    written = launcher.launch("overwrite", inputs, outputs, template, (1, H, B), SIMDGROUP)
    if remainder is not None:
        remainder = Remainder(**{of: written[name] for name, of in _REMAINDER_OUT.items()})
    return written["slots_out"], remainder


def mean_kept_keys(launcher: Launcher, plan: StepPlan, keys: Rows, written: mx.array) -> mx.array:
    """The mean of each head's keys `[B, H, D]` float32.

    Args:
        launcher: The GPU's launcher.
        plan: The step's plan.
        keys: Keys of the slots, `[B, S, D]`, dense or packed.
        written: The slots from `overwrite`, so that it runs first.
    """
    shape = (keys.shape[0], len(plan.heads), keys.shape[-1])
    return _kept_keys(launcher, plan, keys, written, "means", shape)


def unlike_directions(
    launcher: Launcher, plan: StepPlan, keys: Rows, written: mx.array
) -> mx.array:
    """1 - cos(key, mean direction of its head's keys) `[B, attended slots]` float32.

    Args:
        launcher: The GPU's launcher.
        plan: The step's plan.
        keys: Keys of the slots, `[B, S, D]`, dense or packed.
        written: The slots from `overwrite`, so that it runs first.
    """
    return _kept_keys(launcher, plan, keys, written, "worth", (keys.shape[0], plan.attended))


def _kept_keys(
    launcher: Launcher,
    plan: StepPlan,
    keys: Rows,
    written: mx.array,
    output: str,
    shape: tuple[int, ...],
) -> mx.array:
    B, _, D = keys.shape
    return launcher.launch(
        "kept_keys",
        {"plan": plan_array(plan), **buffers(keys=keys), "slots": written},
        {output: (shape, mx.float32)},
        {
            "D": D,
            **packing(keys=keys),
            "DIRECTIONS": output == "worth",
            "SIMDS": _KEPT_KEYS_SIMDGROUPS,
        },
        (1, len(plan.heads), B),
        _KEPT_KEYS_SIMDGROUPS * SIMDGROUP,
    )[output]


def update(
    launcher: Launcher,
    plan: StepPlan,
    slots: SlotArrays,
    policy: KernelPolicy,
    attended: VectorResult,
    victims: mx.array,
    written: mx.array,
    means: mx.array | None = None,
    worth: mx.array | None = None,
) -> mx.array:
    """Update the scores, in place, and name the next victims.

    Args:
        launcher: The GPU's launcher.
        plan: The step's plan.
        slots: The layer's slots.
        policy: The policy's scores and priority.
        attended: The outputs of attention; its logits where the policy accumulates, its distances
            where it ranks by them.
        victims: `[B, H, evict_every]` int32; heads that do not choose keep theirs.
        written: The slots from `overwrite`.
        means: `[B, H, D]`, from which the distances were measured.
        worth: `[B, attended slots]`, for the priority "direction".

    Returns:
        Victims `[B, H, evict_every]` int32.
    """
    B, H, _ = victims.shape
    assert attended.lse is not None
    inputs = {
        "plan": plan_array(plan),
        "weights": _weights(policy.weights),
        "victims": victims,
        "lse": attended.lse,
        "positions": slots.positions,
        "slots": written,
    }
    scores = policy.score != "none"
    optional = {
        "logits": attended.logits if scores else None,
        "distances": attended.distances if worth is None else worth,
        "means": means,
        "scores": slots.scores if scores else None,
        **slots.of_values,
    }
    template = _update_template(plan, slots, policy, attended.lse.shape[1] // H)
    if template["RANGES"] and isinstance(slots.values, PackedRows):
        optional["value_scales"] = slots.values.scales
    inputs |= {name: array for name, array in optional.items() if array is not None}
    return launcher.launch(
        "update",
        inputs,
        {"victims_out": (victims.shape, mx.int32)},
        template,
        (1, 1 if policy.per_layer else H, B),
        _UPDATE_SIMDGROUPS * SIMDGROUP,
    )["victims_out"]


def _update_template(
    plan: StepPlan, slots: SlotArrays, policy: KernelPolicy, group: int
) -> dict[str, Any]:
    """Template arguments of `update`, for `group` query heads of a KV head."""
    ranks = any(head.choose for head in plan.heads)
    ranges, levels = 0, 0
    if ranks and policy.priority == "salience" and isinstance(slots.values, PackedRows):
        ranges, levels = slots.values.scales.shape[-1], 2**slots.values.bits - 1
    return {
        "D": slots.keys.shape[-1],
        "G": group,
        "SCORE": SCORES.index(policy.score),
        "PRIORITY": PRIORITIES.index(policy.priority if ranks else "age"),
        "AGE": policy.age_normalised,
        "VALUES": slots.norms is not None,
        "RANGES": ranges,
        "LEVELS": levels,
        "HEADS": len(plan.heads) if policy.per_layer else 1,
        "SIMDS": _UPDATE_SIMDGROUPS,
    }


@lru_cache(maxsize=64)
def _weights(weights: tuple[float, ...]) -> mx.array:
    return mx.array(weights)
