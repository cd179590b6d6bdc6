"""Options of `generate` and `chat` for the length of an answer and the choice of its tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from mlx_h2o import _checks

#: The number of tokens that means no limit, as in mlx-lm.
NO_LIMIT = -1


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options.

    Args:
        parser: The parser to add them to.
        max_tokens: The default of the most tokens of an answer.
    """
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=max_tokens, metavar="N",
        help=f"most tokens of an answer; {NO_LIMIT} is no limit (default: %(default)s)",
    )  # fmt: skip
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temp", type=float, default=0.0, metavar="T",
        help="temperature; 0 takes the likeliest token (the default)",
    )  # fmt: skip
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="among the likeliest that make up P"
    )
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling reproducible")


def sampler_of(args: argparse.Namespace) -> Callable[[mx.array], mx.array]:
    """The function that chooses tokens `[B]` from log-probabilities `[B, vocabulary]`.

    MLX's random numbers begin with --seed from then on.

    Raises:
        ValueError: A value is out of range.
    """
    if args.max_tokens < 1 and args.max_tokens != NO_LIMIT:
        raise ValueError(f"--max-tokens must be at least 1, or {NO_LIMIT} for no limit.")
    if args.temp < 0:
        raise ValueError("--temp must not be negative; 0 takes the likeliest token.")
    if not 0 < args.top_p <= 1:
        raise ValueError("--top-p must be above 0 and at most 1.")
    if args.seed is not None:
        mx.random.seed(_checks.whole("--seed", args.seed, 0))
    return make_sampler(args.temp, args.top_p)
