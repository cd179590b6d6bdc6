"""What bytes beside a row cost: as they were, in half precision; and bits that differ by head.

    python tools/fewer_bytes.py                          what the profile expects
    python tools/fewer_bytes.py TEXT ... [--samples 4] [--tokens 1024] [--by-head]
                                                         what texts lose, so many samples of each

By the shares, orders, frames and losses of the model's own profile; texts, which must not be what
that was made of, are simulated (`mlx_h2o.evaluate.simulation`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
from real_model import shipped_frames, simulate

import mlx_h2o
from mlx_h2o.budgets import allocation
from mlx_h2o.budgets.profile import SMALLEST_BUDGET, Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.evaluate.perplexity import samples_of
from mlx_h2o.evaluate.simulation import (
    DITHERED,
    NEAREST,
    SALIENT,
    SALIENT_PACKED,
    Rule,
    Setting,
)
from mlx_h2o.integration.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.storage.key_scaling import Frame, RowFormat

#: Beside a packed row: score and position; the same with a score of 16 bits; and as it was while
#: positions took 32 bits and lengths of values were kept.
BESIDE, BESIDE_HALF, BESIDE_BEFORE = 6, 4, 10
WIDTHS = (4, 5, 6, 8)
#: Slots between which heads choose.
STEP = 4
#: Halvings of the interval in which the price of a byte lies.
HALVINGS = 60


@dataclass(frozen=True)
class ByHead:
    """Rows of one layer whose heads have widths of their own; a `RowFormat` to the simulation.

    Attributes:
        bits: Of each KV head.
        frame: Of its keys.
    """

    bits: tuple[int, ...]
    frame: Frame

    def keys(self, keys: mx.array) -> mx.array:
        """Keys `[B, H, L, D]` as attention will see them."""
        return self._of_heads([(b, self._format(b).keys(keys)) for b in sorted({*self.bits})])

    def values(self, values: mx.array) -> mx.array:
        """Values `[B, H, L, Dv]`, likewise."""
        return self._of_heads([(b, self._format(b).values(values)) for b in sorted({*self.bits})])

    def _format(self, bits: int) -> RowFormat:
        return RowFormat(bits, bits, frame=self.frame)

    def _of_heads(self, stored: Sequence[tuple[int, mx.array]]) -> mx.array:
        mine = mx.array(self.bits)[:, None, None]
        out = stored[0][1]
        for bits, rows in stored[1:]:
            out = mx.where(mine == bits, rows, out)
        return out


@dataclass(frozen=True)
class Shared:
    """Slots and widths of all heads, and what they are expected to lose.

    Attributes:
        slots: Of each head.
        bits: Of each head.
        loss: In units of the profile.
    """

    slots: tuple[int, ...]
    bits: tuple[int, ...]
    loss: float


def shared_out(profile: Profile, total: int, widths: Sequence[int], beside: int) -> Shared:
    """The least expected loss for so many bytes: each head buys where a byte's price is met.

    Args:
        profile: With losses of slots and of packing.
        total: Bytes of all heads' slots.
        widths: Bits that a head may choose among.
        beside: Bytes of a slot beside its row.
    """
    assert profile.measured is not None
    grid, wanted = profile.wanted_upto(profile.grid[-1])
    heads = [allocation.falling(curve) for curve in wanted]
    slots = np.arange(SMALLEST_BUDGET, grid[-1] + 1, STEP)
    lost = np.array([np.interp(slots, grid, curve) for curve in heads])
    width = profile.model.key_widths[0]
    cost = {b: slots * (RowFormat(b, b).row_bytes(width, width) + beside) for b in widths}
    losses = {b: lost + profile.measured.packing[b][:, None] for b in widths}

    def sold(bits: Sequence[int], at: np.ndarray) -> Shared:
        loss = sum(losses[b][h, i] for h, (b, i) in enumerate(zip(bits, at, strict=True)))
        return Shared(tuple(int(slots[i]) for i in at), tuple(bits), float(loss))

    def bought(price: float) -> tuple[list[int], np.ndarray]:
        flat = np.concatenate([losses[b] + price * cost[b] for b in widths], axis=1).argmin(axis=1)
        which, at = np.divmod(flat, len(slots))
        return [widths[i] for i in which], at

    def takes(bits: Sequence[int], at: np.ndarray) -> int:
        return sum(int(cost[b][i]) for b, i in zip(bits, at, strict=True))

    low, high = 1e-15, 1e3
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if takes(*bought(middle)) > total else (low, middle)
    bits, at = bought(high)
    # What no head buys at this price goes to all alike.
    while takes(bits, more := np.minimum(at + 1, len(slots) - 1)) <= total and (more > at).any():
        at = more
    return sold(bits, at)


def alike(profile: Profile, part: int) -> tuple[int, Shared]:
    """Bytes of all slots at a part of a 16-bit cache's, and the best width that all heads share."""
    heads, width = sum(profile.model.kv_heads), profile.model.key_widths[0]
    total = heads * profile.grid[-1] * RowFormat().row_bytes(width, width) // part
    of_widths = [shared_out(profile, total, (bits,), BESIDE) for bits in WIDTHS]
    return total, min(of_widths, key=lambda shared: shared.loss)


def setting(
    name: str,
    profile: Profile,
    shared: Shared,
    frames: Sequence[Frame],
    rounding: str | None = None,
    rule: Rule = SALIENT_PACKED,
) -> Setting:
    """What the simulation runs."""
    edges = np.cumsum([0, *profile.model.kv_heads]).tolist()
    budgets = [list(shared.slots[a:b]) for a, b in pairwise(edges)]
    formats = [
        ByHead(shared.bits[a:b], f) for (a, b), f in zip(pairwise(edges), frames, strict=True)
    ]
    orders = profile.saturation(budgets)
    mean = sum(shared.slots) / len(shared.slots)
    named = f"{name}: {mean:.0f} slots, expected {shared.loss:.4f}"
    return Setting(named, budgets, orders, rule, formats, rounding)  # type: ignore[arg-type]


def by_head(profile: Profile, frames: Sequence[Frame], part: int) -> list[Setting]:
    """The best width for all, and widths of the heads' own, at a part of a 16-bit cache's bytes."""
    total, best = alike(profile, part)
    differing = shared_out(profile, total, WIDTHS, BESIDE)
    counts = ", ".join(f"{differing.bits.count(b)} heads of {b}" for b in WIDTHS)
    return [
        setting(f"1/{part}, {best.bits[0]} bits everywhere", profile, best, frames),
        setting(f"1/{part}, bits by head ({counts})", profile, differing, frames),
    ]


def bytes_beside(profile: Profile, frames: Sequence[Frame], part: int) -> list[Setting]:
    """What else could stand beside rows of the best width, in the same bytes."""
    total, best = alike(profile, part)
    bits = best.bits[0]
    half = shared_out(profile, total, (bits,), BESIDE_HALF)
    before = shared_out(profile, total, (bits,), BESIDE_BEFORE)
    return [
        setting(f"1/{part}, by lengths of values", profile, best, frames, rule=SALIENT),
        setting(f"1/{part}, 10 bytes, lengths of values", profile, before, frames, rule=SALIENT),
        setting(f"1/{part}, scores of 16 bits, to the nearest", profile, half, frames, NEAREST),
        setting(f"1/{part}, scores of 16 bits, dithered", profile, half, frames, DITHERED),
    ]


def expected(profile: Profile, parts: Sequence[int]) -> None:
    """A table of what the profile expects to lose, in its own units."""
    print("| bytes | everywhere | bits by head | 10 bytes beside a row | 4 bytes |")
    print("|---|---|---:|---:|---:|")
    for part in parts:
        total, best = alike(profile, part)
        only = best.bits[:1]
        others = [
            shared_out(profile, total, WIDTHS, BESIDE),
            shared_out(profile, total, only, BESIDE_BEFORE),
            shared_out(profile, total, only, BESIDE_HALF),
        ]
        losses = " | ".join(f"{other.loss / best.loss - 1:+.0%}" for other in others)
        print(f"| 1/{part} | {only[0]} bits, {best.loss:.5f} | {losses} |")


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("texts", type=Path, nargs="*")
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--parts", type=int, nargs="+", default=[4, 8, 16, 32])
    made.add_argument("--by-head", action="store_true", help="nothing but bits by head")
    return made


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    mlx_h2o.install()
    model, tokenizer = mlx_h2o.load(args.model)
    kinds = layer_kinds(model)
    identity = identity_by_kinds(model, kinds)
    profile = found_profile(model, identity)
    if profile is None or profile.measured is None:
        raise SystemExit("The model has no profile: `mlx_h2o calibrate` makes one.")
    if not args.texts:
        expected(profile, args.parts)
        return
    texts = [tokenizer.encode(path.read_text()) for path in args.texts]
    samples = mx.concatenate([samples_of(text, args.samples, args.tokens, None) for text in texts])
    frames = shipped_frames(model, args.tokens)
    for part in args.parts:
        sides = by_head(profile, frames, part)
        if not args.by_head:
            sides += bytes_beside(profile, frames, part)
        simulate(model, samples, [Setting("full cache"), *sides], 64)


if __name__ == "__main__":
    main()
