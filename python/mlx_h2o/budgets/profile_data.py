"""The measurements of a calibration beyond one curve for each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mlx_h2o._utils import checks
from mlx_h2o._utils.json_arrays import as_text, of_text
from mlx_h2o.budgets.allocation import falling

#: Key scaling (`Frame`) of each layer: centre and scale `[2, H, D]`.
LayerFrames = tuple[np.ndarray, ...]


def frames_for(frames: dict[int, LayerFrames], context: int) -> LayerFrames:
    """Key scaling made for the next context up from so many positions, or for the longest one."""
    return frames[min((known for known in frames if known >= context), default=max(frames))]


@dataclass(frozen=True, eq=False)
class Measured:
    """Errors of a model's heads, run with a policy token by token, and key scaling of packed keys.

    Attributes:
        orders: Saturations t of the remainder that were measured; 0 is the first order.
        spans: Ends of spans of positions, ascending; the last is the text's length.
        errors: Mean error of each head, order, span and number of slots `[heads, orders, spans,
            grid]`, the model's layers one after the other; in nats where the heads' sensitivities
            were measured (`calibration/sensitivity.py`), as all losses below.
        packing: For each number of bits, each head's error when all its rows are packed, with key
            scaling `[heads]`.
        group_size: Elements of these packed rows that share a scale.
        frames: Key scaling by context (for positions from 0 to below it), one entry a layer.
        policy: Name and settings of the policy that ran.
        echoes: Each head's retrieval loss: its error where a stretch of text repeats an earlier one
            that the head no longer holds (`calibration/retrieval_loss.py`), `[heads]`; None if not
            measured.
    """

    orders: tuple[float, ...]
    spans: tuple[int, ...]
    errors: np.ndarray
    packing: dict[int, np.ndarray] = field(default_factory=dict)
    group_size: int = 64
    frames: dict[int, LayerFrames] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    echoes: np.ndarray | None = None

    def check(self, heads: Sequence[int], widths: Sequence[int], grid: Sequence[int]) -> None:
        """Raise ValueError unless all of it fits a model with these heads and widths.

        Args:
            heads: KV heads of each layer.
            widths: Width of a key, of each layer.
            grid: Numbers of slots, ascending.
        """
        checks.wholes("spans", self.spans, 1)
        if list(self.spans) != sorted(set(self.spans)):
            raise ValueError(f"A profile's spans must ascend; got {self.spans}.")
        if not self.orders or not all(checks.finite("orders", t) >= 0 for t in self.orders):
            raise ValueError(f"A profile's orders must be numbers from 0; got {self.orders}.")
        shape: tuple[int, ...] = (sum(heads), len(self.orders), len(self.spans), len(grid))
        losses = [("errors", self.errors, shape)]
        losses += [(f"{bits} bits", x, (sum(heads),)) for bits, x in self.packing.items()]
        losses += [] if self.echoes is None else [("echoes", self.echoes, (sum(heads),))]
        for name, numbers, expected in losses:
            if numbers.shape != expected or not (numbers >= 0).all():
                raise ValueError(
                    f"A profile's {name} must be losses {expected}; they are {numbers.shape}."
                )
        check_frames(self.frames, heads, widths)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Measured):
            return NotImplemented
        return self.json() == other.json()

    __hash__ = None  # type: ignore[assignment]

    def span_for(self, length: int) -> int:
        """The first span that ends at or after `length`, or the last."""
        return next((s for s in self.spans if s >= length), self.spans[-1])

    def errors_upto(self, length: int) -> np.ndarray:
        """Mean errors `[heads, orders, grid]` over the positions below a span's end."""
        starts = (0, *self.spans[:-1])
        weights = [
            max(end - start, 0) * (end <= length)
            for start, end in zip(starts, self.spans, strict=True)
        ]
        return np.average(self.errors.astype(np.float64), axis=2, weights=weights)

    def curves_upto(self, length: int) -> list[tuple[float, ...]]:
        """Each head's better order at each number of slots, over the positions below `length`."""
        best = self.errors_upto(length).min(axis=1)
        return [falling([float(f"{x:.4g}") for x in curve]) for curve in best.tolist()]

    def weighed(self, by: np.ndarray) -> Measured:
        """The same measurements with each head's losses times a number.

        Args:
            by: The numbers, `[heads]`.
        """
        one = by.astype(np.float32)
        return replace(
            self,
            errors=self.errors * one[:, None, None, None],
            packing={bits: losses * one for bits, losses in self.packing.items()},
            echoes=None if self.echoes is None else self.echoes * one,
        )

    def json(self) -> dict[str, Any]:
        """The measurements as JSON types."""
        return {
            "policy": self.policy,
            "orders": list(self.orders),
            "spans": list(self.spans),
            "errors": as_text(self.errors),
            "group_size": self.group_size,
            "packing": {str(bits): as_text(x) for bits, x in self.packing.items()},
            "frames": json_of_frames(self.frames),
        } | ({} if self.echoes is None else {"echoes": as_text(self.echoes)})

    @classmethod
    def of_json(cls, data: Any) -> Measured:
        """The measurements of a `json`; the caller must still call `check`."""
        return cls(
            tuple(data["orders"]),
            tuple(data["spans"]),
            of_text(data["errors"]),
            {int(bits): of_text(x) for bits, x in data["packing"].items()},
            data["group_size"],
            frames_of_json(data["frames"]),
            dict(data["policy"]),
            of_text(data["echoes"]) if "echoes" in data else None,
        )


def json_of_frames(frames: dict[int, LayerFrames]) -> dict[str, Any]:
    """Key scaling as JSON types."""
    return {
        str(context): [as_text(frame, "float16") for frame in layers]
        for context, layers in frames.items()
    }


def frames_of_json(data: Any) -> dict[int, LayerFrames]:
    """The key scaling of a `json_of_frames`; the caller must still call `check_frames`."""
    return {
        int(context): tuple(of_text(frame) for frame in layers) for context, layers in data.items()
    }


def check_frames(
    frames: dict[int, LayerFrames], heads: Sequence[int], widths: Sequence[int]
) -> None:
    """Raise ValueError unless this is key scaling for a model with such heads and widths.

    Args:
        frames: Key scaling of the layers, by context.
        heads: KV heads of each layer.
        widths: Width of a key, of each layer.
    """
    for context, layers in frames.items():
        checks.whole("context", context, 1)
        shapes = [frame.shape for frame in layers]
        if shapes != [(2, h, d) for h, d in zip(heads, widths, strict=True)]:
            raise ValueError(f"A profile's frames for {context} tokens are {shapes}.")
        if not all((frame[1] > 0).all() for frame in layers):
            raise ValueError("A profile's frames must have scales above 0.")
