"""Options that several subcommands share."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_h2o import _checks
from mlx_h2o._byte_size import USUAL_CONTEXT, memory_size
from mlx_h2o.budgets.options import policy_and_options
from mlx_h2o.budgets.settings import DEFAULT_POLICY, POSITIONS, PROFILES, ModelSettings
from mlx_h2o.caches.base import PastTraining
from mlx_h2o.compression.reading import LONGEST, READINGS, SECONDS
from mlx_h2o.loading import demo_model
from mlx_h2o.loading.load import DEFAULT_MODEL, EMBEDDED_MODEL, load
from mlx_h2o.policies import make_policy, policy_names
from mlx_h2o.slots.packed import BITS, UNPACKED

#: The option for each setting, by the library's name. A size has several options, and
#: `SizeOption` notes which was given.
OPTION_OF = {
    "context": "--context",
    "policy": "--policy",
    "bits": "--kv-bits",
    "budgets": "--profile",
    "positions": "--positions",
    "spill": "--spill",
}
#: The size of a conversation where none is given, in tokens.
USUAL_SIZE = 512
#: Settings of the cache that are written behind the policy's fields.
RARE = ("remainder", "k_bits", "v_bits", "recent_bits", "group_size", "undo")


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that prints tables: JSON or Markdown in their place."""
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    style.add_argument("--markdown", action="store_true", help="print the tables as Markdown")


def add_model_option(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add --model, which may name `several`; `settle_model` sets the default of one."""
    more = "; may be repeated: the others are loaded when they are asked for" if several else ""
    parser.add_argument(
        "--model",
        action="append" if several else "store",
        help=f"a local folder, a hub id, a .gguf file, {demo_model.NAME}, or {EMBEDDED_MODEL} "
        f"(default: {DEFAULT_MODEL}, fetched when it is first used){more}",
    )


def default_model() -> str:
    """The default model's name, fetched if need be; the embedded one's if that fails.

    In that case a line on stderr says so.
    """
    try:
        demo_model.path()
    except ValueError as error:
        print(f"{error}\nGoing on with {EMBEDDED_MODEL} instead.", file=sys.stderr)
        return EMBEDDED_MODEL
    return DEFAULT_MODEL


def settle_model(args: argparse.Namespace) -> str:
    """Set `args.model` to the default if none was named, and return it."""
    # Commands tell of conversations past training in their own words.
    warnings.simplefilter("ignore", PastTraining)
    args.model = args.model or default_model()
    name: str = args.model
    return name


def add_cache_options(
    parser: argparse.ArgumentParser, default_size: int = USUAL_SIZE, many: bool = False
) -> None:
    """Add the options of the cache's size, policy and remainder.

    Args:
        parser: The parser to add them to.
        default_size: The default size in tokens.
        many: Whether the command holds several conversations, so that `--kv-memory` bounds all.
    """
    parser.set_defaults(default_size=default_size)
    group = parser.add_argument_group("memory")
    _add_size_options(group, default_size, many)
    group.add_argument(
        "--context", type=int, metavar="N",
        help="tokens that conversations may reach (default: what the model was trained to see, or "
        f"{USUAL_CONTEXT})",
    )  # fmt: skip
    group.add_argument(
        "--policy", type=policy, metavar="NAME[:FIELD=VALUE...]",
        help=f"what to keep: {', '.join(policy_names())} (default: {DEFAULT_POLICY}), with fields "
        f"of its own or of the cache: salient:recent=64:remainder=false ({', '.join(RARE)})",
    )  # fmt: skip
    _add_positions_option(group)
    add_profile_option(group)
    group.add_argument(
        "--kv-bits", type=int, choices=(*BITS, UNPACKED), metavar="N",
        help=f"pack keys and values in 2, 3, 4, 5, 6 or 8 bits; {UNPACKED}: not",
    )  # fmt: skip
    _add_spill_option(group)


def add_reading_option(parser: argparse._ActionsContainer) -> None:
    """Add the option of how long prompts are read."""
    parser.add_argument(
        "--reading", choices=READINGS, default="once",
        help="read what does not fit the memory once; or twice, which shows what is worth keeping "
        f"and doubles the time; auto: twice up to {LONGEST:,} tokens if that takes less than "
        f"{SECONDS:.0f} s (default: %(default)s)",
    )  # fmt: skip


def _add_positions_option(group: argparse._ArgumentGroup) -> None:
    """Add the option of the positions at which queries see the kept tokens."""
    group.add_argument(
        "--positions", choices=POSITIONS, metavar="HOW",
        help='"rolling": tokens are seen without the gaps of evicted ones, for conversations '
        "longer than the model was trained for; without remainder and bits (default: absolute)",
    )  # fmt: skip


def _add_spill_option(group: argparse._ArgumentGroup) -> None:
    """Add the option of the file behind the memory."""
    group.add_argument(
        "--spill", metavar="DIR",
        help='write rows to a file of their conversation there ("auto": in the user\'s cache '
        "folder), from which evicted ones come back; it goes with the conversation",
    )  # fmt: skip


class SizeOption(argparse.Action):
    """Stores a size, and notes the option by which it was given, for messages about it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.size_option = option_string


def _add_size_options(group: argparse._ArgumentGroup, default_size: int, many: bool) -> None:
    """Add the options of a conversation's cache size, under the same names in every command."""
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--max-kv-size", type=int, metavar="N",
        help=f"tokens of a conversation held per KV head, on average (default: {default_size})",
    )  # fmt: skip
    size.add_argument(
        "--conversation-memory" if many else "--kv-memory",
        dest="conversation_memory", action=SizeOption, metavar="SIZE",
        type=typed(memory, "bytes such as 64MB, or a share such as 25%"),
        help="instead: bytes of a conversation, as 64MB or 1.5GiB, or 25%% of what a 16-bit cache "
        "takes at --context; bits and slots are then chosen by the model's profile",
    )  # fmt: skip


def add_profile_option(group: argparse._ActionsContainer) -> None:
    """Add the option of the profile by which slots are shared out."""
    group.add_argument(
        "--profile", metavar="FILE|uniform|never",
        help="share slots out by this profile, or evenly; never: by the model's own, but measure "
        "no model that has none (default: measure it for a size in bytes, once)",
    )  # fmt: skip


def profile_choice(args: argparse.Namespace) -> tuple[str | None, str]:
    """The settings `budgets` and `profile` that --profile means."""
    if args.profile == "never":
        return None, "never"
    return args.profile, PROFILES[0]


def typed(convert: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """An option's type whose error message says which value is wanted."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"it must be {expected}; got {text!r}") from None

    return converted


def memory(text: str) -> str:
    """A size in bytes, or a share of a 16-bit cache, as text.

    Raises:
        argparse.ArgumentTypeError: The size is invalid.
    """
    try:
        memory_size("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def policy(text: str) -> str:
    """A policy's name with fields, its own and the cache's, as `policy_and_options` reads it.

    Raises:
        argparse.ArgumentTypeError: The policy or a field is unknown, or a value is out of range.
    """
    try:
        own, rare = policy_and_options(text)
        for name in set(rare) - set(RARE):
            raise ValueError(f"{name} is no field of a policy: {OPTION_OF.get(name, 'a size')}.")
        make_policy(own)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def load_model(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """The model and tokenizer that the options name."""
    return load(settle_model(args))


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `make_prompt_cache` that were given, with the default size if there is none.

    Raises:
        ValueError: A number is too small; the message names the option.
    """
    if args.max_kv_size is None and args.conversation_memory is None:
        args.max_kv_size = args.default_size
    for name in ("max_kv_size", "context"):
        if getattr(args, name) is not None:
            _checks.whole(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    own, rare = policy_and_options(args.policy) if args.policy else (None, {})
    budgets, measures = profile_choice(args)
    options = {
        "max_size": args.max_kv_size,
        "max_bytes": args.conversation_memory,
        "context": args.context,
        "policy": own,
        "positions": args.positions,
        "budgets": budgets,
        "profile": measures,
        "bits": args.kv_bits,
        "spill": args.spill,
        **rare,
    }
    return {name: value for name, value in options.items() if value is not None}


def cache_settings(args: argparse.Namespace) -> ModelSettings:
    """The settings that the options describe, with the default size if they name none.

    A line on stderr says if rolling positions turn off the default remainder.

    Raises:
        ValueError: The settings are invalid; the message names the option.
    """
    options = cache_options(args)
    settings = ModelSettings.of(**options)
    if args.positions == "rolling" and "remainder" not in options:
        print("--positions rolling: evicted tokens leave no remainder.", file=sys.stderr)
    return settings


def in_options(message: str, args: argparse.Namespace) -> str:
    """A message about the library's arguments, in terms of the command's options."""
    names = {name: option for name, option in OPTION_OF.items() if option_given(args, option)}
    if hasattr(args, "max_kv_size"):
        names["max_size"] = "--max-kv-size"
    if hasattr(args, "conversation_memory"):
        names["max_bytes"] = getattr(args, "size_option", None) or "--conversation-memory"
    if hasattr(args, "to"):  # compress
        names["max_bytes"] = "--to"
    for name, option in names.items():
        # A name that is also an English word counts only if a value or a rule follows it.
        after = r"(?![\w-])" if "_" in name else r"(?= must |=)"
        message = re.sub(rf"(?<![\w-]){name}{after}=", f"{option} ", message)
        message = re.sub(rf"(?<![\w-]){name}{after}", option, message)
    return message


def option_given(args: argparse.Namespace, option: str) -> bool:
    """Whether the command has this option and it was given."""
    return getattr(args, option[2:].replace("-", "_"), None) is not None


def named_options(args: argparse.Namespace) -> dict[str, str]:
    """The options that affect figures, with defaults written out."""
    printed = ("json", "markdown", "anew")
    apart = ("command", "run", "settings", "size_option", *printed)
    named = {name: value for name, value in vars(args).items() if name not in apart}
    if "model" in named:
        named["model"] = named["model"] or DEFAULT_MODEL
    return {
        # The package's files have other paths on each machine.
        name: value.name if isinstance(value, Path) and value.is_absolute() else str(value)
        for name, value in named.items()
    }


def input_text() -> str:
    """Standard input.

    Raises:
        ValueError: It is not UTF-8.
    """
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"Standard input is not UTF-8, from byte {error.start:,} on.") from error


def argument_text(option: str, text: str) -> str:
    """A text from the command line.

    Raises:
        ValueError: Its bytes are not UTF-8.
    """
    if any("\udc80" <= letter <= "\udcff" for letter in text):  # as Python hands such bytes on
        raise ValueError(
            f"{option} is not UTF-8: save the text as UTF-8 in a file, and pipe it in."
        )
    return text


def read_text(path: str | Path) -> str:
    """A text file.

    Raises:
        ValueError: It is missing, empty, or not UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Cannot read the text {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"The text {path} is not UTF-8, from byte {error.start:,} on.") from error
    if not text.strip():
        raise ValueError(f"The text {path} is empty.")
    return text
