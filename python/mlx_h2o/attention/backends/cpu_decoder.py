"""Fused decode steps on the CPU; the extension owns a layer's arrays during them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_h2o import _ext
from mlx_h2o.attention.backends.cpu import stored
from mlx_h2o.attention.backends.decoder import Decoder, DecodeStep, Lent, PlannedToken
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.slots.remainder import STATISTICS, Remainder
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
        self._scored, self._remembers = "scores" in lent.fields, settings.remembers
        self._returned = [*(f"slots.{name}" for name in rows), *others]
        self._rows = [f"slots.{name}" for name in rows]
        self._lengths = [] if lengths is None else ["value_lengths"]
        self._recent_rows = list[str]()
        self.nbytes = lent.nbytes(settings.remembers)
        newest = None
        if lent.window is not None:
            recent = packing.recent
            assert recent is not None
            rows = [*recent.names("keys"), *recent.names("values")]
            self._recent_rows = [f"recent.{name}" for name in rows]
            newest_lengths = [f"recent.{name}" for name in self._lengths]
            self._returned += [*self._recent_rows, "recent.scores", *newest_lengths]
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
        )

    def step(self, step: DecodeStep) -> mx.array:
        token = step.token
        out, changed = self._layer.step(
            step.q,
            step.k,
            step.v,
            scale=step.scale,
            sinks=step.sinks,
            offset=token.offset,
            heads=list(token.heads),
            recent=token.recent,
            undo=token.before is not None,
            aged_from=token.aged_from,
        )
        if token.before is not None:
            token.before.arrays = dict(zip(self._changed_by(token), changed, strict=True))
        return out

    @staticmethod
    def step_together(
        decoders: Sequence[CPUDecoder],
        tokens: Sequence[PlannedToken],
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """One token in each of several layers, in one operation.

        Args:
            decoders: The decoders that hold the layers.
            tokens: The tokens' plans; none can be undone.
            q: `[B, Hq, 1, D]`, the layers' sequences one after the other.
            k: `[B, H, 1, D]`.
            v: `[B, H, 1, Dv]`.
            scale: Factor on q.k.
            sinks: Attention-sink logits `[Hq]`.

        Returns:
            `[B, Hq, 1, Dv]`.
        """
        plans = [
            (token.offset, list(token.heads), token.recent, token.aged_from) for token in tokens
        ]
        return _ext.step_together(
            [decoder._layer for decoder in decoders],
            q, k, v, scale=scale, sinks=sinks, tokens=plans,
        )  # fmt: skip

    def _changed_by(self, token: PlannedToken) -> list[str]:
        """Names of the arrays that a step returns, in the order of the extension."""
        names = []
        overwrites = any(head.victim >= 0 for head in token.heads)
        if overwrites:
            names += ["slot", *self._rows, "slots.positions"]
            names += [f"slots.{name}" for name in self._lengths]
        if self._scored:
            names.append("slots.scores")
        if overwrites and self._remembers:
            names += [f"remainder.{name}" for name in STATISTICS]
        if any(head.choose for head in token.heads):
            names.append("victims")
        if token.recent is not None:
            if token.recent.leaving:
                names += [*self._recent_rows, *(f"recent.{name}" for name in self._lengths)]
            names += ["recent.scores"] if self._scored else []
        return names

    def end(self) -> Lent:
        arrays = dict(zip(self._returned, self._layer.close(), strict=True))
        if not self._scored:  # then the array returned for them is empty
            for name in ("slots.scores", "recent.scores"):
                arrays.pop(name, None)
        window = under("recent.", arrays) if self._recent_rows else None
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
