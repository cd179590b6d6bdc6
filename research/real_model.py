"""The cost of packing, policies and shares of slots to a real model's perplexity.

    python -m research.real_model rows TEXT          rows packed alone: plain, in the shipped frame
    python -m research.real_model policies TEXT      uniform budgets at 1/4 of the tokens
    python -m research.real_model shares TEXT PROFILE
                                                  shares of slots by a profile, 16 and fewer bits
    python -m research.real_model widths TEXT        real caches of equal bytes, by the bits of rows

The first three are simulated (`research.simulation`): quality only, nothing is saved. TEXT must not
be the package's calibration text, from which key scaling (`Frame`) and curves are made.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx_h2o
from mlx_h2o._blas import use_openblas
from mlx_h2o.budgets.plan import plain_bytes
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.calibration.scaling_build import found_frames, frames_of
from mlx_h2o.evaluate.measures.perplexity import samples_of
from mlx_h2o.hosts import routing
from mlx_h2o.hosts.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.loading.load import CALIBRATION_TEXT
from mlx_h2o.slots.key_scaling import Frame, RowFormat
from research.simulation import (
    DISTINCT,
    H2O,
    MASS_RATE,
    SALIENT,
    SILENT,
    WINDOW,
    Setting,
    SimulatedCache,
)

FRAME_PASSES = 3
#: Parts of a full cache's bytes at which widths of rows are compared.
PARTS = (4, 8)
#: Arguments of `mlx_h2o.make_prompt_cache`: rows without key scaling and with even shares of slots,
#: and rows by the model's profile.
UNSCALED: dict[str, Any] = {"frames": "none", "budgets": "uniform", "profile": "never"}
WIDTHS: dict[str, dict[str, Any]] = {
    "unscaled, dense rows": {"bits": 16, **UNSCALED},
    "unscaled, values in 8 bits": {"v_bits": 8, **UNSCALED},
    "unscaled, values in 6 bits": {"v_bits": 6, **UNSCALED},
    "unscaled, keys and values in 8 bits": {"bits": 8, **UNSCALED},
    "profile, 6 bits": {"bits": 6},
    "profile, 5 bits": {"bits": 5},
    "profile, 5 bits, the newest in 8": {"bits": 5, "recent_bits": 8},
    "profile, 4 bits": {"bits": 4},
    "profile, 4 bits, the newest in 8": {"bits": 4, "recent_bits": 8},
}
#: Bits of a plain row's numbers, in which budgets are counted.
PLAIN_BITS = 16


class RowsAsStored(KVCache):
    """A full cache whose rows pass through a row format."""

    def __init__(self, row_format: RowFormat):
        super().__init__()
        self.row_format = row_format

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return super().update_and_fetch(self.row_format.keys(keys), self.row_format.values(values))


def report(name: str, nll: Sequence[float], full: Sequence[float], *columns: str) -> None:
    """Print one line: perplexity and loss, then the given columns."""
    perplexity = math.exp(statistics.fmean(nll))
    print(f"| {name} | {perplexity:.3f} | {' | '.join([lost(nll, full), *columns])} |", flush=True)


def lost(nll: Sequence[float], beside: Sequence[float]) -> str:
    """Loss in perplexity, and its standard error over the samples, which are paired."""
    worse = [a - b for a, b in zip(nll, beside, strict=True)]
    return f"{math.expm1(statistics.fmean(worse)):+.2%} ± {standard_error(worse):.2%}"


def standard_error(of_samples: Sequence[float]) -> float:
    """The standard error of the mean; NaN for one sample."""
    if len(of_samples) < 2:
        return math.nan
    return float(statistics.stdev(of_samples) / len(of_samples) ** 0.5)


def loaded(name: str) -> tuple[nn.Module, Any]:
    """A model that computes in float32, with attention through this library; its tokenizer.

    Args:
        name: The model's name, as in `mlx_h2o.load`.
    """
    routing.install()
    use_openblas()
    model, tokenizer = mlx_h2o.load(name)
    model.set_dtype(mx.float32)
    return model, tokenizer


def calibration_passes(tokenizer: Any, count: int, length: int) -> mx.array:
    """Token ids `[count, length]` of the bundled calibration text."""
    return samples_of(tokenizer.encode(CALIBRATION_TEXT.read_text()), count, length, None)


def formats_of(model: nn.Module, tokenizer: Any, length: int, bits: int) -> list[RowFormat]:
    """Every layer's row format with key scaling."""
    passes = calibration_passes(tokenizer, FRAME_PASSES, length)
    frames = frames_of(model, [passes[i : i + 1] for i in range(FRAME_PASSES)])
    return [RowFormat(bits, bits, frame=frame) for frame in frames]


def shipped_frames(model: nn.Module, context: int) -> list[Frame]:
    """The key scaling that the model's caches get for `context` tokens."""
    kinds = layer_kinds(model)
    identity = identity_by_kinds(model, kinds)
    frames = found_frames(identity, found_profile(model, identity))
    if not frames:
        sys.exit("The model has no frames: make a profile first (mlx_h2o calibrate).")
    of_layers = frames[min((c for c in frames if c >= context), default=max(frames))]
    return [Frame(mx.array(centre), mx.array(scale)) for centre, scale in of_layers]


def rows(model: nn.Module, samples: mx.array) -> None:
    """Measure every format, one pass over the samples."""
    frames = shipped_frames(model, samples.shape[1])
    formats: dict[str, list[RowFormat]] = {}
    for bits in (8, 4):
        formats[f"mlx-lm's, {bits} bits"] = [RowFormat(bits, bits, by_range=False)] * len(frames)
    for bits, group in ((8, 64), (6, 64), (6, 32), (5, 64), (5, 32), (4, 64), (4, 32)):
        name = f"in the frame, {bits} bits, groups of {group}"
        formats[name] = [RowFormat(bits, bits, group, frame=frame) for frame in frames]
    full = nats(model, samples, make_prompt_cache)
    print("| what | perplexity | loss |\n|---|---:|---:|")
    report("full cache", full, full)
    for name, of_layers in formats.items():
        nll = nats(model, samples, lambda _, of=of_layers: [RowsAsStored(f) for f in of])
        report(name, nll, full)


def nats(
    model: nn.Module, samples: mx.array, make: Callable[[nn.Module], list[Any]], first: int = 0
) -> list[float]:
    """Nats per token of each sample, over the tokens after `first`."""
    losses: list[float] = []
    for i in range(samples.shape[0]):
        tokens = samples[i : i + 1]
        logits = model(tokens[:, :-1], cache=make(model))[:, first:].astype(mx.float32)
        losses.append(nn.losses.cross_entropy(logits, tokens[:, first + 1 :]).mean().item())
    return losses


def simulate(model: nn.Module, samples: mx.array, settings: Sequence[Setting], first: int) -> None:
    """Simulate all settings side by side, token by token; scored from token `first` on.

    The first setting is the full cache; the others are compared with the second. Divergence is that
    of next-token distributions from the full cache's (KL, 1000 to a nat): the mean loss on a text
    that the model itself wrote.
    """
    caches = [SimulatedCache(settings, i, samples.shape[1]) for i in range(len(model.layers))]
    nll, far = side_by_side(model, samples, caches, len(settings), first)
    print("| what | perplexity | loss | beside the second line | divergence |")
    print("|---|---:|---:|---:|---:|")
    for setting, losses, d in zip(settings, nll, far, strict=True):
        divergence = f"{statistics.fmean(d):.2f} ± {standard_error(d):.2f}"
        report(setting.name, losses, nll[0], lost(losses, nll[1]), divergence)


def side_by_side(
    model: nn.Module,
    samples: mx.array,
    caches: Sequence[SimulatedCache],
    count: int,
    first: int,
) -> tuple[list[list[float]], list[list[float]]]:
    """Run the samples through several settings, token by token.

    Args:
        model: The model.
        samples: Token ids `[n, T]`.
        caches: One for each layer, with `count` settings; the first setting is the full cache.
        count: The number of settings.
        first: The first token that is scored.

    Returns:
        For each setting and sample, nats per token, and the divergence of next-token distributions
        from the full cache's (KL, 1000 to a nat).
    """
    n, T = samples.shape
    tokens = mx.concatenate([samples] * count)
    total, apart = mx.zeros(n * count), mx.zeros(n * count)
    for i in range(T - 1):
        logits = model(tokens[:, i : i + 1], cache=caches)[:, -1].astype(mx.float32)
        logs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if i + 1 >= first:
            total = total + nn.losses.cross_entropy(logits, tokens[:, i + 1])
            full = mx.concatenate([logs[:n]] * count)
            apart = apart + (mx.exp(full) * (full - logs)).sum(axis=-1)
        mx.eval(total, apart, [cache.state for cache in caches])
        if i % 64 == 0:
            print(f"token {i} of {T}", file=sys.stderr)
    nll, far = ((x / (T - first)).reshape(count, n).tolist() for x in (total, apart * 1000))
    return nll, far


def policies(model: nn.Module, samples: mx.array) -> None:
    """Simulate policies with uniform budgets at 1/4, 16-bit rows."""
    slots = samples.shape[1] // 4
    heads = model.args.num_key_value_heads
    uniform = [[slots] * heads] * len(model.layers)
    settings = [
        Setting("full cache"),
        Setting("window", uniform, SILENT, WINDOW),
        Setting("h2o", uniform, SILENT, H2O),
        Setting("distinct, second order", uniform, 4.0, DISTINCT),
        Setting("salient, no remainder", uniform, SILENT, SALIENT),
        Setting("salient, first order", uniform, 0.0, SALIENT),
        Setting("salient, second order", uniform, 4.0, SALIENT),
        Setting("mass per step, first order", uniform, 0.0, MASS_RATE),
    ]
    simulate(model, samples, settings, slots)


def shares(model: nn.Module, tokenizer: Any, samples: mx.array, profile: Profile) -> None:
    """Simulate the policy's shares and orders at 1/4 and 1/8 of the bytes, in several widths."""
    T = samples.shape[1]
    width = layer_kinds(model)[0].widths.key
    settings = [Setting("full cache")]
    for part, bits in ((4, PLAIN_BITS), (4, 6), (8, PLAIN_BITS), (8, 6), (8, 5)):
        formats = formats_of(model, tokenizer, T, bits) if bits < PLAIN_BITS else None
        row = formats[0] if formats else RowFormat()
        plain = RowFormat().row_bytes(width, width)
        budgets = profile.budgets(min(T // part * plain // row.row_bytes(width, width), T))
        orders = profile.saturation(budgets)
        settings.append(Setting(f"1/{part}, {bits} bits", budgets, orders, SALIENT, formats))
    simulate(model, samples, settings, T // 4)


def widths(model: nn.Module, samples: mx.array, parts: Sequence[int]) -> None:
    """Run real caches of the same bytes, token by token; scored from a quarter of the tokens on."""
    T = samples.shape[1]
    first = T // 4
    full = stepwise(model, samples, make_prompt_cache(model), first)
    dense = sum(map(plain_bytes, layer_kinds(model))) * T
    print("| rows | perplexity | loss | part of the bytes | slots a head |")
    print("|---|---:|---:|---:|---:|")
    for part in parts:
        for name, options in WIDTHS.items():
            try:
                cache = mlx_h2o.make_prompt_cache(
                    model, max_bytes=dense // part, context=T, **options
                )
            except ValueError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            slots = [n for entry in cache for n in entry.budgets]
            nll = stepwise(model, samples, cache, first)
            report(name, nll, full, f"1/{part}", f"{statistics.fmean(slots):.0f}")


def stepwise(model: nn.Module, samples: mx.array, cache: list[Any], first: int) -> list[float]:
    """Nats per token of each sample, read token by token, over the tokens after `first`."""
    T, total = samples.shape[1], mx.zeros(samples.shape[0])
    for i in range(T - 1):
        logits = model(samples[:, i : i + 1], cache=cache)[:, -1].astype(mx.float32)
        if i + 1 > first:
            total = total + nn.losses.cross_entropy(logits, samples[:, i + 1])
        mx.eval(total, [entry.state for entry in cache if not hasattr(entry, "budgets")])
    return (total / (T - 1 - first)).tolist()  # type: ignore[return-value]


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("what", choices=("rows", "policies", "shares", "widths"))
    made.add_argument("paths", nargs="+", type=Path)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument(
        "--parts", type=int, nargs="+", default=PARTS, help="of the bytes; widths only"
    )
    return made


def main() -> None:
    """Parse and run; tables are Markdown."""
    args = parser().parse_args()
    mlx_h2o.install()
    model, tokenizer = mlx_h2o.load(args.model)
    text = tokenizer.encode(args.paths[0].read_text())
    samples = samples_of(text, args.samples, args.tokens, None)
    if args.what == "rows":
        rows(model, samples)
    elif args.what == "policies":
        policies(model, samples)
    elif args.what == "widths":
        widths(model, samples, args.parts)
    else:
        shares(model, tokenizer, samples, Profile.load(args.paths[1]))


if __name__ == "__main__":
    main()
