"""Record Python's GPU launches, so that Swift's launches can be compared with them.

tools/record_launches.py            write swift/Tests/MLXH2OTests/Fixtures/launches.json
tools/record_launches.py --check    fail unless it is up to date

No kernel runs: they write zeros. The record has attention of a few queries, by itself and in decode
steps, prompts, and conversations, in which caches enter fused decoding and leave it. Most turns of
a conversation are recorded as digests of their launches.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from mlx_h2o import H2OKVCache, make_policy
from mlx_h2o.attention.backends import attention_launches, gpu_decoder, prompt_launches
from mlx_h2o.attention.backends.gpu import Gpu
from mlx_h2o.attention.backends.launcher import Launcher
from mlx_h2o.attention.backends.operands import Seed
from mlx_h2o.attention.backends.self_check import NEVER, VARIABLE
from mlx_h2o.attention.backends.work import Ranges
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import PackedRows, Rows
from mlx_h2o.slots.remainder import Remainder

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "swift/Tests/MLXH2OTests/Fixtures/launches.json"

# Inputs that the host computes from sizes and settings: their contents are recorded too.
MADE = ("params", "plan", "factors", "weights", "saturation")


def described(
    name: str, header: str, source: str, options: dict[str, Any], launch: dict[str, Any]
) -> str:
    """A launch as a line of text, with contents and texts as digests.

    Args:
        name: The kernel's name.
        header: The text before the kernel's source.
        source: The kernel's body.
        options: The names passed to `mx.fast.metal_kernel`.
        launch: The arguments of the kernel's call.
    """
    inputs = dict(zip(options["input_names"], launch["inputs"], strict=True))
    reads = [_buffer(buffer, a.shape, a.dtype) for buffer, a in inputs.items()]
    shapes = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
    writes = [
        _buffer(buffer, *shape)
        for buffer, shape in zip(options["output_names"], shapes, strict=True)
    ]
    template = [f"{key}={_plain(value)}" for key, value in launch["template"]]
    made = [f"{key}:{_digest(np.array(inputs[key]).tobytes())}" for key in MADE if key in inputs]
    x, y, z = launch["grid"]
    return " ".join(
        [
            *(name, *reads, "->", *writes, *template),
            f"{x}x{y}x{z}/{launch['threadgroup'][0]}",
            *made,
            "text:" + _digest(f"{header}\0{source}".encode()),
        ]
    )


def _buffer(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> str:
    return f"{name}:{_plain(dtype)}:{'x'.join(map(str, shape))}"


def _plain(value: Any) -> str:
    return str(value).removeprefix("mlx.core.")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# -- calls ----------------------------------------------------------------------------------------


def attention_calls() -> Iterator[dict[str, Any]]:
    """Sizes, masks and GPUs that together take every branch of the rules."""
    shapes = itertools.product(
        ((1, 4, 4), (2, 8, 2), (1, 32, 1)),
        (1, 3, 8),
        ((64, 64), (128, 128), (192, 128), (576, 512)),
        (7, 1500, 9000),
    )
    for i, ((B, Hq, Hk), L, (D, Dv), N) in enumerate(shapes):
        yield {
            "kind": "attention",
            "batch": B,
            "query_heads": Hq,
            "kv_heads": Hk,
            "queries": L,
            "keys": max(N, L),
            "key_width": D,
            "value_width": Dv,
            "dtype": ("float16", "bfloat16", "float32")[i % 3],
            "mask": ("none", "causal", "bool", "row")[i % 4],
            "sinks": i % 5 == 0,
            "k_bits": (0, 0, 4, 8)[i % 4] if D < 576 else 0,
            "v_bits": (0, 3, 4, 0)[i % 4] if D < 576 else 0,
            "architecture": "applegpu_g13" + "psgd"[i // 3 % 4],
        }


def step_calls() -> Iterator[dict[str, Any]]:
    """Attention of the same sizes in decode steps."""
    for i, call in enumerate(attention_calls()):
        if i % 3 == 0:
            yield {
                **call,
                "kind": "step",
                # Heads of different lengths in one flat buffer that another kernel has changed.
                "ragged": i % 7 < 4,
                "keys": call["keys"] + 2000 * (i % 2),
                "remainder": i % 5 in (1, 2),
                "means": i % 6 == 3,
                # The saturation of each KV head, with a remainder; null is the default.
                "saturation": [h / 2 for h in range(call["kv_heads"])] if i % 2 else None,
                "framed": i % 4 == 2,
                "export": (2, 2, 1, 0)[i // 3 % 4],
            }


def prompt_calls() -> Iterator[dict[str, Any]]:
    """Prompts, and other attention that takes whole calls of the backend."""
    shapes = itertools.product((1, 8, 100), ((64, 64), (128, 96), (40, 64)), (130, 1200))
    for i, (L, (D, Dv), N) in enumerate(shapes):
        packs = D % 32 == 0
        yield {
            "kind": "prompt",
            "batch": 1 + i % 2,
            "query_heads": 4,
            "kv_heads": (4, 2, 1)[i % 3],
            "queries": L,
            "keys": N,
            "key_width": D,
            "value_width": Dv,
            "dtype": ("float16", "bfloat16", "float32")[i % 3],
            "mask": ("none", "causal", "bool", "row")[i % 4],
            "sinks": i % 5 == 0,
            "k_bits": (0, 8, 5)[i // 2 % 3] if packs else 0,
            "v_bits": (0, 0, 3)[i // 2 % 3] if packs else 0,
            "architecture": "applegpu_g13" + "psgd"[i % 4],
            "ragged": i % 2 == 1 and packs,
            "remainder": i % 3 == 0,
        }


def conversations() -> Iterator[dict[str, Any]]:
    """Caches of every policy and store, from the first token on, and operations of users on them.

    A number of `turns` is a chunk of that many tokens; `[n, 1]` means n steps.
    """
    steady = [12, [30, 1]]
    taken_back = [12, [14, 1], "look", [2, 1], 3, [3, 1], "copy", [2, 1], "save", [2, 1]]
    resized = [12, [3, 1], "trim", [16, 1], "resize", [4, 1], "masked", [2, 1], "rescaled", [2, 1]]
    g, s = "applegpu_g13g", "applegpu_g14s"
    policies: list[tuple[str, dict[str, Any], dict[str, Any], list[Any]]] = [
        ("distinct", {}, {}, taken_back),
        ("distinct", {"mass_weight": 0.0, "evict_every": 3}, {}, steady),
        ("distinct", {"unit": "layer"}, {"batch": 2}, steady),
        ("distinct", {"value_weighted": True}, {"budgets": [16, 30]}, resized),
        ("distinct", {}, {"budgets": [16, 30], "bits": 8, "architecture": s}, steady),
        ("salient", {}, {"k_bits": 6, "framed": True, "saturation": [0.0, 2.0]}, taken_back),
        ("salient", {"unit": "layer"}, {"batch": 2}, steady),
        ("h2o", {"age_normalised": True, "evict_every": 4}, {"sinks": True}, steady),
        ("h2o", {"value_weighted": True}, {"k_bits": 5, "v_bits": 3}, taken_back),
        ("h2o", {}, {"remainder": False, "dtype": "float16"}, steady),
        ("ema", {"unit": "layer"}, {"dtype": "bfloat16"}, steady),
        ("ema-logits", {}, {"budgets": [16, 30], "bits": 4}, steady),
        ("tova", {}, {"sinks": True, "batch": 2}, steady),
        # The first token is not a fused step: whether the model attends through the cache is
        # unknown.
        ("streaming", {}, {"budgets": [6, 40], "dtype": "float16"}, [[23, 1]]),
        ("streaming", {}, {"value_width": 40}, [12, [3, 1]]),  # no kernels for such rows
        ("keydiff", {}, {"k_bits": 8, "v_bits": 2}, resized),
        # More slots than are allocated at first, and more than a prompt's kernels take at once.
        ("distinct", {}, {"budgets": [262, 262]}, [250, [15, 1]]),
        # In two passes, on a large GPU.
        ("distinct", {}, {"budgets": [1400, 1100], "architecture": s}, [1396, [6, 1]]),
        # No fused step: two kinds of rows.
        ("h2o", {}, {"bits": 8, "recent_bits": 4}, [12, [14, 1]]),
    ]
    for policy, settings, other, turns in policies:
        yield {
            "kind": "conversation",
            "policy": policy,
            "settings": settings,
            "batch": 1,
            "dtype": "float32",
            "key_width": 64,
            "value_width": 32,
            "architecture": g,
            "sinks": False,
            "budgets": [24, 24],
            "remainder": True,
            "saturation": 4.0,
            "framed": False,
            **dict.fromkeys(("bits", "k_bits", "v_bits", "recent_bits")),
            **other,
            "turns": turns,
        }


# -- their launches -------------------------------------------------------------------------------


def launcher(lines: list[str]) -> Launcher:
    """A launcher that records launches in `lines`."""

    def make(name: str, header: str, source: str, **options: Any) -> Any:
        def kernel(**launch: Any) -> list[mx.array]:
            lines.append(described(name, header, source, options, launch))
            outputs = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in outputs]

        return kernel

    return Launcher(make, "metal")


class Operands:
    """Zeros of a call's sizes.

    Attributes:
        q, k, v: Queries, keys and values, flat where the call is ragged.
        options: Scale, mask and sinks, by name.
        ranges: The heads' ranges of slots, or None.
        remainder: The remainder of all heads.
        means: A mean key for each head.
    """

    def __init__(self, call: dict[str, Any]):
        B, Hq, Hk = call["batch"], call["query_heads"], call["kv_heads"]
        L, N, D = call["queries"], call["keys"], call["key_width"]
        dtype = getattr(mx, call["dtype"])
        self.ranges: Ranges | None = None
        slots: tuple[int, ...] = (Hk, N)
        if call.get("ragged"):
            lengths = [max(N // (1 + h % 3), L) for h in range(Hk)]
            # A range may be longer than the slots attended to.
            ends = list(itertools.accumulate(length + 4 for length in lengths))
            self.ranges = Ranges((0, *ends[:-1]), tuple(lengths))
            slots = (ends[-1],)

        def rows(width: int, bits: int) -> Rows:
            zeros = mx.zeros((B, *slots, width), dtype)
            return PackedRows.of(zeros, bits, 32) if bits else zeros

        self.q = mx.zeros((B, Hq, L, D), dtype)
        self.k = rows(D, call["k_bits"])
        self.v = rows(call["value_width"], call["v_bits"])
        self.options: dict[str, Any] = {
            "scale": 0.125,
            "mask": {
                "none": None,
                "causal": "causal",
                "bool": mx.zeros((B, 1, L, N), mx.bool_),
                "row": mx.zeros((L, 1), dtype),
            }[call["mask"]],
            "sinks": mx.zeros(Hq) if call["sinks"] else None,
        }
        self.remainder = Remainder.empty(B, Hk, D, call["value_width"])
        self.means = mx.zeros((B, Hk, D))


def of_attention(call: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    x = Operands(call)
    attention_launches.attend(
        launcher(lines),
        x.q,
        x.k,
        x.v,
        **x.options,
        remainder=x.remainder if call.get("remainder") else None,
        saturation=tuple(call["saturation"]) if call.get("saturation") else None,
        frame_scale=mx.ones((call["kv_heads"], call["key_width"])) if call.get("framed") else None,
        means=x.means if call.get("means") else None,
        ranges=x.ranges,
        export=call.get("export", attention_launches.EXPORT_LOGITS),
        architecture=call["architecture"],
        after=mx.zeros((1, 1), mx.int32) if x.ranges else None,
    )
    return lines


def of_prompt(call: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    x, launch = Operands(call), launcher(lines)
    if x.ranges is not None:
        operands = {"scale": x.options["scale"], "mask": x.options["mask"], "ranges": x.ranges}
        lse = prompt_launches.prompt_lse(launch, x.q, x.k, **operands)
        prompt_launches.prompt_mass(launch, x.q, x.k, lse, **operands)
        return lines
    gpu = Gpu(launch, lambda: call["architecture"])
    seed: Seed | None = None
    if call["remainder"]:
        seed = x.remainder.column(x.q, 0.125), x.remainder.mean_value
    for attend in (gpu.attention, gpu.attention_with_scores, gpu.attention_with_mass):
        attend(x.q, x.k, x.v, **x.options, seed=seed)
        lines.append("")
    return lines


def of_conversation(call: dict[str, Any]) -> list[str]:
    """For each turn the digest of its launches; all launches of the first step that evicts."""
    lines: list[str] = []
    gpu = Gpu(launcher(lines), lambda: call["architecture"])
    names = ("bits", "k_bits", "v_bits", "recent_bits", "budgets", "remainder", "saturation")
    settings = {name: call[name] for name in names}
    if call["framed"]:
        settings["frame"] = Frame(mx.zeros((2, call["key_width"])), mx.ones((2, call["key_width"])))
    if any(call[name] for name in ("bits", "k_bits", "v_bits")):
        settings["group_size"] = 32
    cache = H2OKVCache(policy=make_policy(call["policy"], **call["settings"]), **settings)
    sinks = mx.zeros(4) if call["sinks"] else None
    turns: list[str] = []
    shown = False

    def say(length: int, scale: float = 0.125, mask: Any = None) -> None:
        nonlocal shown
        rows = [(4, call["key_width"]), (2, call["key_width"]), (2, call["value_width"])]
        dtype = getattr(mx, call["dtype"])
        q, k, v = (mx.zeros((call["batch"], heads, length, D), dtype) for heads, D in rows)
        mask = mask or cache.make_mask(length)
        mx.eval(cache.attend(q, *cache.update_and_fetch(k, v), scale=scale, mask=mask, sinks=sinks))
        chooses = any("PRIORITY=" in line and "PRIORITY=1" not in line for line in lines)
        if chooses and not shown:
            shown = True
            turns.extend(lines)
        else:
            turns.append(f"{len(lines)}:{_digest(chr(10).join(lines).encode())}")
        lines.clear()

    def copied(cache: H2OKVCache) -> H2OKVCache:
        return copy.deepcopy(cache)

    def saved(cache: H2OKVCache) -> H2OKVCache:
        return H2OKVCache.from_state(cache.state)

    with (
        mock.patch("mlx_h2o.attention.backends.choice.gpu", return_value=gpu),
        mock.patch("mlx_h2o.attention.ops.backend", return_value=gpu),
        mock.patch.object(gpu_decoder, "writes_in_place", return_value=True),
        # The machine that records may have reserved ranges; one with a GPU has none.
        mock.patch("mlx_h2o.layer.layer_factory.has_ranges", return_value=False),
        # No kernel runs, so the saved arrays hold no positions.
        mock.patch("mlx_h2o.layer.saved_state.check_indices"),
    ):
        others: dict[str, Callable[[H2OKVCache], H2OKVCache]] = {"copy": copied, "save": saved}
        for turn in call["turns"]:
            if turn == "look":
                cache.arrays()
            elif turn == "trim":
                cache.trim(2)
            elif turn == "resize":
                cache.resize([14, 20])
            elif turn == "masked":
                say(1, mask="causal")
            elif turn == "rescaled":
                say(1, scale=0.25)
            elif isinstance(turn, str):
                cache = others[turn](cache)
            elif isinstance(turn, list):
                for _ in range(turn[0]):
                    say(turn[1])
            else:
                say(turn)
    return turns


def of_probe(_: dict[str, Any]) -> list[str]:
    """Whether kernels write in place, as the one-time probe finds."""
    lines: list[str] = []
    gpu_decoder.writes_in_place.__wrapped__(launcher(lines))
    return lines


def recorded() -> str:
    """The fixture."""
    kinds = {
        "attention": of_attention,
        "step": of_attention,
        "prompt": of_prompt,
        "conversation": of_conversation,
        "probe": of_probe,
    }
    calls = itertools.chain(
        *(attention_calls(), step_calls(), prompt_calls(), conversations(), [{"kind": "probe"}])
    )
    lines = [
        json.dumps({"call": call, "launches": kinds[call["kind"]](call)}, separators=(",", ":"))
        for call in calls
    ]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main() -> None:
    # No kernel runs here, so a check would reject every kernel, for the user's own device too.
    os.environ[VARIABLE] = NEVER
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        if not TARGET.exists() or TARGET.read_text() != recorded():
            sys.exit(f"{TARGET.relative_to(ROOT)} is out of date: run {Path(__file__)}.")
    else:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(recorded())


if __name__ == "__main__":
    main()
