"""`mlx_h2o inspect`: a page that shows which tokens of a text were kept, and until when."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mlx_h2o._byte_size import size_text
from mlx_h2o._files import require_writable, write_kept
from mlx_h2o._progress import progress_bar
from mlx_h2o.chat.retention import Trace, trace
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    cache_settings,
    load_model,
    read_text,
)
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.models.make import bounded_caches

#: Tokens of a conversation where no size is given.
DEFAULT_SIZE = 128


def add_parser(commands: Any) -> None:
    """Add `inspect` to the command's subparsers."""
    parser = commands.add_parser(
        "inspect",
        help="show which tokens of a text are remembered",
        description="Read a text within bounded memory and write a page that shows which tokens "
        "each KV head kept, when it dropped the others, and their scores.",
    )
    add_model_option(parser)
    parser.add_argument(
        "--text", type=Path, default=SAMPLE_TEXT, metavar="FILE", help="default: a built-in novel"
    )
    parser.add_argument(
        "--tokens", type=int, default=1024, metavar="N",
        help="read the first N tokens of it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", type=int, default=64, metavar="N",
        help="tokens read as one chunk before the others (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("inspect.html"), metavar="FILE",
        help="the page to write (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print everything on the page as one JSON object"
    )
    parser.add_argument(
        "--all", action="store_true", help="print every layer's count, not a summary of five lines"
    )
    add_cache_options(parser, DEFAULT_SIZE)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Read the text, write the page, print a summary."""
    if args.tokens < 1 or args.prefill < 1:
        raise ValueError("--tokens and --prefill must be at least 1.")
    require_writable("--out", args.out)
    settings = cache_settings(args)
    text = read_text(args.text)
    model, tokenizer = load_model(args)
    cache = bounded_caches(model, settings)
    tokens = tokenizer.encode(text, truncation=True, max_length=args.tokens)
    with progress_bar("reading", "tokens", transient=True) as bar:
        result = trace(
            model,
            tokenizer,
            tokens,
            cache,
            prefill=args.prefill,
            name=args.model,
            progress=bar,
        )
    page = result.html()
    write_kept(args.out, lambda path: path.write_text(page, encoding="utf-8"))
    if args.json:
        print(json.dumps({"page": str(args.out.absolute()), **result.as_dict()}))
    else:
        print(f"{args.out.absolute()}: open it in a browser")
        print("\n".join(summary(result)))
        if args.all:
            print("\n".join(layer_lines(result)))


def summary(result: Trace) -> list[str]:
    """The remembered tokens, in four lines."""
    T, counts = len(result.texts), result.by_layer()
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    lines = [
        f"{T:,} tokens were read by {result.model}; {size_text(result.nbytes)} are held, "
        f"policy {result.policy}{' with remainder' if result.remainder else ''}",
        f"a KV head holds {result.share * T:,.0f} of them ({result.share:.1%}) on average: "
        f"{counts[most]:,.0f} in layer {most}, {counts[least]:,.0f} in layer {least}",
    ]
    if not (result.dropped_at >= 0).any():
        return [*lines, "nothing was dropped: the text fits into the budget (try more --tokens)"]
    somewhere = result.presence().any(axis=0).mean()
    words = ", ".join(f"{word} ({share:.0%})" for word, share in result.old_words(10) if share)
    return [
        *lines,
        f"{somewhere:.0%} of the tokens are held by some head; no head holds the others any more",
        f"old words remembered best (share of heads): {words or 'none'}",
    ]


def layer_lines(result: Trace) -> list[str]:
    """Tokens held per layer, mean over its KV heads."""
    return [f"layer {layer}: {tokens:,.0f} tokens" for layer, tokens in result.by_layer().items()]
