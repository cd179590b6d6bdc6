"""Fused decode steps on the CPU; the extension owns a layer's arrays during them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import mlx.core as mx

from mlx_h2o import _ext
from mlx_h2o.attention.backends.cpu import stored
from mlx_h2o.attention.backends.decoder import Decoder, DecodeStep, Lent, TokenPlan
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.slots.journal import StepBefore
from mlx_h2o.slots.remainder import Remainder
from mlx_h2o.slots.slot_store import under


class CPUDecoder(Decoder):
    """A layer whose arrays the CPU's kernel holds.

    Args:
        lent: The arrays; there must be no other reference to them, or the kernel copies them once.
        settings: The layer's settings; `choice.accepts` must be true of them.
    """

    on_gpu = False

    def __init__(self, lent: Lent, settings: CacheSettings):
        packing = settings.packing
        absent = mx.zeros((0,))
        others = {
            "slots.positions": lent.fields["positions"],
            "slots.scores": lent.fields.get("scores", absent),
            **{f"remainder.{name}": array for name, array in lent.remainder.arrays.items()},
            "victims": lent.victims,
        }
        lengths = lent.fields.get("value_lengths")
        if lengths is not None:
            others["slots.value_lengths"] = lengths
        # The arrays that the extension returns, in its order; dicts of fields may have another one.
        rows = [*packing.names("keys"), *packing.names("values")]
        self._scored, self._windowed = "scores" in lent.fields, lent.window is not None
        self._returned = [*(f"slots.{name}" for name in rows), *others]
        # The journal's entries of the steps that the extension can take back.
        self._kept = deque[StepBefore](maxlen=settings.undo)
        self.nbytes = lent.nbytes(settings.remembers)
        newest = None
        if lent.window is not None:
            recent = packing.recent
            assert recent is not None
            rows = [*recent.names("keys"), *recent.names("values")]
            names = [*rows, "scores", *([] if lengths is None else ["value_lengths"])]
            self._returned += [f"recent.{name}" for name in names]
            newest = _ext.Recent(
                stored(recent.rows("keys", lent.window)),
                stored(recent.rows("values", lent.window)),
                lent.window.get("scores", absent),
                lent.window.get("value_lengths"),
            )
        self._layer = _ext.DecodingLayer(
            stored(packing.rows("keys", lent.fields)),
            stored(packing.rows("values", lent.fields)),
            list(others.values()),
            _kernel_policy_of(settings),
            remembers=settings.remembers,
            answers=settings.remainder,
            saturation=list(settings.saturations(lent.remainder.count.shape[1])),
            recent=newest,
            frame=None if settings.frame is None else _ext.Frame(*settings.frame.arrays),
            undo=settings.undo,
        )

    def step(self, step: DecodeStep) -> mx.array:
        return self.step_together(
            [self], [step.tokens], step.q, step.k, step.v, step.scale, step.sinks
        )

    @staticmethod
    def step_together(
        decoders: Sequence[CPUDecoder],
        tokens: Sequence[Sequence[TokenPlan]],
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """L tokens in each of several layers, in one operation.

        Args:
            decoders: The decoders that hold the layers.
            tokens: The plans of each layer's tokens.
            q: `[B, Hq, L, D]`, the layers' sequences one after the other.
            k: `[B, H, L, D]`.
            v: `[B, H, L, Dv]`.
            scale: Factor on q.k.
            sinks: Attention-sink logits `[Hq]`.

        Returns:
            `[B, Hq, L, Dv]`.
        """
        plans = [
            [(token.offset, token.heads, token.recent, token.aged_from) for token in of_layer]
            for of_layer in tokens
        ]
        out = _ext.step(
            [decoder._layer for decoder in decoders], q, k, v,
            scale=scale, sinks=sinks, tokens=plans,
        )  # fmt: skip
        for decoder, of_layer in zip(decoders, tokens, strict=True):
            if decoder._kept.maxlen:
                decoder._kept.extend(token.before for token in of_layer if token.before is not None)
        return out

    @property
    def journal_bytes(self) -> int:
        return self._layer.journal_bytes

    def take_back(self, count: int) -> bool:
        if count > len(self._kept):
            return False
        self._layer.take_back(count)
        for _ in range(count):
            self._kept.pop()
        return True

    def end(self) -> Lent:
        if self._kept:
            for before, changed in zip(self._kept, self._layer.journal(), strict=True):
                names = ("slot" if field < 0 else self._returned[field] for field, _ in changed)
                before.arrays = dict(zip(names, (array for _, array in changed), strict=True))
        arrays = dict(zip(self._returned, self._layer.close(), strict=True))
        if not self._scored:  # then the array returned for them is empty
            for name in ("slots.scores", "recent.scores"):
                arrays.pop(name, None)
        window = under("recent.", arrays) if self._windowed else None
        remainder = Remainder(**under("remainder.", arrays))
        return Lent(under("slots.", arrays), remainder, arrays["victims"], window)


def _kernel_policy_of(settings: CacheSettings) -> _ext.KernelPolicy:
    """A policy in the extension's type."""
    policy, kernel = settings.policy, settings.kernel_policy
    assert kernel is not None
    return _ext.KernelPolicy(
        score=_ext.Score[kernel.score],
        priority=_ext.Priority[kernel.priority],
        per_layer=kernel.per_layer,
        age_normalised=kernel.age_normalised,
        sink=policy.sink,
        evict_every=policy.evict_every,
        decay=kernel.decay,
        distance_weight=kernel.distance_weight,
        mass_weight=kernel.mass_weight,
        value_weight=kernel.value_weight,
        age_weight=kernel.age_weight,
    )
