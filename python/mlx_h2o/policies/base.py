"""The interface of policies: scores of slots, and the priorities that decide which slots stay.

A policy sees slots as arrays `[B, H, N]` and never learns how they are stored. To write your own,
subclass `Policy`, decorate it with `register_policy`, and override `priority` (and `accumulate`, if
it needs something other than the summed attention mass).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import mlx.core as mx

from mlx_h2o import _checks
from mlx_h2o.slots.packed import Packing, value_lengths
from mlx_h2o.slots.softmax import attention_mass

# The least values of settings that are counts.
LEAST = {"sink": 0, "evict_every": 1, "window": 1, "pool": 1}
MOST = {"evict_every": _checks.MOST_VICTIMS, "pool": _checks.WIDEST_POOL}


@dataclass
class Observation:
    """The attention of one call over N slots, observed for a policy.

    Attributes:
        logits: `[B, Hq, L, N]` float32, minus infinity where masked.
        lse: `[B, Hq, L]` float32, over every column (remainder and attention sinks included).
        heads: H, the KV heads of these slots.
        stands_for: How many queries each observed one stands for, per slot `[N]`, or 1: a prompt's
            window of w queries stands for all queries since the slot was written.
    """

    logits: mx.array
    lse: mx.array
    heads: int
    stands_for: mx.array | float = 1.0

    @cached_property
    def mass(self) -> mx.array:
        """Attention that each slot received from the observed queries, `[B, H, N]`."""
        return attention_mass(self.logits, self.lse, self.heads)

    def per_query(self) -> list[Observation]:
        """One observation per query, oldest first."""
        return [
            Observation(self.logits[:, :, i : i + 1], self.lse[:, :, i : i + 1], self.heads)
            for i in range(self.logits.shape[2])
        ]


class ObservedMass(Observation):
    """An observation without logits: only its mass and `stands_for` are known."""

    def __init__(self, mass: mx.array):
        self.mass = mass
        self.stands_for = 1.0


@dataclass
class Slots:
    """The attended slots of H KV heads, as a policy sees them.

    Attributes:
        keys: `[B, H, N, D]`.
        values: `[B, H, N, Dv]`.
        positions: Logical position of each slot's token, `[B, H, N]` int32.
        scores: The scores from `accumulate`, `[B, H, N]` float32.
        offset: The next logical position.
        evictable: True where the slot's token may be evicted, `[B, H, N]` bool.
        evicted: How many tokens each head has evicted.
        evicted_mean_key: Mean key of the evicted tokens, `[B, H, D]` float32 (zeros before any).
        value_lengths: Logarithms of the values' squared lengths `[B, H, N]` (`slots/packed.py`),
            for policies that use them.
        aged_from: The position from which ages count: older tokens are as old as it
            (`layer/pins_and_turns.py`).
    """

    keys: mx.array
    values: mx.array
    positions: mx.array
    scores: mx.array
    offset: int
    evictable: mx.array
    evicted: int
    evicted_mean_key: mx.array
    value_lengths: mx.array | None = None
    aged_from: int = 0

    @property
    def lengths_of_values(self) -> mx.array:
        """`value_lengths` in float32; log ||v||^2 of `values` where they were not given."""
        lengths = self.value_lengths
        return (value_lengths(self.values) if lengths is None else lengths).astype(mx.float32)

    @property
    def ages(self) -> mx.array:
        """Steps that each token's score covers, its own included: `[B, H, N]` float32, from 1."""
        return (self.offset - mx.maximum(self.positions, self.aged_from)).astype(mx.float32)


@dataclass(frozen=True)
class KernelPolicy:
    """The scores that the kernels accumulate and the priority by which they rank.

    Attributes:
        score: The score: "none", "sum" (of masses), "ema", "ema_logits" or "last".
        priority: The priority: "score", "age", "distance" (`Distinct`), "direction" (`KeyDiff`) or
            "salience" (`Salient`, which uses values too).
        decay: The decay of the averages.
        distance_weight: The weight of the distance in `Distinct` and `Salient`, as the next three.
        mass_weight: The weight of the mean mass per step; 0 where no masses are accumulated.
        value_weight: The weight of the value's length.
        age_weight: The weight of the age.
        per_layer: Whether the heads' mean priority decides for all heads.
        age_normalised: Whether scores are divided by the steps since the token came.
    """

    score: str
    priority: str
    decay: float = 0.0
    distance_weight: float = 1.0
    mass_weight: float = 0.0
    value_weight: float = 0.0
    age_weight: float = 0.0
    per_layer: bool = False
    age_normalised: bool = False

    @property
    def weights(self) -> tuple[float, float, float, float, float]:
        """Decay of averages; weights of distance, mass, value and age, as in metal/priority.h."""
        terms = self.distance_weight, self.mass_weight, self.value_weight, -self.age_weight
        return self.decay, *terms


@dataclass(frozen=True)
class Policy:
    """Chooses the tokens to evict; its fields are its hyper-parameters.

    Attributes:
        sink: The number of first positions that are never evicted (StreamingLLM, arXiv 2309.17453).
        recent: The last positions, never evicted: a count, or a share of the head's own budget.
            Without it the newest token has the least score and the cache freezes on the prompt.
        unit: "head": each KV head chooses for itself; "layer": all heads evict the same token.
        evict_every: Victims chosen at once. 1 is the most exact; more spread the cost of a choice.
        age_normalised: Divide scores by the steps since the token came.
        value_weighted: Multiply scores by ||v|| (VATP, arXiv 2406.12335).
        prompt: How prompt chunks are scored: "window" by the mass from the last `window` queries
            (SnapKV, arXiv 2404.14469), "full" by `accumulate` over all queries.
        window: The number of queries in the window.
        pool: Width of the average pool along positions that smooths the window's mass.
    """

    sink: int = 4
    recent: int | float = 0.5
    unit: str = "head"
    evict_every: int = 1
    age_normalised: bool = False
    value_weighted: bool = False
    prompt: str = "window"
    window: int = 64
    pool: int = 5

    name: ClassVar[str] = ""
    #: Whether its priority is made from accumulated scores, which the options can weigh.
    ranks_scores: ClassVar[bool] = True
    #: Whether the mean key of evicted tokens is kept even without the remainder's column.
    uses_evicted_mean: ClassVar[bool] = False
    # Whether packed keys get key scaling (`Frame`) by themselves. Not where distances between keys
    # decide alone, since scaling stretches them (distinct at a quarter of 512 tokens: +17 % against
    # +8.5 %).
    suits_frames: ClassVar[bool] = True
    #: Whether it ranks by the lengths of values (`Slots.lengths_of_values`).
    uses_value_lengths: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_types()
        if self.recent < 0 or (isinstance(self.recent, float) and self.recent >= 1):
            raise ValueError(
                "recent must be a count such as 64, or a share of the budget from 0.0 to below "
                f"1.0; got {self.recent}."
            )
        _checks.choice("unit", self.unit, ("head", "layer"))
        _checks.choice("prompt", self.prompt, ("window", "full"))
        if (self.age_normalised or self.value_weighted) and not self.ranks_scores:
            raise ValueError(
                f"Policy {self.name!r} does not rank by scores that age_normalised or "
                "value_weighted could weigh; leave them off."
            )
        if self.pool % 2 == 0:
            raise ValueError(f"pool must be odd; got {self.pool}.")
        self.least_budget()

    def _check_types(self) -> None:
        """Raise ValueError unless each field has its default's type; convert it to Python's own."""
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, bool):
                value = _checks.switch(one.name, value)
            elif isinstance(one.default, float) or one.name == "recent":
                # Whole numbers stay counts: `recent` is a share only as a float.
                counts = one.name == "recent" and hasattr(value, "__index__")
                value = (_checks.whole if counts else _checks.finite)(one.name, value)
            elif isinstance(one.default, int):
                most = MOST.get(one.name, _checks.MOST_TOKENS)
                value = _checks.whole(one.name, value, LEAST.get(one.name), most)
            object.__setattr__(self, one.name, value)

    @property
    def needs_attention(self) -> bool:
        """Whether it needs attention's logits; a policy that uses keys alone runs in any model."""
        return True

    def keeps_value_lengths(self, packing: Packing) -> bool:
        """Whether lengths of values are kept beside rows; packed values rank without them."""
        return self.uses_value_lengths and packing.v_bits is None

    def recent_slots(self, budget: int) -> int:
        """How many of the last positions a head of `budget` slots protects."""
        if isinstance(self.recent, float):
            return math.floor(self.recent * budget)
        return self.recent

    def check_budget(self, budget: int, name: str = "max_size", setting: int | None = None) -> None:
        """Raise ValueError if a head of `budget` slots has no token that may be evicted.

        Args:
            budget: The slots of the head.
            name: The name of the setting, for the message.
            setting: The setting's value, where it is more than the slots: the rest of it is for
                something else.
        """
        recent = self.recent_slots(budget)
        if budget < self.sink + recent + self.evict_every:
            setting = budget if setting is None else setting
            least = self.least_budget() + setting - budget
            raise ValueError(
                f"{name}={setting} is too small: it must hold {self.sink} sink and "
                f"{self.recent_slots(self.least_budget())} recent tokens, {self.evict_every} to "
                f"evict{' and what is kept beside them' if setting > budget else ''}: make {name} "
                f"at least {least}, or lower sink, recent or evict_every."
            )

    def least_budget(self, pinned: int = 0) -> int:
        """The fewest slots from which a head can always evict, beside so many pinned tokens.

        Raises:
            ValueError: That would be more than a head can have.
        """
        needed = self.sink + pinned + self.evict_every

        def suffices(slots: int) -> bool:
            return slots - self.recent_slots(slots) >= needed

        if not suffices(_checks.MOST_TOKENS):
            raise ValueError(
                f"sink={self.sink}, recent={self.recent} and evict_every={self.evict_every}"
                f"{f' beside {pinned} pinned tokens' if pinned else ''} need a head of more than "
                f"{_checks.MOST_TOKENS} slots: lower one of them."
            )
        # The evictable part grows with the budget; rounding a share decides where it suffices.
        slots = range(_checks.MOST_TOKENS + 1)
        return bisect.bisect_left(slots, True, lo=min(needed, len(slots) - 1), key=suffices)

    def kernel_policy(self) -> KernelPolicy | None:
        """This policy for the fused kernels; None leaves every step to the methods below.

        Only the class that defines it is asked: a subclass that overrides another method must not
        inherit it. Unit and age_normalised are filled in from the policy's settings.
        """
        return None

    def accumulate(self, scores: mx.array, observation: Observation) -> mx.array:
        """Scores `[B, H, N]` after an observation; new slots start at 0. Here the mass is summed.

        Never called for a policy that needs no attention.
        """
        return scores + observation.mass * observation.stands_for

    @property
    def sums_mass(self) -> bool:
        """Whether `accumulate` only sums masses, so that it needs no logits."""
        return type(self).accumulate is Policy.accumulate

    def mean_mass(self, scores: mx.array, ages: mx.array) -> mx.array:
        """Each slot's mean mass per step, `[B, H, N]`, computed from its score."""
        return scores / ages

    def carried(
        self, scores: mx.array, ages: mx.array, ages_after: mx.array, carry: float
    ) -> mx.array:
        """Scores `[B, H, N]` when a turn begins (`layer/pins_and_turns.py`).

        Args:
            scores: The scores before.
            ages: The steps that they cover.
            ages_after: The steps that they will cover.
            carry: How much of the past counts, from 0 to 1.

        Returns:
            Sums of masses keep their mean per step, over fewer steps; averages keep `carry`.
        """
        return scores * (ages_after / ages) if self.sums_mass else scores * carry

    def priority(self, slots: Slots) -> mx.array:
        """The worth of each slot, `[B, H, N]`; the lowest is evicted first."""
        return self.weighted(slots.scores, slots)

    def prompt_priority(self, slots: Slots, window_mass: mx.array | None) -> mx.array:
        """The worth of each slot in a prompt chunk; `window_mass` is None if `prompt` is "full"."""
        if window_mass is None:
            return self.priority(slots)
        mass = average_pool(window_mass, slots.positions, self.pool)
        return value_weighted(mass, slots) if self.value_weighted else mass

    def weighted(self, scores: mx.array, slots: Slots) -> mx.array:
        """Scores with the options age_normalised and value_weighted applied."""
        if self.age_normalised:
            scores = scores / slots.ages
        return value_weighted(scores, slots) if self.value_weighted else scores


def kernel_policy_of(policy: Policy, weigh_values: bool = False) -> KernelPolicy | None:
    """The policy for the fused kernels, or None if only its own methods can run it.

    Args:
        policy: Any policy.
        weigh_values: Whether these kernels can multiply scores by ||v||.
    """
    if policy.value_weighted and not weigh_values:
        return None
    if "kernel_policy" not in type(policy).__dict__:
        return None
    kernel = policy.kernel_policy()
    if kernel is None:
        return None
    return replace(kernel, per_layer=policy.unit == "layer", age_normalised=policy.age_normalised)


def value_weighted(scores: mx.array, slots: Slots) -> mx.array:
    """Scores times ||v||, `[B, H, N]`."""
    return scores * mx.linalg.norm(slots.values.astype(mx.float32), axis=-1)


def average_pool(mass: mx.array, positions: mx.array, width: int) -> mx.array:
    """Mean over `width` neighbours in order of position, zero-padded (SnapKV, section 4).

    Args:
        mass: `[B, H, N]`.
        positions: `[B, H, N]`; slots lie in any order.
        width: Odd.
    """
    return pooled(mass, positions, width, window_sums) / width


def pooled(
    mass: mx.array, positions: mx.array, width: int, pool: Callable[[mx.array, int], mx.array]
) -> mx.array:
    """The result of `pool` over each slot's neighbours; other arguments as in `average_pool`."""
    order = mx.argsort(positions, axis=-1)
    # Beyond the number of slots a greater width changes nothing.
    half = min(width // 2, mass.shape[-1])
    padded = mx.pad(mx.take_along_axis(mass, order, axis=-1), [(0, 0), (0, 0), (half, half)])
    return mx.take_along_axis(pool(padded, 2 * half + 1), mx.argsort(order, axis=-1), axis=-1)


def window_sums(x: mx.array, width: int) -> mx.array:
    """Sums over each `width` neighbours of the last axis, `[..., N]` to `[..., N - width + 1]`.

    Sums over 1, 2, 4, ... neighbours are built from each other, and those in `width` are added: log
    width additions of arrays, and as many roundings (differences of running sums would lose small
    masses beside large ones).
    """
    places = x.shape[-1] - width + 1
    sums, done, total = x, 0, None
    for bit in range(width.bit_length()):
        if width >> bit & 1:
            part = sums[..., done : done + places]
            total = part if total is None else total + part
            done += 1 << bit
        if width >> bit > 1:
            sums = sums[..., : -(1 << bit)] + sums[..., 1 << bit :]
    assert total is not None
    return total
