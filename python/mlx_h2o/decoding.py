"""Decoding in one fused step: a layer's slots and remainder in the kernels' hands.

The kernels change the arrays in place, step after step, without asking whether MLX could see that
nobody else holds them (with one token of look-ahead it could not, and would copy every key and
value at every step). Whoever wants to look at them calls `end` first, which hands them back.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_h2o.backends import choice, reference
from mlx_h2o.decode_step import Decoding, HeadStep
from mlx_h2o.packed import Packing
from mlx_h2o.policies import Policy
from mlx_h2o.policies.base import kernel_form_of
from mlx_h2o.recent import RecentStep, RecentZone
from mlx_h2o.remainder import SATURATION, Remainder
from mlx_h2o.store import SlotStore

# Query heads of one KV head that the kernel takes at once (kMaxRows in kernels.h).
MOST_QUERY_HEADS = 32


def can_decode(policy: Policy, keys: mx.array, values: mx.array, packing: Packing) -> bool:
    """Whether the default device has a fused step for this policy and rows like these."""
    gpu = choice.gpu()
    if gpu is not None:
        # Two kinds of rows in one step are the CPU kernel's alone.
        return packing.recent_bits is None and gpu.can_decode(policy, keys, values)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and kernel_form_of(policy) is not None and choice.backend() is not reference


def on_default_device(decoding: Decoding) -> bool:
    """Whether a layer's arrays are with the kernels of the default device."""
    return isinstance(decoding, CPUDecoding) == (choice.gpu() is None)


def start_decoding(
    store: SlotStore,
    packing: Packing,
    remainder: Remainder,
    victims: mx.array,
    policy: Policy,
    remembers: bool,
    answers: bool,
    recent: RecentZone | None = None,
) -> Decoding:
    """Give a layer's arrays to the kernels of the default device; arguments as of `CPUDecoding`."""
    gpu = choice.gpu()
    if gpu is not None:
        return gpu.start_decoding(store, packing, remainder, victims, policy, remembers, answers)
    return CPUDecoding(store, packing, remainder, victims, policy, remembers, answers, recent)


class CPUDecoding(Decoding):
    """A layer whose arrays are with the CPU's kernel.

    Args:
        store: Slots; its fields are taken out.
        packing: How its keys and values are stored.
        remainder: Statistics of the evicted.
        victims: `[B, H, evict_every]` int32.
        policy: One that `can_decode`.
        remembers: Whether evicted rows are folded into the remainder.
        answers: Whether it answers queries.
        recent: The newest tokens where they are stored apart; its fields are taken out.
    """

    def __init__(
        self,
        store: SlotStore,
        packing: Packing,
        remainder: Remainder,
        victims: mx.array,
        policy: Policy,
        remembers: bool,
        answers: bool,
        recent: RecentZone | None = None,
    ):
        from mlx_h2o import _ext
        from mlx_h2o.backends.cpu import stored

        form = kernel_form_of(policy)
        assert form is not None
        self._names = list(store.fields)
        fields = store.fields
        others = [
            fields["positions"],
            fields["scores"] if "scores" in fields else mx.zeros((0,)),
            *remainder.arrays.values(),
            victims,
        ]
        self.nbytes = sum(field.nbytes for field in fields.values()) + victims.nbytes
        self.nbytes += remainder.nbytes if remembers else 0
        store.fields = {}
        self._recent, self._recent_names, newest = recent, list[str](), None
        if recent is not None:
            recent.reserve()
            self._recent_names = list(recent.fields)
            self.nbytes += sum(field.nbytes for field in recent.fields.values())
            newest = _ext.Recent(
                stored(recent.stored("keys")),
                stored(recent.stored("values")),
                recent.fields.get("scores", mx.zeros((0,))),
            )
            recent.fields = {}
        self._layer = _ext.DecodingLayer(
            stored(packing.rows("keys", fields)),
            stored(packing.rows("values", fields)),
            others,
            _ext.PolicyForm(
                score=_ext.Score[form.score],
                priority=_ext.Priority[form.priority],
                per_layer=policy.unit == "layer",
                age_normalised=policy.age_normalised,
                sink=policy.sink,
                evict_every=policy.evict_every,
                decay=form.decay,
                mass_weight=form.mass_weight,
                age_weight=form.age_weight,
            ),
            remembers=remembers,
            answers=answers,
            saturation=SATURATION,
            recent=newest,
        )

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
        plans = [(h.start, h.length, h.victim, h.recent, h.evicted, h.choose) for h in heads]
        zone = (recent.slot, recent.length, recent.leaving) if recent else None
        return self._layer.step(
            q, k, v, scale=scale, sinks=sinks, offset=offset, heads=plans, recent=zone
        )

    def end(self, store: SlotStore) -> tuple[Remainder, mx.array]:
        arrays = iter(self._layer.close())
        rows = [name for name in self._names if name not in ("positions", "scores")]
        # In the order of the extension: keys, values (and what packs them), then the others.
        fields = {name: next(arrays) for name in (*rows, "positions", "scores")}
        store.fields = {name: fields[name] for name in self._names}
        statistics = [next(arrays) for _ in range(4)]
        victims = next(arrays)
        if self._recent is not None:
            # Scores, where there are none, are an empty array.
            newest = dict(zip([*self._recent_names, "scores"], arrays, strict=False))
            self._recent.fields = {name: newest[name] for name in self._recent_names}
        return Remainder(*statistics), victims
