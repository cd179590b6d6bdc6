"""Options that several subcommands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.builtin import DEFAULT_MODEL, load
from mlx_h2o.packed import BITS, GROUP_SIZES, UNPACKED
from mlx_h2o.policies import policy_names
from mlx_h2o.policies.settings import count_or_share, setting_of
from mlx_h2o.prompt_cache import make_prompt_cache

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model and --dtype."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a local folder, a hub id, or builtin:recall-4m (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: as they are)")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """The cache's size, policy and remainder."""
    group = parser.add_argument_group("memory")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--max-kv-size", type=int, metavar="N", help="tokens held per KV head, mean")
    size.add_argument("--max-kv-bytes", type=int, metavar="N", help="bytes held in all")
    group.add_argument("--policy", choices=policy_names(), help="what to keep (default: distinct)")
    group.add_argument("--sink", type=int, metavar="N", help="first tokens that always stay")
    group.add_argument(
        "--recent", type=count_or_share, metavar="N", help="last tokens that stay: 64, or 0.25"
    )
    group.add_argument("--evict-every", type=int, metavar="N", help="tokens chosen at once")
    group.add_argument("--unit", choices=("head", "layer"), help="who chooses for itself")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other setting of the policy, e.g. --set age_weight=1",
    )
    group.add_argument("--no-remainder", action="store_true", help="evicted tokens fall silent")
    group.add_argument(
        "--budgets", metavar="FILE", help='"uniform", or a profile (default: the model\'s own)'
    )
    group.add_argument(
        "--kv-bits", type=int, choices=BITS, metavar="N", help=f"pack keys and values: {BITS}"
    )
    group.add_argument("--k-bits", type=int, choices=BITS, metavar="N", help="pack keys alone")
    group.add_argument("--v-bits", type=int, choices=BITS, metavar="N", help="pack values alone")
    group.add_argument(
        "--recent-bits",
        type=int,
        choices=(*BITS, UNPACKED),
        metavar="N",
        help=f"the newest tokens' own width; {UNPACKED}: not packed",
    )
    group.add_argument(
        "--kv-group-size",
        type=int,
        choices=GROUP_SIZES,
        default=64,
        metavar="N",
        help="elements that share a scale (default: %(default)s)",
    )


def load_model(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model and tokenizer that the options name."""
    return load(args.model, DTYPES[args.dtype] if args.dtype else None)


def policy_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of the policy that the options change."""
    settings = {
        "sink": args.sink,
        "recent": args.recent,
        "evict_every": args.evict_every,
        "unit": args.unit,
    }
    settings |= dict(setting_of(item) for item in args.set)
    return {name: value for name, value in settings.items() if value is not None}


def bounded_cache(args: argparse.Namespace, model: nn.Module) -> list[Any]:
    """The cache that the options describe."""
    return make_prompt_cache(
        model,
        args.max_kv_size,
        max_bytes=args.max_kv_bytes,
        policy=args.policy,
        remainder=not args.no_remainder,
        budgets=args.budgets,
        bits=args.kv_bits,
        k_bits=args.k_bits,
        v_bits=args.v_bits,
        group_size=args.kv_group_size,
        recent_bits=args.recent_bits,
        **policy_settings(args),
    )


def read_text(path: str | Path) -> str:
    """A text file.

    Raises:
        ValueError: It is missing, empty, or not UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read the text {path}: {error}") from error
    if not text.strip():
        raise ValueError(f"The text {path} is empty.")
    return text


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """A temporary name beside `path`, moved over it if all goes well and removed if not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
