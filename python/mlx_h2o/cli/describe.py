"""`mlx_h2o describe`: the bounds of a model's cache with the given options, and the reasons."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mlx_h2o.caches.describe import describe
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    cache_settings,
    load_model,
)
from mlx_h2o.models.make import bounded_caches


def add_parser(commands: Any) -> None:
    """Add `describe` to the command's subparsers."""
    parser = commands.add_parser(
        "describe",
        help="tell which of a model's caches are bounded, and why",
        description="Makes a model's cache with these options and tells in five lines what is "
        "bounded, how, and what may grow. Nothing is generated.",
    )
    add_model_option(parser)
    parser.add_argument("--all", action="store_true", help="tell every layer")
    parser.add_argument("--json", action="store_true", help="print every layer as JSON")
    add_cache_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Make the cache, and describe it."""
    settings = cache_settings(args)
    model, _ = load_model(args)
    described = describe(bounded_caches(model, settings))
    if args.json:
        print(json.dumps([vars(layer) for layer in described]))
    elif args.all:
        print("\n".join(map(str, described)))
    else:
        print(described)
