"""Counts the files of the package that one step of one layer visits, and the calls between them.

    tools/step_files.py [--list]

A reader follows a step through these files. `sys.setprofile` sees every call of a Python function;
a crossing is a call from one file of the package into another. CONTRIBUTING.md has the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx

import mlx_h2o
from mlx_h2o import H2OKVCache, make_policy

PACKAGE = Path(mlx_h2o.__file__).parent
#: Query heads, KV heads, width, slots a KV head; the prompt is longer than the slots.
HEADS, KV_HEADS, WIDTH, SLOTS, PROMPT, CHUNK = 4, 2, 32, 64, 96, 32
SEED = 7


class Visits:
    """The package's files that were called, and the calls from one to another."""

    def __init__(self) -> None:
        self.files: set[Path] = set()
        self.crossings = 0
        self.calls = 0

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note one event of `sys.setprofile`."""
        if event != "call" or (here := _file_of(frame)) is None:
            return
        self.files.add(here)
        self.calls += 1
        caller = frame.f_back
        while caller is not None and _file_of(caller) is None:
            caller = caller.f_back
        self.crossings += caller is not None and _file_of(caller) != here


def _file_of(frame: FrameType) -> Path | None:
    path = Path(frame.f_code.co_filename)
    return path if path.is_relative_to(PACKAGE) else None


def visits(call: Callable[[], object]) -> Visits:
    """The visits of a call."""
    counted = Visits()
    sys.setprofile(counted.see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted


def step(cache: H2OKVCache, length: int, softcap: float = 0.0) -> mx.array:
    """Step one layer by `length` tokens, as a routed model does. Returns `[1, Hq, L, D]`."""
    queries = mx.random.normal((1, HEADS, length, WIDTH))
    keys, values = (mx.random.normal((1, KV_HEADS, length, WIDTH)) for _ in range(2))
    keys, values = cache.update_and_fetch(keys, values)
    mask = "causal" if length > 1 else None
    return cache.attend(queries, keys, values, scale=WIDTH**-0.5, mask=mask, softcap=softcap)


def full_cache() -> H2OKVCache:
    """A cache that has begun to evict."""
    cache = H2OKVCache(SLOTS, policy=make_policy("salient"))
    for length in (PROMPT, 1, 1):
        mx.eval(step(cache, length))
    return cache


def calls() -> dict[str, Callable[[], object]]:
    """The steps of one layer that are counted."""
    mx.random.seed(SEED)
    cache = full_cache()
    return {
        "a decode step, fused": lambda: step(cache, 1),
        # Soft-capped logits rule out a fused step.
        "a decode step, op by op": lambda: step(cache, 1, softcap=50.0),
        "a prompt chunk": lambda: step(cache, CHUNK),
    }


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the files, too")
    args = parser.parse_args()
    print("| one layer | files | crossings | Python calls |\n|---|---:|---:|---:|")
    listed = []
    for name, call in calls().items():
        of_call = visits(call)
        print(f"| {name} | {len(of_call.files)} | {of_call.crossings} | {of_call.calls} |")
        listed.append((name, sorted(str(file.relative_to(PACKAGE)) for file in of_call.files)))
    if args.list:
        for name, files in listed:
            print(f"\n{name}:", *files, sep="\n    ")


if __name__ == "__main__":
    main()
