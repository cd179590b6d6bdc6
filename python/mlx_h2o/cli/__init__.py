"""The command `mlx_h2o`: one file a subcommand."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mlx_h2o import __version__
from mlx_h2o._install import backend_missing
from mlx_h2o.cli import interrupts
from mlx_h2o.cli.parsing import Parser
from mlx_h2o.doctor.commit import commit

# A shell's exit codes for a process that a signal ended: 128 plus the signal.
INTERRUPTED, TERMINATED = 130, 143
BROKEN_PIPE = 141
EXAMPLES = """examples:
  mlx_h2o generate --prompt "The house stood on the cliff, and" --max-kv-size 64
  mlx_h2o evaluate --quick
  mlx_h2o inspect --out inspect.html

Without --model they use SmolLM2-135M, fetched once. `mlx_h2o COMMAND --help` explains each."""


class Version(Action):
    """Prints version and commit, which git is asked for only then."""

    def __init__(self, **options: Any):
        options |= {"dest": SUPPRESS, "default": SUPPRESS}  # it is no setting
        super().__init__(**options, nargs=0)

    def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
        print(f"mlx-h2o {__version__} (commit {commit()})")
        parser.exit()


def main(argv: Sequence[str] | None = None, make_parser: Callable[[], Parser] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: The subcommand's name and options; those of the process by default.
        make_parser: Makes another parser than `parser`: one whose default `run` is a function of
            the parsed arguments. It is called where Ctrl-C ends the process quietly, so its imports
            may take long.

    Returns:
        0; 1 if `doctor` found a fault; 2 after a user's error, which is reported in one line;
        130 after Ctrl-C; 143 after SIGTERM; 141 if the reader of the output went away.
    """
    try:
        with interrupts.terminating_tidily():
            code = run(argv, make_parser)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (KeyboardInterrupt, Exception) as error:
        stop = interrupts.interrupt_behind(error)
        if stop is None:
            raise
        print("\nstopped", file=sys.stderr)
        return TERMINATED if isinstance(stop, interrupts.Terminated) else INTERRUPTED


def run(argv: Sequence[str] | None = None, make_parser: Callable[[], Parser] | None = None) -> int:
    """Run a subcommand as `main` does, but raise Ctrl-C and broken pipes."""
    with interrupts.ending_quietly():
        try:
            from mlx_h2o._blas import use_openblas

            commands = (make_parser or parser)()
        except ImportError as error:
            if (advice := backend_missing(error)) is None:
                raise
            print(f"mlx_h2o: {advice}", file=sys.stderr)
            return 2
    args = commands.parse_args(argv)
    try:
        use_openblas()
        code: int | None = args.run(args)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        from mlx_h2o.cli.options import in_options

        name = " ".join(filter(None, (commands.prog, getattr(args, "command", None))))
        print(f"{name}: {in_options(str(error), args)}", file=sys.stderr)
        return 2
    return code or 0


def parser() -> Parser:
    """The parser of the command line."""
    from mlx_h2o.cli import (
        calibrate,
        chat,
        compress,
        demo,
        describe,
        doctor,
        evaluate,
        fetch,
        generate,
        inspect,
        plan,
        serve,
        sessions,
        tune,
    )

    made = Parser(
        prog="mlx_h2o",
        description="Bounded KV memory for mlx-lm models.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action=Version, help="print version and commit")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (
        demo,
        generate,
        chat,
        serve,
        sessions,
        compress,
        evaluate,
        tune,
        calibrate,
        inspect,
        describe,
        plan,
        doctor,
        fetch,
    ):
        module.add_parser(commands)
    return made
