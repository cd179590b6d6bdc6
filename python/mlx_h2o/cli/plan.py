"""`mlx_h2o plan`: the memory that a conversation will take, computed before its prompt is read."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mlx_h2o import _checks
from mlx_h2o.chat.memory_plan import USUAL_CHUNK, planned_memory
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    add_reading_option,
    cache_settings,
    load_model,
)


def add_parser(commands: Any) -> None:
    """Add `plan` to the command's subparsers."""
    parser = commands.add_parser(
        "plan",
        help="tell the memory of a conversation before its prompt is read",
        description="Tells weights, KV memory and peak of a prompt of so many tokens with these "
        "options, and whether they fit an app on a phone of 8 GB. A few hundred tokens that mean "
        "nothing go through the model; no prompt is read.",
    )
    add_model_option(parser)
    parser.add_argument(
        "--prompt-tokens", type=int, default=8192, metavar="N",
        help="tokens of the prompt (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--chunk", type=int, default=USUAL_CHUNK, metavar="N",
        help="tokens that are read at once (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the bytes as JSON")
    add_reading_option(parser)
    add_cache_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Plan, and print the plan."""
    settings = cache_settings(args)
    prompt = _checks.whole("--prompt-tokens", args.prompt_tokens, 1, _checks.MOST_TOKENS)
    chunk = _checks.whole("--chunk", args.chunk, 1, _checks.MOST_TOKENS)
    model, _ = load_model(args)
    plan = planned_memory(model, settings, prompt, min(chunk, prompt), args.reading)
    print(json.dumps(plan.as_json()) if args.json else plan)
