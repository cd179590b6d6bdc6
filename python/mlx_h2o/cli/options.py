"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import checks
from mlx_h2o.builtin import DEFAULT_MODEL, load
from mlx_h2o.memory_size import USUAL_CONTEXT, memory_size
from mlx_h2o.packed import BITS, DEFAULT_GROUP_SIZE, GROUP_SIZES, UNPACKED
from mlx_h2o.policies import policy_names
from mlx_h2o.policies.settings import count_or_share, setting_of
from mlx_h2o.prompt_cache import bounded_caches
from mlx_h2o.settings import DEFAULT_POLICY, ModelSettings

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model and --dtype."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="a local folder, a hub id, a .gguf file, smollm2-135m, or builtin:recall-4m "
        "(default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: as they are)")


def add_cache_options(
    parser: argparse.ArgumentParser, default_size: int, memory_option: str = "--kv-memory"
) -> None:
    """The cache's size, policy and remainder.

    Args:
        parser: Takes them.
        default_size: Tokens, where no size is given.
        memory_option: What the size in bytes or shares is called.
    """
    group = parser.add_argument_group("memory")
    _add_size_options(group, default_size, memory_option)
    group.add_argument(
        "--context", type=int, metavar="N",
        help="tokens that conversations may reach (default: what the model was trained to see, or "
        f"{USUAL_CONTEXT})",
    )  # fmt: skip
    group.add_argument(
        "--policy", choices=policy_names(), metavar="NAME",
        help=f"what to keep: {', '.join(policy_names())} (default: {DEFAULT_POLICY})",
    )  # fmt: skip
    group.add_argument("--sink", type=int, metavar="N", help="first tokens that always stay")
    group.add_argument(
        "--recent", type=typed(count_or_share, "a count such as 64, or a share such as 0.25"),
        metavar="N", help="last tokens that stay: 64, or 0.25",
    )  # fmt: skip
    group.add_argument(
        "--evict-every", type=int, metavar="N", help="tokens given up at once (default: 1)"
    )
    group.add_argument(
        "--unit",
        choices=("head", "layer"),
        help="whether each KV head chooses for itself, or a layer's heads alike",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other setting of the policy, e.g. --set age_weight=1",
    )
    group.add_argument(
        "--no-remainder", action="store_true", help="evicted tokens no longer answer together"
    )
    group.add_argument(
        "--budgets", metavar="FILE", help='"uniform", or a profile (default: the model\'s own)'
    )
    _add_packing_options(group)
    group.add_argument(
        "--undo",
        type=int,
        default=0,
        metavar="N",
        help="last tokens that can be taken back, for speculative decoding (default: %(default)s)",
    )


def _add_size_options(
    group: argparse._ArgumentGroup, default_size: int, memory_option: str
) -> None:
    """How much is held."""
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--max-kv-size", type=int, metavar="N",
        help=f"tokens held per KV head, on average (default: {default_size})",
    )  # fmt: skip
    size.add_argument("--max-kv-bytes", type=int, metavar="N", help="instead: bytes held in all")
    size.add_argument(
        memory_option, dest="kv_memory", metavar="SIZE",
        type=typed(memory, "bytes such as 64MB, or a share such as 25%"),
        help="the same as 64MB, 1.5GiB, or 25%% of what a 16-bit cache takes at "
        "--context; bits and slots are then chosen by the model's profile",
    )  # fmt: skip


def _add_packing_options(group: argparse._ArgumentGroup) -> None:
    """In how many bits rows are stored."""
    group.add_argument(
        "--kv-bits",
        type=int,
        choices=(*BITS, UNPACKED),
        metavar="N",
        help=f"pack keys and values in 2, 3, 4, 5, 6 or 8 bits; {UNPACKED}: not",
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
        metavar="N",
        help=f"with bits: elements that share a scale (default: {DEFAULT_GROUP_SIZE})",
    )


def typed(convert: Callable[[str], Any], wanted: str) -> Callable[[str], Any]:
    """An option's type that says what is wanted where it got something else."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"it must be {wanted}; got {text!r}") from None

    return converted


def truth(text: str) -> bool:
    """True or False, written in any of the usual ways.

    Raises:
        ValueError: Anything else.
    """
    for words, value in (("true t yes y 1", True), ("false f no n 0", False)):
        if text.lower() in words.split():
            return value
    raise ValueError


def memory(text: str) -> str:
    """A size in bytes, or a share of a 16-bit cache, as text.

    Raises:
        ValueError: It is none.
    """
    memory_size("--kv-memory", text)
    return text


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


def cache_settings(args: argparse.Namespace, default_size: int) -> ModelSettings:
    """The settings that the options describe, with a size where they name none.

    Raises:
        ValueError: There are no such settings; the message names the option.
    """
    if args.max_kv_size is None and args.max_kv_bytes is None and args.kv_memory is None:
        args.max_kv_size = default_size
    for name in ("max_kv_size", "max_kv_bytes", "context"):
        if getattr(args, name) is not None:
            checks.whole(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    if args.kv_group_size and not (args.kv_bits or args.k_bits or args.v_bits):
        raise ValueError("--kv-group-size needs --kv-bits (or --k-bits, --v-bits).")
    return ModelSettings.of(
        args.max_kv_size,
        max_bytes=args.kv_memory or args.max_kv_bytes,
        context=args.context,
        policy=args.policy,
        remainder=not args.no_remainder,
        budgets=args.budgets,
        bits=args.kv_bits,
        k_bits=args.k_bits,
        v_bits=args.v_bits,
        group_size=args.kv_group_size or DEFAULT_GROUP_SIZE,
        recent_bits=args.recent_bits,
        undo=args.undo,
        **policy_settings(args),
    )


def bounded_cache(model: nn.Module, settings: ModelSettings) -> list[Any]:
    """A cache of these settings; what a refusal speaks of is called by the option that said it."""
    try:
        return bounded_caches(model, settings)
    except ValueError as error:
        raise ValueError(in_options(str(error))) from error


def in_options(
    message: str, max_size: str = "--max-kv-size", max_bytes: str = "--max-kv-bytes"
) -> str:
    """A message about arguments, about the options that a command has for them."""
    for argument, option in (("max_size", max_size), ("max_bytes", max_bytes)):
        message = message.replace(f"{argument}=", f"{option} ").replace(argument, option)
    return message


def named_options(args: argparse.Namespace) -> dict[str, str]:
    """What was asked for, defaults written out, but how it is printed."""
    apart = ("command", "run", "settings", "json", "markdown", "grid", "anew")
    named = {name: value for name, value in vars(args).items() if name not in apart}
    return {
        # Files of the package lie elsewhere on each machine.
        name: value.name if isinstance(value, Path) and value.is_absolute() else str(value)
        for name, value in named.items()
    }


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
