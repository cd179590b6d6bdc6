"""`mlx_h2o compress`: read a document once, keep the rows that can rebuild it, write a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_h2o import _checks
from mlx_h2o._files import require_writable, write_kept
from mlx_h2o._progress import progress_bar
from mlx_h2o.budgets.allocation import TooManyPins
from mlx_h2o.budgets.plan import plain_bytes
from mlx_h2o.caches.files import save_prompt_cache
from mlx_h2o.calibration.first_use import profile_at_load
from mlx_h2o.chat.dialogue import conversation
from mlx_h2o.chat.pin_rules import spans_for
from mlx_h2o.cli.options import (
    add_model_option,
    add_profile_option,
    input_text,
    load_model,
    memory,
    profile_choice,
    read_text,
    typed,
)
from mlx_h2o.cli.pin_options import add_pin_options, pin_rules
from mlx_h2o.compression.compress import DEFAULT_SIZE, compress_prompt
from mlx_h2o.compression.distillation import MOST_STEPS, tokens_of_work
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.loading.fingerprint import fingerprint, model_metadata
from mlx_h2o.slots.packed import BITS, UNPACKED
from mlx_h2o.slots.pins import Span

#: Slots of each KV head for the conversation that follows.
ROOM = 256


def add_parser(commands: Any) -> None:
    """Add `compress` to the command's subparsers."""
    parser = commands.add_parser(
        "compress",
        help="read a document once, and keep a small cache of it",
        description="Reads a document or a system prompt, reads it again as if to repeat it, keeps "
        "the rows that the second reading looks at (KVzip) and the others as one remainder, and "
        "writes a prompt cache: for `mlx_h2o generate --prompt-cache-file`, mlx_h2o."
        "load_prompt_cache, or inside an app (MLXH2O's H2OKVCache.loadCaches).",
    )
    parser.add_argument("prompt", type=Path, metavar="PROMPT", help="a text file, or - to read one")
    add_model_option(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="what to write")
    parser.add_argument(
        "--to", type=typed(memory, "bytes such as 64MB, or a share such as 30%"),
        default=DEFAULT_SIZE, metavar="SIZE",
        help="size of the kept part: 64MB, or 30%% of the prompt's 16-bit cache (the default)",
    )  # fmt: skip
    parser.add_argument(
        "--room", type=int, default=ROOM, metavar="N",
        help="further tokens for which each KV head has room before it evicts any "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-bits", type=int, choices=(*BITS, UNPACKED), metavar="N",
        help=f"bits of packed rows; {UNPACKED}: dense rows (default: chosen with the slots)",
    )  # fmt: skip
    parser.add_argument(
        "--system", action="store_true",
        help="put the text into the model's chat template, as the system's message",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=0, metavar="N",
        help="steps of a gradient that moves the kept rows until the model predicts as with the "
        "whole prompt: a third less is lost after some 160, which take minutes (default: "
        "%(default)s)",
    )  # fmt: skip
    add_profile_option(parser)
    add_pin_options(parser, document=True)
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Read the document twice, keep rows, write them, and report sizes."""
    _checks.whole("--room", args.room, 0)
    _checks.whole("--steps", args.steps, 0, MOST_STEPS)
    require_writable("--out", args.out)
    rules = pin_rules(args)
    text = input_text() if str(args.prompt) == "-" else read_text(args.prompt)
    model, tokenizer = load_model(args)
    if args.profile != "never":  # before a bar of another kind is shown
        profile_at_load(model)
    tokens, messages = prompt_ids(tokenizer, text, args.system)
    pins = spans_for(rules, tokenizer, tokens, messages) if rules else ()
    cache = compressed(args, model, tokenizer, tokens, pins)
    about = model_metadata(args.model, fingerprint(model, tokenizer))
    written = {**about, "compressed": str(args.to), **conversation(tokens)}
    write_kept(args.out, lambda path: save_prompt_cache(path, cache, written))
    full = len(tokens) * sum(map(plain_bytes, layer_kinds(model)))
    nbytes = sum(entry.nbytes for entry in cache if hasattr(entry, "nbytes"))
    summary = {
        "out": str(args.out),
        "tokens": len(tokens),
        "pinned": sum(end - first for first, end in pins),
        "kv_bytes": nbytes,
        "full_bytes": full,
    }
    if args.json:
        print(json.dumps(summary))
        return
    print(
        f"{args.out}: {len(tokens):,} tokens, {summary['pinned']:,} of them pinned, in "
        f"{nbytes:,} bytes of KV, {nbytes / full:.0%} of a 16-bit cache's"
    )


def compressed(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: Any,
    tokens: Sequence[int],
    pins: Sequence[Span],
) -> list[Any]:
    """The prompt read twice and cut down, with a progress bar.

    Args:
        args: The command's options.
        model: The model that reads.
        tokenizer: The model's tokenizer.
        tokens: The prompt's tokens.
        pins: Spans to keep whole.

    Raises:
        ValueError: The prompt cannot be compressed so; the message names options.
    """
    budgets, measures = profile_choice(args)
    doing = "reading twice and moving rows" if args.steps else "reading twice"
    with progress_bar(doing, "tokens") as bar:
        bar(0, 2 * len(tokens) + tokens_of_work(args.steps))
        try:
            return compress_prompt(
                model,
                tokenizer,
                tokens,
                args.to,
                room=args.room,
                tell=lambda more: bar(bar.done + more, bar.whole),
                steps=args.steps,
                bits=args.kv_bits,
                budgets=budgets,
                profile=measures,
                pins=pins,
            )
        except TooManyPins as error:
            raise ValueError(
                f"{error.why} Pin at most {error.most} tokens, or raise --to."
            ) from error


def prompt_ids(tokenizer: Any, text: str, system: bool) -> tuple[list[int], list[dict[str, str]]]:
    """The prompt's token ids, and its messages if a chat template made it.

    Args:
        tokenizer: The model's tokenizer.
        text: The document.
        system: Whether the document is put into a system message.

    Raises:
        ValueError: There is no text, or no chat template for it.
    """
    if not text.strip():
        raise ValueError("The prompt is empty.")
    if not system:
        return list(tokenizer.encode(text)), []
    if not tokenizer.has_chat_template:
        raise ValueError("--system needs the model's chat template, and it has none.")
    message = [{"role": "system", "content": text}]
    framed = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=False)
    return list(tokenizer.encode(framed, add_special_tokens=False)), message
