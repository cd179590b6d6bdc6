"""How much does a head's error move the model's predictions? Curves of a profile, weighed by that.

    python -m research.sensitivity [--model builtin:recall-4m] [--out FILE]

A profile's curves are errors of a head's output in parts of the residual stream. The predictions
may feel one head's error more than another's. Each retrieval head alone (`--each`: every head) is
limited to a few slots, and all other heads together; the divergence from the full cache's
predictions (KL, 0.001 nats) over the loss by the curves is the sensitivity. The profile that is
written has each curve, retrieval loss and loss by packing times the head's sensitivity, over the
other heads' (`research.mending --profile`).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlx_h2o.budgets.allocation import loss_at
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.loading.load import EMBEDDED_MODEL
from research.mending import profile_of
from research.real_model import calibration_passes, loaded, side_by_side
from research.simulation import SALIENT_PACKED, Setting, SimulatedCache


def weighed(profile: Profile, sensitivity: list[float]) -> Profile:
    """The profile with each head's losses times its sensitivity."""
    made = profile.measured
    assert made is not None
    assert made.echoes is not None
    by = np.array(sensitivity)
    heads = iter(sensitivity)
    losses = tuple(
        tuple(tuple(x * factor for x in curve) for curve, factor in zip(layer, heads, strict=False))
        for layer in profile.losses
    )
    measured = replace(
        made,
        errors=made.errors * by[:, None, None, None],
        packing={bits: of * by for bits, of in made.packing.items()},
        echoes=made.echoes * by,
    )
    return replace(profile, losses=losses, measured=measured)


def main() -> None:
    """Parse and run; the table is Markdown."""
    args = parser().parse_args()
    model, tokenizer = loaded(args.model)
    T, profile = args.tokens, profile_of(model)
    samples = calibration_passes(tokenizer, args.samples, T)
    names = [(i, h) for i, layer in enumerate(profile.losses) for h in range(len(layer))]
    looking = profile.retrieval_heads()
    alone = [(i, h) for i, h in names if args.each or h in (looking[i] or ())]
    groups = [[head] for head in alone]
    if not args.each:
        groups.append([head for head in names if head not in alone])
    settings = [Setting("full cache")]
    for group in groups:
        budgets = [
            [args.slots if (i, h) in group else T for h in range(len(layer))]
            for i, layer in enumerate(profile.losses)
        ]
        settings.append(Setting("", budgets, profile.saturation(budgets), SALIENT_PACKED))
    caches = [SimulatedCache(settings, i, T) for i in range(len(model.layers))]
    _, far = side_by_side(model, samples, caches, len(settings), T // 4)
    grid, curves = profile.curves_upto(T)
    loss = dict(zip(names, (loss_at(grid, c, args.slots) for c in curves), strict=True))
    found = {}
    print("| heads | divergence, 0.001 nats | loss by the curves, 0.001 | ratio |")
    print("|---|---:|---:|---:|")
    for group, apart in zip(groups, far[1:], strict=True):
        d, told = statistics.fmean(apart), 1000 * sum(loss[head] for head in group)
        found.update(dict.fromkeys(group, d / told))
        name = "{}.{}".format(*group[0]) if len(group) == 1 else f"{len(group)} others"
        print(f"| {name} | {d:.2f} | {told:.2f} | {d / told:.1f} |", flush=True)
    usual = statistics.median(found.values()) if args.each else found[groups[-1][0]]
    if args.out:
        weighed(profile, [found[head] / usual for head in names]).save(args.out)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made.add_argument("--model", default=EMBEDDED_MODEL)
    made.add_argument("--tokens", type=int, default=512)
    made.add_argument("--samples", type=int, default=2)
    made.add_argument("--slots", type=int, default=48)
    made.add_argument("--each", action="store_true", help="every head alone")
    made.add_argument("--out", type=Path)
    return made


if __name__ == "__main__":
    main()
