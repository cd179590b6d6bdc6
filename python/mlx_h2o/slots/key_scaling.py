"""Key scaling (`Frame`): each channel's centre and scale, removed from keys before packing.

A few key channels carry large, constant offsets, and one of them in a group of 64 leaves the others
few levels. With k' = (k - centre) / scale, per channel and KV head, each channel gets the part of
its group's range that it is worth to queries (`calibration/scaling_fit.py`). A query q attends to
packed keys as q' = scale q: q.k = q'.k' + q.centre, and the last term is the same for every slot,
so it cancels in the softmax. Values need no scaling. Related: SmoothAttention (QServe, arXiv
2405.04532; a scale alone), KIVI, KVQuant.
A cache with key scaling uses scaled keys throughout: keys and queries are scaled once, at its door
(`layer/step.py`), and slots, recent window, remainder, distances and files hold scaled keys only.
Results need no conversion back: the remainder's logit moves by q.centre too, and its second-order
term, of q'^2 and var(k'), is the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

# The least scale, so that a constant channel can be divided by it.
LEAST_SCALE = 1e-4


@dataclass(frozen=True, eq=False)
class Frame:
    """Key scaling of one layer.

    Attributes:
        centre: Each channel's centre, `[H, D]`; kept in float32.
        scale: Each channel's scale, `[H, D]`, above 0; kept in float32.

    Raises:
        ValueError: The shapes are wrong or differ, or numbers cannot scale a key (not finite, a
            scale not above 0).
    """

    centre: mx.array
    scale: mx.array

    def __post_init__(self) -> None:
        for name in ("centre", "scale"):
            part = mx.array(getattr(self, name)).astype(mx.float32)
            object.__setattr__(self, name, mx.contiguous(part))
        if self.centre.ndim != 2 or self.centre.shape != self.scale.shape:
            raise ValueError(
                "A frame's centre and scale are [KV heads, key width] each; got "
                f"{self.centre.shape} and {self.scale.shape}."
            )
        finite = mx.isfinite(self.centre).all() & mx.isfinite(self.scale).all()
        if not (finite & (self.scale > 0).all()).item():
            raise ValueError("A frame's centre is finite, its scale finite and above 0.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and all(
            mx.array_equal(mine, theirs).item()
            for mine, theirs in zip(self.arrays, other.arrays, strict=True)
        )

    def __hash__(self) -> int:
        return hash(self.centre.shape)

    @classmethod
    def of(cls, *parts: mx.array, centred: bool = True) -> Frame:
        """Key scaling by the mean and greatest distance of keys as cached, with RoPE applied.

        For use without knowledge of the queries: each channel fills the range alike.

        Args:
            parts: Keys `[B, H, n, D]` of a text like those to come; read one part after the other.
            centred: Whether to use the mean as centre. False beside attention sinks, whose logits a
                centre does not move.
        """
        count = sum(part.shape[0] * part.shape[2] for part in parts)
        statistics = []
        for part in parts:
            keys = part.astype(mx.float32)
            statistics.append([keys.sum(axis=(0, 2)), keys.min(axis=(0, 2)), keys.max(axis=(0, 2))])
            mx.eval(statistics[-1])
        sums, lows, highs = (mx.stack(list(of)) for of in zip(*statistics, strict=True))
        centre = sums.sum(axis=0) / count if centred else mx.zeros(sums.shape[1:])
        distance = mx.maximum(highs.max(axis=0) - centre, centre - lows.min(axis=0))
        return cls(centre, mx.maximum(distance, LEAST_SCALE))

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """Centre and scale."""
        return self.centre, self.scale

    @property
    def nbytes(self) -> int:
        return self.centre.nbytes + self.scale.nbytes

    @cached_property
    def moves(self) -> bool:
        """Whether there is a centre, which moves all of a query's logits alike."""
        return bool((self.centre != 0).any().item())

    def enter(self, keys: mx.array) -> mx.array:
        """Keys `[B, H, T, D]` scaled for packing, in their dtype."""
        framed = (keys.astype(mx.float32) - self.centre[:, None]) / self.scale[:, None]
        return framed.astype(keys.dtype)

    def enter_queries(self, queries: mx.array) -> mx.array:
        """Queries `[B, Hq, T, D]` scaled to attend to scaled keys, in their dtype."""
        scale = mx.repeat(self.scale, queries.shape[1] // self.scale.shape[0], axis=0)
        return (queries.astype(mx.float32) * scale[:, None]).astype(queries.dtype)

    def leave(self, keys: mx.array) -> mx.array:
        """Unscaled keys `[B, H, T, D]`, in float32."""
        return keys.astype(mx.float32) * self.scale[:, None] + self.centre[:, None]
