"""`mlx_h2o calibrate`: measure which KV heads of a model need slots, and write its profile."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from mlx_h2o import _checks
from mlx_h2o._files import require_writable, write_kept
from mlx_h2o._progress import progress_bar
from mlx_h2o.budgets.profile import FILE_NAME, SMALLEST_BUDGET, Profile
from mlx_h2o.budgets.profile_store import place_for
from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.calibration.calibrate import calibrated
from mlx_h2o.calibration.checkpoint import CalibratedLayers
from mlx_h2o.cli.options import add_model_option, load_model, read_text
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.report import Table
from mlx_h2o.hosts.layer_probe import identity_by_kinds
from mlx_h2o.hosts.recorder import profiled_kinds, require_weighable
from mlx_h2o.loading.load import CALIBRATION_TEXT
from mlx_h2o.policies import policy_names


def add_parser(commands: Any) -> None:
    """Add `calibrate` to the command's subparsers."""
    parser = commands.add_parser(
        "calibrate",
        help="measure a model's head budgets",
        description="Measure what the model loses when each KV head is limited, and write a "
        "profile by which slots are shared out.",
    )
    add_model_option(parser)
    parser.add_argument(
        "--text", type=Path, default=CALIBRATION_TEXT, metavar="FILE",
        help="a text like those the model will see, whose beginning is read (default: a bundled "
        "story)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=policy_names(), default=DEFAULT_POLICY, metavar="NAME",
        help="the policy that will run (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help=f"default: {FILE_NAME} beside the weights of a local model, else in the user's cache "
        "folder; there it is found again by itself",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=int, default=128, metavar="N",
        help="print the shares for a mean of N slots (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure, write, show."""
    read_text(args.text)  # refuses what cannot be read, before a model is loaded
    if args.out:
        require_writable("--out", args.out)
    _checks.whole("--show", args.show, SMALLEST_BUDGET)
    model, tokenizer = load_model(args)
    kinds = profiled_kinds(model)
    require_weighable(model)
    identity = identity_by_kinds(model, kinds)
    out = args.out or place_for(model, identity)
    require_writable("--out", out)
    checkpoint = CalibratedLayers(out.with_name(out.name + ".part"))
    with progress_bar("calibrating") as bar:
        profile = calibrated(
            model, tokenizer, args.text, bar, policy=args.policy, checkpoint=checkpoint
        )
    write_kept(out, profile.save)
    checkpoint.end()
    if args.json:
        print(json.dumps({"profile": str(out), "budgets": profile.budgets(args.show)}))
        return
    show(slots_by_head(profile, args.show))
    print(f"The profile is {out}.", file=sys.stderr)


def slots_by_head(profile: Profile, mean: int) -> Table:
    """Slots per layer and KV head."""
    budgets = profile.budgets(mean)
    heads = max(map(len, budgets))
    rows = [
        [f"{layer}", *map(str, slots), *[""] * (heads - len(slots))]
        for layer, slots in enumerate(budgets)
    ]
    columns = ["layer", *(f"head {head}" for head in range(heads))]
    title = f"slots per KV head at a mean of {mean} ({profile.method})"
    return Table(title, columns, rows, texts=())
