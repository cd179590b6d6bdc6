"""`python -m benchmarks.speculation`: time of drafts, ours over the hosts' own caches.

Speculative decoding in mlx-lm: seconds per token that it yields, drafted by the model itself (all
drafts are right) and by its first layers (most are wrong, and taken back). Then plain decoding in
mlx-lm and mlx-vlm below the bound: seconds per token under `install` over without it.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import count, product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

import mlx_h2o
from benchmarks import machine
from benchmarks.measuring import Arm, Progress, Samples, in_turns
from benchmarks.model import prompt_tokens
from mlx_h2o._progress import progress_bar
from mlx_h2o.cli import main as run_main
from mlx_h2o.cli.options import add_model_option, add_table_options, settle_model
from mlx_h2o.cli.parsing import Parser
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate.report import Table
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.load import load
from mlx_h2o.models.install import NothingBounded
from mlx_h2o.models.make import make_prompt_cache

#: Decodes a few tokens, and returns how many.
Decode = Callable[[], int]
DRAFTED = (2, 4)
#: Layers of a draft model that is cut from the model.
LAYERS = 4
PLAIN, ROOM, BEYOND = "own caches", "with room", "beyond the bound"
#: More than all tokens of a run.
ROOMY = 4096
# Of one visit: few, so that all arms have theirs before the machine's load changes.
TURNS, TOKENS, TINY_TOKENS = 2, 4, 64


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; the exit codes are those of the command `mlx_h2o`."""
    return run_main(argv, parser)


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        prog="benchmarks.speculation",
        description="Measure speculative decoding with bounded caches against mlx-lm's own caches, "
        "and plain decoding under install against without it, in turns within one process.",
    )
    add_model_option(made)
    made.add_argument("--rounds", type=int, default=15, metavar="N", help="visits of each arm")
    made.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens read before")
    made.add_argument(
        "--slots", type=int, default=256, metavar="N", help="slots of the arm beyond the bound"
    )
    add_table_options(made)
    made.set_defaults(run=run)
    return made


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    if args.rounds < 1 or not args.slots < args.prompt < ROOMY // 2:
        raise ValueError(f"Give a round or more, and --slots below --prompt below {ROOMY // 2}.")
    machine.require_kernels()
    settle_model(args)
    model, tokenizer = load(args.model)
    prompt = prompt_tokens(tokenizer, args.prompt)
    with progress_bar("drafts") as bar:
        drafts = measure_drafts(model, prompt, args.slots, args.rounds, bar)
    with progress_bar("install") as bar:
        installed = measured(installing(model, prompt), args.rounds, bar)
    mlx_h2o.uninstall()
    if args.json:
        print(json.dumps(as_json(drafts, installed)))
        return
    for table in tables(drafts, installed):
        show(table, args.markdown)


def drafters(model: nn.Module) -> dict[str, nn.Module]:
    """The draft models by name."""
    cut = copy.copy(model)
    cut.model = copy.copy(model.model)
    cut.model.layers = model.model.layers[:LAYERS]
    return {"the model itself": model, f"its first {LAYERS} layers": cut}


def measure_drafts(
    model: nn.Module, prompt: mx.array, slots: int, rounds: int, progress: Progress
) -> dict[str, Times]:
    """Times per token of speculative decoding, by setting and caches."""
    settings = list(product(drafters(model).items(), DRAFTED))
    found = {}
    for i, ((name, draft), drafted) in enumerate(settings):

        def within(done: int, whole: int, before: int = i) -> None:
            progress(before * whole + done, len(settings) * whole)

        arms = {
            kind: speculating(model, draft, prompt, drafted, size)
            for kind, size in ((PLAIN, None), (ROOM, ROOMY), (BEYOND, slots))
        }
        found[f"{name}, {drafted} at once"] = measured(arms, rounds, within)
    return found


def speculating(
    model: nn.Module, draft: nn.Module, prompt: mx.array, drafted: int, size: int | None
) -> Decode:
    """An arm of speculative decoding.

    Args:
        model: The model.
        draft: The draft model.
        prompt: The tokens read before.
        drafted: Tokens drafted at once.
        size: Slots of both models' caches, or None for their own caches.
    """
    caches: list[Any] = []
    for one in (model, draft):
        caches += stock_caches(one) if size is None else make_prompt_cache(one, size, undo=drafted)
    host(size is not None)
    steps = sys.modules["mlx_lm.generate"].speculative_generate_step(
        prompt, model, draft, num_draft_tokens=drafted, max_tokens=sys.maxsize, prompt_cache=caches
    )
    until_turns(steps, 1)

    def decode() -> int:
        host(size is not None)
        return until_turns(steps, TURNS)

    return decode


class Times(NamedTuple):
    """What arms took, by their names.

    Attributes:
        wall: Seconds that passed.
        processor: Seconds of this process on all cores, which other processes hardly change.
    """

    wall: Samples
    processor: Samples

    def ratios(self, arm: str, base: str) -> tuple[float, float]:
        """An arm's time over another's, by either clock."""
        return self.wall.ratio(arm, base), self.processor.ratio(arm, base)

    def as_json(self) -> dict[str, Any]:
        """Both, as JSON types."""
        return {"wall": self.wall.as_json(), "processor": self.processor.as_json()}


def measured(arms: Mapping[str, Decode], rounds: int, progress: Progress) -> Times:
    """The times per token of arms that take turns."""
    processor: dict[str, list[float]] = {name: [] for name in arms}

    def clocked(name: str) -> Arm:
        def arm() -> float:
            before, start = time.process_time(), time.perf_counter()
            tokens = arms[name]()
            seconds = time.perf_counter() - start
            processor[name].append((time.process_time() - before) / tokens)
            return seconds / tokens

        return arm

    wall = in_turns({name: clocked(name) for name in arms}, rounds, progress=progress)
    return Times(wall, Samples(processor))


def until_turns(steps: Iterator[Any], turns: int) -> int:
    """Take the tokens of so many drafts, each with the model's own after them; return how many."""
    for tokens in count(1):
        turns -= not next(steps)[2]
        if not turns:
            return tokens
    raise AssertionError("count() ended")


def host(bounded: bool, **settings: Any) -> None:
    """Install or uninstall."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingBounded)
        mlx_h2o.install(**settings) if bounded else mlx_h2o.uninstall()


def installing(model: nn.Module, prompt: mx.array) -> dict[str, Decode]:
    """The arms of plain decoding, whose caches the hosts make."""
    makers: dict[str, tuple[Callable[[], Iterator[Any]], int]] = {
        "mlx-lm": (lambda: generate_step(prompt, model, max_tokens=-1), TOKENS)
    }
    if find_spec("mlx_vlm"):
        tiny, tokens = tiny_vlm(), mx.arange(1, 1 + TINY_TOKENS)[None]

        def vlm() -> Iterator[Any]:
            from mlx_vlm.generate.ar import generate_step

            steps: Iterator[Any] = generate_step(tokens, tiny, None, None, max_tokens=sys.maxsize)
            return steps

        makers["mlx-vlm, a tiny model"] = (vlm, TINY_TOKENS)
    arms: dict[str, Decode] = {}
    for name, (make, tokens_each) in makers.items():
        for bounded in (False, True):
            host(bounded, max_size=ROOMY)
            steps = make()
            next(steps)
            arms[f"{name}, install" if bounded else name] = tokens_of(steps, bounded, tokens_each)
    return arms


def tokens_of(steps: Iterator[Any], bounded: bool, tokens: int) -> Decode:
    """An arm of plain decoding."""

    def decode() -> int:
        host(bounded, max_size=ROOMY)
        for _ in range(tokens):
            next(steps)
        return tokens

    return decode


def tiny_vlm() -> nn.Module:
    """A Qwen2-VL of random weights and four layers, whose time is not that of its products."""
    from mlx_vlm.models import qwen2_vl

    mx.random.seed(0)
    scaling: dict[str, Any] = {"type": "mrope", "mrope_section": [4, 6, 6]}
    text = qwen2_vl.TextConfig(
        "qwen2_vl", hidden_size=128, num_hidden_layers=4, intermediate_size=256,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=128,
        rope_scaling=scaling,
    )  # fmt: skip
    vision = qwen2_vl.VisionConfig(depth=1, embed_dim=32, hidden_size=128, num_heads=2)
    model = qwen2_vl.Model(
        qwen2_vl.ModelConfig(
            text, vision, "qwen2_vl", vocab_size=128,
            image_token_id=120, video_token_id=121, vision_start_token_id=122,
        )
    )  # fmt: skip
    mx.eval(model.parameters())
    return model


def install_ratios(installed: Times) -> dict[str, tuple[float, float]]:
    """Of each host the time per token under `install` over without, by either clock."""
    return {
        arm: installed.ratios(f"{arm}, install", arm)
        for arm in installed.wall.arms
        if not arm.endswith(", install")
    }


def as_json(drafts: dict[str, Times], installed: Times) -> dict[str, Any]:
    """All results, as JSON types."""
    speculation = {
        setting: {
            **times.as_json(),
            "over_plain": {kind: times.ratios(kind, PLAIN) for kind in (ROOM, BEYOND)},
        }
        for setting, times in drafts.items()
    }
    return {
        "machine": machine.describe(),
        "speculation": speculation,
        "install": {**installed.as_json(), "over_without": install_ratios(installed)},
    }


def tables(drafts: dict[str, Times], installed: Times) -> list[Table]:
    """Milliseconds, and ratios by either clock."""

    def cells(*both: tuple[float, float]) -> list[str]:
        return [f"{wall:.2f}, {processor:.2f}" for wall, processor in both]

    speculation = [
        [
            setting,
            f"{1e3 * times.wall.median(PLAIN):.0f} ms",
            *cells(times.ratios(ROOM, PLAIN), times.ratios(BEYOND, PLAIN)),
        ]
        for setting, times in drafts.items()
    ]
    plain = [
        [host, f"{1e3 * installed.wall.median(host):.2f} ms", *cells(ratios)]
        for host, ratios in install_ratios(installed).items()
    ]
    caption = "Ratios of the time that passed, and of processor time."
    return [
        Table(
            "Speculative decoding: time per token, and ours over that of mlx-lm's own caches",
            ["drafts of", PLAIN, ROOM, BEYOND],
            speculation,
            caption,
        ),
        Table(
            "Plain decoding: time per token, and that under install over it",
            ["host", "without", "install"],
            plain,
            caption,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
