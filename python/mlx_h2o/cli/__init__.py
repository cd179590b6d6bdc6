"""The command `mlx_h2o`: one file a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mlx_h2o import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; user errors end in one line and exit code 2, Ctrl-C in 130."""
    from mlx_h2o.cli import bench, calibrate, compare, generate, golden, inspect

    parser = argparse.ArgumentParser(
        prog="mlx_h2o", description="Bounded KV memory for mlx-lm models."
    )
    parser.add_argument("--version", action="version", version=f"mlx-h2o {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (generate, compare, calibrate, inspect, bench, golden):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"mlx_h2o {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0
