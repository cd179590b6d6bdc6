"""Caches go on in another thread than the one that made, filled or changed them.

A lazy array can be evaluated only in the thread that made it. So every public function returns
evaluated state (`mlx_h2o.load` and `asyncio.to_thread(generate, ...)`, a copy made by a server's
thread, ...).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from tiny_models import prefill, prompt_tokens, tiny_model

#: Attending through this library, MLA, attending by itself.
FAMILIES = ("llama", "deepseek_v3", "gemma2_by_itself")
SIZE, PROMPT, STEPS = 32, 60, 6


def elsewhere(call: Callable[[], Any]) -> Any:
    """A call's result, computed in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def stored(cache: list[Any], folder: Any) -> list[Any]:
    mlx_h2o.save_prompt_cache(folder / "cache.safetensors", cache)
    return mlx_h2o.load_prompt_cache(folder / "cache.safetensors")


def changed(change: Callable[[list[Any]], object]) -> Callable[[list[Any], Any], list[Any]]:
    def act(cache: list[Any], folder: Any) -> list[Any]:
        change(cache)
        return cache

    return act


ACTIONS: dict[str, Callable[[list[Any], Any], list[Any]]] = {
    "nothing": lambda cache, folder: cache,
    "copied": lambda cache, folder: copy.deepcopy(cache),
    "stored": stored,
    "resized": changed(lambda cache: mlx_h2o.resize(cache, max_size=24)),
    "pinned": changed(lambda cache: mlx_h2o.pin(cache, [(50, 52)])),
    "a new turn": changed(lambda cache: mlx_h2o.new_turn(cache, 0.5)),
    "taken back": changed(lambda cache: [entry.trim(1) for entry in cache]),
    "described": changed(mlx_h2o.describe),
}


def tokens_after(model: Any, cache: list[Any]) -> list[int]:
    """Greedy tokens, every one evaluated in the thread that computes it."""
    tokens = [7]
    for _ in range(STEPS):
        logits = model(mx.array([tokens[-1:]]), cache=cache)
        tokens.append(mx.argmax(logits[0, -1]).item())
    return tokens


# Models that attend by themselves, and MLA, take nothing back after evictions.
CASES = [(f, a) for f in FAMILIES for a in ACTIONS if f == "llama" or a != "taken back"]


@pytest.mark.few(6)
@pytest.mark.parametrize(("family", "action"), CASES)
def test_a_cache_goes_on_in_another_thread(family, action, tmp_path):
    model = tiny_model(family)
    mx.eval(model.parameters())
    undo = 2 if action == "taken back" else 0

    def conversation(run: Callable[[Callable[[], Any]], Any]) -> list[list[int]]:
        cache = run(lambda: mlx_h2o.make_prompt_cache(model, SIZE, undo=undo))
        run(lambda: mx.eval(prefill(model, cache, prompt_tokens(PROMPT), 13)))
        run(lambda: tokens_after(model, cache))
        other = run(lambda: ACTIONS[action](cache, tmp_path))
        # What the action came from goes on as well, here.
        return [run(lambda: tokens_after(model, other)), tokens_after(model, cache)]

    assert conversation(elsewhere) == conversation(lambda call: call())


def test_a_model_that_was_loaded_in_one_thread_generates_in_another():
    model, tokenizer = elsewhere(lambda: mlx_h2o.load("builtin:recall-4m"))
    prompt = mx.array(tokenizer.encode("The house stood on the cliff, and"))[None]
    mx.eval(prompt)
    cache = elsewhere(lambda: mlx_h2o.make_prompt_cache(model, SIZE))
    elsewhere(lambda: mx.eval(model(prompt, cache=cache)))
    assert mx.all(mx.isfinite(model(prompt, cache=cache))).item()
