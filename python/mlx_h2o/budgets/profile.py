"""Head budgets: a model's profile says how many slots each KV head deserves.

Heads differ more than policies do: a few copy and recall over long distances, most attend to the
last tokens. A profile holds, for every KV head, the model's loss when that head alone is limited to
b slots (and the remainder); with it the better order of the remainder, the loss by packing the
head's rows, and key scaling (`Frame`) for packed keys. Related: DuoAttention (arXiv 2410.10819),
AdaKV (2407.11550), HeadKV (2410.19258).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_h2o import _checks
from mlx_h2o.budgets import allocation
from mlx_h2o.budgets.allocation import falling
from mlx_h2o.budgets.json_arrays import as_text, of_text
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.slots.remainder import SATURATION

FORMAT = "mlx-h2o profile"
#: Version 1 had only the curves.
VERSIONS = (1, 2)
# The name of a profile's file beside a model's weights.
FILE_NAME = "mlx_h2o_profile.json"
# With less than 4 sinks, a few recent tokens and some to choose from, a head is useless.
SMALLEST_BUDGET = 12
#: Weight of the retrieval loss, 0.25 nats in all (`calibration/retrieval_loss.py`), beside the loss
#: over prose. At an eighth of 512 tokens SmolLM2's answers about facts diverge by 0.032, 0.035 and
#: 0.050 with weights of 0.03, 0.1 and 0.3, its prose by 0.028, 0.029 and 0.041. Of 8 facts
#: Qwen2.5-Coder-1.5B knows 2 and 8 with 0.03 and 0.1; its prose diverges by 0.047 and 0.049.
ECHO_PART = 0.1
#: The part of the retrieval loss that is left in the shares where evicted rows come back. At a
#: sixteenth of the bytes SmolLM2 then diverges by 6 % less on prose, and knows all facts. With none
#: of it left it gains no more. Bits are chosen by all of it: by none, rows would get 6 bits there,
#: which lose 13 % more than 5 (docs/results/experiments.md).
RETURNING_PART = 0.25
#: The part of all heads' retrieval loss that retrieval heads have: 11 of SmolLM2's 90 heads have
#: 0.85 of it, 17 have 0.94. To which rows come back decides little: at an eighth of the bytes prose
#: diverges by 0.030 with 11 and by 0.034 with 17; 10 and 11 of 16 facts are known.
RETRIEVAL_PART = 0.85
# Beyond one part in so many of the calibrated length the curves cover too few evictions, and the
# shares at that size are kept.
LARGEST_PART = 2


#: Key scaling (`Frame`) of each layer: centre and scale `[2, H, D]`.
LayerFrames = tuple[np.ndarray, ...]


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
        _checks.wholes("spans", self.spans, 1)
        if list(self.spans) != sorted(set(self.spans)):
            raise ValueError(f"A profile's spans must ascend; got {self.spans}.")
        if not self.orders or not all(_checks.finite("orders", t) >= 0 for t in self.orders):
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
        """The same measurements with each head's losses over prose times a number.

        Args:
            by: The numbers, `[heads]`.
        """
        one = by.astype(np.float32)
        return replace(
            self,
            errors=self.errors * one[:, None, None, None],
            packing={bits: losses * one for bits, losses in self.packing.items()},
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


@dataclass(frozen=True)
class Profile:
    """The loss of each KV head at each number of slots.

    Attributes:
        model: The identity of the profile's model.
        grid: Numbers of slots, ascending.
        losses: For each bounded layer and KV head the loss at each grid point, non-negative, in
            units of the method; only differences matter.
        method: How the losses were measured.
        details: How the measurement was made (text, tokens, versions, date).
        measured: The further results of a calibration with the policy itself; None in version 1.
    """

    model: ModelIdentity
    grid: tuple[int, ...]
    losses: tuple[tuple[tuple[float, ...], ...], ...]
    method: str
    details: dict[str, Any] = field(default_factory=dict)
    measured: Measured | None = None

    def __post_init__(self) -> None:
        self.model.check()
        shape = tuple(len(layer) for layer in self.losses)
        if shape != tuple(self.model.kv_heads):
            raise ValueError(f"A profile of {self.model.kv_heads} KV heads has losses for {shape}.")
        allocation.check_curves(self.grid, [curve for layer in self.losses for curve in layer])
        if not isinstance(self.method, str) or not isinstance(self.details, dict):
            raise ValueError("A profile is damaged: its method is a text, its details are a table.")
        if self.measured:
            self.measured.check(self.model.kv_heads, self.model.key_widths, self.grid)

    @classmethod
    def of(
        cls,
        model: ModelIdentity,
        grid: Sequence[int],
        measured: Measured,
        method: str,
        details: dict[str, Any] | None = None,
    ) -> Profile:
        """A profile whose curves are the errors measured over the whole text.

        Args:
            model: The model's identity.
            grid: Numbers of slots, ascending.
            measured: The measurements.
            method: The name of the method.
            details: More entries for the file.
        """
        heads = iter(measured.curves_upto(measured.spans[-1]))
        losses = tuple(tuple(next(heads) for _ in range(count)) for count in model.kv_heads)
        return cls(model, tuple(grid), losses, method, details or {}, measured)

    # -- slots ------------------------------------------------------------------------------------

    def budgets(
        self, mean: int, least: int = SMALLEST_BUDGET, length: int | None = None
    ) -> list[list[int]]:
        """Slots per layer and KV head, `mean` on average, exactly.

        Args:
            mean: Slots per KV head on average.
            least: Slots that every head must have.
            length: Tokens of the conversation so far; no head gets more slots. None for no limit.

        Raises:
            ValueError: mean is below least.
        """
        if mean < least:
            raise ValueError(
                f"A budget of {mean} slots a head is below the {least} that a head needs with this "
                "policy; raise max_size or lower sink and recent."
            )
        if length is not None and length <= mean:
            return self._by_layer([mean] * sum(self.model.kv_heads))
        longest = self.grid[-1]
        at = mean
        if length is None or length > longest:
            at = min(mean, max(longest // LARGEST_PART, least))
        grid, heads = self.wanted_upto(longest if length is None else length)
        slots = allocation.shared_out(grid, heads, at, least)
        if at < mean:
            slots = allocation.scaled(slots, mean * len(slots), least)
        if length is not None:
            slots = allocation.capped(slots, length)
        return self._by_layer(slots)

    def curves_upto(self, length: int) -> tuple[tuple[int, ...], list[tuple[float, ...]]]:
        """Grid and each head's losses for conversations up to a length, where the loss is 0."""
        heads = [curve for layer in self.losses for curve in layer]
        if length >= self.grid[-1]:
            return self.grid, heads
        if self.measured:
            heads = self.measured.curves_upto(self.measured.span_for(length))
        below = sum(b < length for b in self.grid)
        return (*self.grid[:below], length), [(*curve[:below], 0.0) for curve in heads]

    def wanted_upto(self, length: int) -> tuple[tuple[int, ...], list[tuple[float, ...]]]:
        """The curves by which slots are bought: loss and, if it was measured, retrieval loss.

        No policy knows which tokens a query will need again, so a head of b slots is assumed to
        have evicted the part 1 - b/n of n tokens.
        """
        grid, heads = self.curves_upto(length)
        if self.measured is None or self.measured.echoes is None:
            return grid, heads
        gone = ECHO_PART * (1 - np.array(grid) / grid[-1])
        losses = np.array(heads) + np.outer(self.measured.echoes.astype(np.float64), gone)
        return grid, [tuple(curve) for curve in losses.tolist()]

    def where_rows_return(self) -> Profile:
        """The profile of caches to which evicted rows come back: retrieval loss counts less.

        Facts then come back from the file, and slots serve prose better in the other heads.
        """
        if self.measured is None or self.measured.echoes is None:
            return self
        echoes = self.measured.echoes * RETURNING_PART
        return replace(self, measured=replace(self.measured, echoes=echoes))

    def wanted_by_layer(self) -> list[tuple[tuple[float, ...], ...]]:
        """The curves by which slots of long conversations are bought, `[layers][H][grid]`."""
        layers = self._by_layer(self.wanted_upto(self.grid[-1])[1])
        return [tuple(of_layer) for of_layer in layers]

    def retrieval_heads(self) -> list[frozenset[int] | None]:
        """The KV heads of each layer that look far back, for which evicted rows should come back.

        They are the fewest with `RETRIEVAL_PART` of the retrieval loss; None, all of them, where
        that was not measured.
        """
        counts = [len(layer) for layer in self.losses]
        if self.measured is None or self.measured.echoes is None:
            return [None] * len(counts)
        loss = self.measured.echoes
        falling = np.argsort(-loss, kind="stable")
        enough = np.searchsorted(np.cumsum(loss[falling]), RETRIEVAL_PART * loss.sum()) + 1
        heads, first = set(falling[:enough].tolist()), 0
        of_layers: list[frozenset[int] | None] = []
        for count in counts:
            of_layers.append(frozenset(h for h in range(count) if first + h in heads))
            first += count
        return of_layers

    def saturation(self, budgets: Sequence[Sequence[int]]) -> list[list[float]]:
        """Each head's better t for these budgets `[layers][H]`, at the next grid point up."""
        flat = [b for layer in budgets for b in layer]
        if self.measured is None:
            return self._by_layer([SATURATION] * len(flat))
        errors = self.measured.errors_upto(self.measured.spans[-1])
        points = np.minimum(np.searchsorted(self.grid, flat), len(self.grid) - 1)
        # With slots for the whole text no order is better, so the point before it decides.
        points = np.minimum(points, max(len(self.grid) - 2, 0))
        better = errors[np.arange(len(flat)), :, points].argmin(axis=1)
        return self._by_layer([self.measured.orders[i] for i in better])

    def knows(self, policy: str) -> bool:
        """Whether it was measured with this policy, so that its orders apply."""
        return self.measured is not None and self.measured.policy.get("name") == policy

    def loss_of(self, mean: int, least: int, bits: int | None, context: int) -> float:
        """The expected loss of conversations of `context` tokens with so many slots a head.

        The retrieval loss is counted, as where slots are bought. Beyond the calibrated length a
        head is assumed to need the same share of the tokens.

        Args:
            mean: Slots a head, on average.
            least: The fewest slots of a head.
            bits: Bits of a row, or None for dense rows.
            context: Tokens of the conversation.
        """
        longest = self.grid[-1]
        if context > longest:
            mean, context = max(mean * longest // context, least), longest
        grid, heads = self.wanted_upto(context)
        flat = [b for layer in self.budgets(mean, least, context) for b in layer]
        total = sum(allocation.loss_at(grid, c, b) for c, b in zip(heads, flat, strict=True))
        return total + self._packing_loss(bits)

    def _packing_loss(self, bits: int | None) -> float:
        if bits is None:
            return 0.0
        if self.measured is None or bits not in self.measured.packing:
            raise ValueError(f"This profile has no loss for rows of {bits} bits.")
        return float(self.measured.packing[bits].sum())

    def _by_layer(self, heads: Sequence[Any]) -> list[list[Any]]:
        each = iter(heads)
        return [[next(each) for _ in layer] for layer in self.losses]

    # -- files ------------------------------------------------------------------------------------

    def require(self, model: ModelIdentity) -> None:
        """Raise ValueError unless the profile belongs to the model."""
        reason = self.model.difference(model)
        if reason:
            raise ValueError(
                f"This profile was made for another model ({self.model.model_type}): {reason}. "
                'Make one with `mlx_h2o calibrate --model ...`, or pass budgets="uniform".'
            )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(self._text())

    @property
    def digest(self) -> str:
        """SHA-256 of the file that `save` writes, in hexadecimal digits."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def _text(self) -> str:
        fields = {
            "format": FORMAT,
            "version": VERSIONS[-1] if self.measured else VERSIONS[0],
            "model": asdict(self.model),
            "grid": self.grid,
            "losses": self.losses,
            "method": self.method,
            "details": self.details,
        }
        if self.measured:
            fields["measured"] = self.measured.json()
        text = json.dumps(fields, indent=1)
        # Innermost lists go on one line each, so that a profile can be read and compared.
        text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), text)
        return text + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile.

        Raises:
            ValueError: The file is not a profile, or has another version.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"Cannot read the profile {path}: {error}") from error
        return cls.of_text(text, str(path))

    @classmethod
    def of_text(cls, text: bytes, source: str) -> Profile:
        """The profile that a file holds.

        Args:
            text: The file's bytes.
            source: Where they come from, for messages.

        Raises:
            ValueError: They are no profile, or one of another version.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Cannot read the profile {source}: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{source} is no mlx-h2o profile.")
        if data.get("version") not in VERSIONS:
            versions = " and ".join(map(str, VERSIONS))
            raise ValueError(f"{source} has version {data.get('version')}; this reads {versions}.")
        try:
            return cls(
                ModelIdentity.of_json(data["model"]),
                tuple(data["grid"]),
                tuple(tuple(tuple(curve) for curve in layer) for layer in data["losses"]),
                data["method"],
                data["details"],
                Measured.of_json(data["measured"]) if data["version"] > 1 else None,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"The profile {source} is damaged: {error!r}.") from error


# -- key scaling ----------------------------------------------------------------------------------


def frames_for(frames: dict[int, LayerFrames], context: int) -> LayerFrames:
    """Key scaling made for the next context up from so many positions, or for the longest one."""
    return frames[min((length for length in frames if length >= context), default=max(frames))]


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
        _checks.whole("context", context, 1)
        shapes = [frame.shape for frame in layers]
        if shapes != [(2, h, d) for h, d in zip(heads, widths, strict=True)]:
            raise ValueError(f"A profile's frames for {context} tokens are {shapes}.")
        if not all((frame[1] > 0).all() for frame in layers):
            raise ValueError("A profile's frames must have scales above 0.")
