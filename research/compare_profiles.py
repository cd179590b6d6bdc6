"""The expected loss with slots shared out by some profiles of a model, by the curves of another.

The first profile judges; it is best made from more tokens than the others. Even shares are printed
beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_h2o.budgets.profile import Profile

MEANS = (64, 96, 128, 192, 256)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("judge", type=Path, help="whose curves tell what is lost")
    options.add_argument("profiles", type=Path, nargs="+", help="which share slots out")
    options.add_argument("--means", type=int, nargs="+", default=MEANS, metavar="N")
    return options


def main(arguments: Sequence[str]) -> int:
    """Print a line for each way to share out slots, a column for each mean."""
    args = parser().parse_args(arguments)
    judge = Profile.load(args.judge)
    ways = {str(path): Profile.load(path) for path in args.profiles}
    for profile in ways.values():
        profile.require(judge.model)
    print(f"| slots shared out by | {' | '.join(f'mean of {mean}' for mean in args.means)} |")
    print(f"|---|{'---|' * len(args.means)}")
    even = [[[mean] * heads for heads in judge.model.kv_heads] for mean in args.means]
    rows = {"even shares": even}
    rows |= {name: [p.budgets(mean) for mean in args.means] for name, p in ways.items()}
    for name, budgets in rows.items():
        cells = " | ".join(f"{judge.expected_loss(each):.4f}" for each in budgets)
        print(f"| {name} | {cells} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
