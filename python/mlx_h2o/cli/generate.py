"""`mlx_h2o generate`: `mlx_lm.generate` within a fixed amount of KV memory."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o._files import require_writable, write_kept
from mlx_h2o._progress import progress_bar
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.conversation import past_training, pin
from mlx_h2o.caches.describe import describe
from mlx_h2o.caches.files import load_prompt_cache, require_savable, save_prompt_cache
from mlx_h2o.caches.peak import PeakMemory
from mlx_h2o.chat.pin_rules import spans_for
from mlx_h2o.chat.retention import bounded_layers
from mlx_h2o.cli import images
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    add_reading_option,
    argument_text,
    cache_settings,
    input_text,
    load_model,
    settle_model,
)
from mlx_h2o.cli.pin_options import add_pin_options, pin_rules
from mlx_h2o.cli.sampling import add_sampling_options, sampler_of
from mlx_h2o.compression.reading import read_and_generate
from mlx_h2o.hosts.loaded import language_model
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.fingerprint import fingerprint, model_metadata, require_model
from mlx_h2o.models.make import bounded_caches


def add_parser(commands: Any) -> None:
    """Add `generate` to the command's subparsers."""
    parser = commands.add_parser(
        "generate",
        help="generate text within bounded memory",
        description="Generate text as mlx_lm.generate does, with a KV cache of fixed size.",
        epilog="The text goes to standard output, the closing report to standard error.",
    )
    add_model_option(parser)
    parser.add_argument(
        "--prompt", "-p", metavar="TEXT", help='the message; "-" reads standard input'
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="for the model's chat template")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE",
        help="an image before the message, for a model of mlx-vlm; may be repeated",
    )  # fmt: skip
    add_sampling_options(parser, max_tokens=100)
    add_cache_options(parser)
    add_reading_option(parser)
    add_pin_options(parser)
    parser.add_argument(
        "--prompt-cache-file", metavar="FILE", type=Path,
        help="go on from this saved cache; its own memory settings apply. It must exist, unless "
        "--save-prompt-cache names the same file, which is then begun",
    )  # fmt: skip
    parser.add_argument(
        "--save-prompt-cache", metavar="FILE", type=Path, help="save the cache at the end"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of streaming text"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Generate, report, save."""
    check_options(args)
    rules, sampler = pin_rules(args), sampler_of(args)
    resumed = args.prompt_cache_file is not None and args.prompt_cache_file.exists()
    # Whether the user gave a size is known only before a default takes its place.
    describes_memory = given_options(args)
    settings = cache_settings(args)
    model, tokenizer = images.load_seeing(settle_model(args)) if args.image else load_model(args)
    if resumed:
        cache = resumed_cache(args, model, tokenizer)
        if describes_memory:
            print_differences(args, cache, model, settings)
    else:
        cache = bounded_caches(language_model(model), settings)
    if args.save_prompt_cache is not None:
        require_savable(cache)
    prompt, messages = ([], []) if args.image else prompt_tokens(args, tokenizer, resumed)
    if rules:
        # A resumed conversation's prompt comes after the tokens that the cache holds.
        offset = max(entry.offset for _, entry in bounded_layers(cache))
        pin(cache, spans_for(rules, tokenizer, prompt, messages, offset))
    text, tokens, reading = "", [], PeakMemory(describe(cache).nbytes)
    if args.image:
        begun = images.begin(args, model, tokenizer, prompt_text(args), cache, sampler)
    else:
        begun = begin(args, model, tokenizer, prompt, cache, sampler)
    responses, first, prompt_read = begun
    peak = reading.most
    for response in chain([first], responses):
        text += response.text
        tokens.append(response.token)
        if not args.json:
            print(response.text, end="", flush=True)
    if not args.json:
        print(flush=True)
    if (warning := past_training(language_model(model), cache)) is not None:
        print(warning, file=sys.stderr)
    report = prompt_read | closing_report(cache, response, peak)
    report |= {"text": text, "tokens": tokens}
    if args.save_prompt_cache is not None:
        write_kept(
            args.save_prompt_cache,
            lambda path: save_prompt_cache(
                path, cache, model_metadata(args.model, fingerprint(model, tokenizer))
            ),
        )
    if args.json:
        print(json.dumps({"model": args.model, **report}))
    else:
        print("\n".join(report_lines(report)), file=sys.stderr)


def begin(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: Any,
    prompt: list[int],
    cache: list[Any],
    sampler: Callable[[mx.array], mx.array],
) -> tuple[Iterator[Any], Any, dict[str, Any]]:
    """Read the prompt, once or twice, and generate the first token.

    Args:
        args: The command's options.
        model: The model.
        tokenizer: Its tokenizer.
        prompt: The prompt's tokens.
        cache: The model's caches.
        sampler: Chooses tokens from log-probabilities.

    Returns:
        The responses that follow, the first one, and how the prompt was read, for the report.
    """
    began = time.monotonic()
    with progress_bar("reading the prompt", "tokens", transient=True) as bar:
        responses, readings = read_and_generate(
            *(model, tokenizer, prompt, cache, args.reading, bar),
            max_tokens=args.max_tokens,
            sampler=sampler,
        )
        first = next(responses)
    return (
        responses,
        first,
        {
            "prompt_tokens": len(prompt),
            "prompt_readings": readings,
            "prompt_tps": len(prompt) / (time.monotonic() - began),
        },
    )


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for values that would fail only after the model is loaded."""
    if args.prompt is None:
        raise ValueError(
            'a prompt is needed: --prompt "Once upon a time", or --prompt - to read it from '
            "standard input."
        )
    if args.image:
        images.require_images(args)
    if args.save_prompt_cache is not None:
        require_writable("--save-prompt-cache", args.save_prompt_cache)
    resumed = args.prompt_cache_file
    if resumed is not None and not resumed.exists() and resumed != args.save_prompt_cache:
        raise ValueError(
            f"--prompt-cache-file: there is no file {resumed}; to begin it, give "
            f"--save-prompt-cache {resumed} too."
        )


def given_options(args: argparse.Namespace) -> bool:
    """Whether any option describes the memory."""
    names = "max_kv_size conversation_memory policy positions profile kv_bits".split()
    return any(getattr(args, name) is not None for name in names)


def print_differences(
    args: argparse.Namespace, cache: list[Any], model: nn.Module, settings: ModelSettings
) -> None:
    """Say so if a saved cache has other settings than the options: it keeps its own.

    Args:
        args: The command's options.
        cache: The loaded cache.
        model: The model that continues it.
        settings: The settings by the options.
    """
    of_file, by_options = (
        [str(layer.reason) for layer in describe(entries)]
        for entries in (cache, bounded_caches(model, settings))
    )
    if of_file != by_options:
        print(
            f"{args.prompt_cache_file} keeps the settings it was saved with, whatever the options "
            f"say: {of_file[0]}",
            file=sys.stderr,
        )


def resumed_cache(args: argparse.Namespace, model: nn.Module, tokenizer: Any) -> list[Any]:
    """The saved cache, checked to be this model's.

    Args:
        args: The command's options.
        model: The model that continues it.
        tokenizer: Its tokenizer.

    Raises:
        ValueError: The file is unreadable, or of another model.
    """
    cache, metadata = load_prompt_cache(args.prompt_cache_file, return_metadata=True)
    digest = fingerprint(model, tokenizer)
    require_model(metadata, digest, args.model, args.prompt_cache_file)
    if len(cache) != len(stock_caches(model)):
        raise ValueError(f"{args.prompt_cache_file} is of another model than {args.model}.")
    return cache


def prompt_text(args: argparse.Namespace) -> str:
    """The message, of the option or of standard input."""
    if args.prompt == "-":
        return input_text()
    text = argument_text("--prompt", args.prompt)
    return text.replace("\\n", "\n").replace("\\t", "\t")


def prompt_tokens(
    args: argparse.Namespace, tokenizer: Any, resumed: bool
) -> tuple[list[int], list[dict[str, str]]]:
    """The prompt as tokens, and its messages if a chat template made it.

    A resumed conversation gets the prompt as its next turn, as in mlx_lm.chat.

    Args:
        args: The command's options.
        tokenizer: The model's tokenizer.
        resumed: Whether a saved cache is continued.
    """
    prompt = prompt_text(args)
    templated = tokenizer.has_chat_template
    if args.system_prompt is not None and not templated:
        raise ValueError(
            "--system-prompt needs the model's chat template: put it into the prompt itself."
        )
    messages: list[dict[str, str]] = []
    if templated:
        messages = [{"role": "user", "content": prompt}]
        if args.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": args.system_prompt})
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer.encode(prompt, add_special_tokens=not templated)
    if resumed and tokens[:1] == [tokenizer.bos_token_id]:
        tokens = tokens[1:]  # the text has begun already
    if not tokens:
        raise ValueError("The prompt is empty: give --prompt TEXT, or --prompt - and text on it.")
    return tokens, messages


def closing_report(cache: list[Any], response: Any, peak: int) -> dict[str, Any]:
    """Speeds and memory, as JSON types.

    Args:
        cache: The model's caches.
        response: mlx-lm's last response.
        peak: The most bytes while the prompt was read.
    """
    layers = describe(cache, peak)
    bounded = [entry for _, entry in bounded_layers(cache)]
    return {
        "generation_tokens": response.generation_tokens,
        "generation_tps": response.generation_tps,
        "finish_reason": response.finish_reason,
        "kv_bytes": layers.nbytes,
        "context_tokens": max(entry.offset for entry in bounded),
        "evicted_tokens": round(sum(entry.evicted for entry in bounded) / len(bounded)),
        "layers": [vars(layer) for layer in layers],
        "memory": layers.memory,
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """The closing report for people."""
    twice = ", read twice" if report["prompt_readings"] == 2 else ""
    return [
        "-" * 10,
        f"prompt: {report['prompt_tokens']} tokens{twice}, {report['prompt_tps']:.1f} tokens/s; "
        f"generation: {report['generation_tokens']} tokens, "
        f"{report['generation_tps']:.1f} tokens/s",
        f"memory: {report['memory']}",
        f"{report['evicted_tokens']:,} of {report['context_tokens']:,} tokens evicted (mean over "
        "heads)",
    ]
