"""`mlx_h2o calibrate`: measure which KV heads of a model need slots, and write its profile."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mlx_h2o import calibration, checks
from mlx_h2o.builtin import CALIBRATION_TEXT
from mlx_h2o.calibration import LEAST_TOKENS
from mlx_h2o.cli.options import add_model_options, load_model, read_text
from mlx_h2o.cli.tables import show
from mlx_h2o.files import require_writable, write_kept
from mlx_h2o.profile import FILE_NAME, SMALLEST_BUDGET, Profile


def add_parser(commands: Any) -> None:
    """Add `calibrate` to the command's subparsers."""
    parser = commands.add_parser(
        "calibrate",
        help="measure a model's head budgets",
        description="Measure what the model loses when each KV head is limited, and write a "
        "profile by which slots are shared out.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--text", type=Path, default=CALIBRATION_TEXT, metavar="FILE",
        help="a text like those the model will see (default: a bundled story)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=3072, metavar="N",
        help="use the first N tokens of it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--exact", action="store_true",
        help="measure by KL divergence, one head and size at a time: minutes, not seconds",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help=f"default: {FILE_NAME} beside the weights of a local model, where it is found again",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=int, default=128, metavar="N",
        help="print the shares for a mean of N slots (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure, write, show."""
    text = read_text(args.text)
    out = args.out or destination(args.model)
    require_writable("--out", out)
    for name, least in (("tokens", LEAST_TOKENS), ("show", SMALLEST_BUDGET)):
        checks.whole(f"--{name}", getattr(args, name), least)
    model, tokenizer = load_model(args)
    tokens = tokenizer.encode(text)[: args.tokens]
    measure = calibration.calibrate_exactly if args.exact else calibration.calibrate
    with Progress(
        TextColumn("calibrating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("")
        profile = measure(
            model,
            tokens,
            details={
                "text": args.text.name,
                "date": date.today().isoformat(),
                "mlx-h2o": version("mlx-h2o"),
            },
            progress=lambda done, whole: bar.update(task, completed=done, total=whole),
        )
    write_kept(out, profile.save)
    if args.json:
        print(json.dumps({"profile": str(out), "budgets": profile.budgets(args.show)}))
        return
    show(heat_map(profile, args.show))
    print(f"The profile is {out}.", file=sys.stderr)


def destination(model: str) -> Path:
    """Where a model's profile is found again.

    Raises:
        ValueError: The model has no local folder.
    """
    if Path(model).is_dir():
        return Path(model) / FILE_NAME
    return Path(f"{model.rsplit('/', 1)[-1].replace(':', '-')}.{FILE_NAME}")


def heat_map(profile: Profile, mean: int) -> Table:
    """Slots per layer and KV head; brighter is more."""
    budgets = profile.budgets(mean)
    most = max(max(layer) for layer in budgets)
    rows = Table(title=f"slots per KV head at a mean of {mean} ({profile.method})")
    rows.add_column("layer", justify="right")
    for head in range(max(map(len, budgets))):
        rows.add_column(f"head {head}", justify="right")
    for layer, slots in enumerate(budgets):
        cells = [Text(f" {s} ", style=f"black on {shade(s / most)}") for s in slots]
        rows.add_row(str(layer), *cells)
    return rows


def shade(share: float) -> str:
    """A colour from pale (none) to orange (all)."""
    pale, full = (245, 240, 230), (235, 110, 20)
    r, g, b = (round(p + share * (f - p)) for p, f in zip(pale, full, strict=True))
    return f"rgb({r},{g},{b})"
