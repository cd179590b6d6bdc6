"""Caches go on in another thread than the one that made, filled or changed them.

A lazy array can be evaluated only in the thread that made it. So every public function returns
evaluated state (`mlx_h2o.load` and `asyncio.to_thread(generate, ...)`, a copy made by a server's
thread, ...).
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from model_coverage import coverage_model
from tiny_models import Characters, prefill, prompt_tokens, tiny_model

#: A family for each class of caches: attending through this library, with packed rows too; MLA;
#: attending by itself; layers that share keys.
FAMILIES = ("llama", "llama packed", "deepseek_v3", "gemma2_by_itself", "gemma3n")
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
    "unpinned": changed(lambda cache: mlx_h2o.unpin(cache)),
    "in a batch": lambda cache, folder: [entry.merge([entry, entry]).extract(1) for entry in cache],
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


# Other kinds take nothing back after evictions, or cannot be batched.
CASES = [
    (f, a) for f in FAMILIES for a in ACTIONS
    if f.startswith("llama") or a not in ("taken back", "in a batch")
]  # fmt: skip


@pytest.mark.few(9)
@pytest.mark.parametrize(("family", "action"), CASES)
def test_a_cache_goes_on_in_another_thread(family, action, tmp_path):
    name, _, packed = family.partition(" ")
    wide = {"hidden_size": 64 * 4} if packed else {}  # heads that can be packed
    model = coverage_model(name) if name == "gemma3n" else tiny_model(name, **wide)
    mx.eval(model.parameters())
    settings = {"undo": 2 if action == "taken back" else 0, "bits": 8 if packed else None}

    def conversation(run: Callable[[Callable[[], Any]], Any]) -> list[list[int]]:
        cache = run(lambda: mlx_h2o.make_prompt_cache(model, SIZE, **settings))
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


def test_profiles_and_compressed_prompts_are_made_in_one_thread_and_used_in_another():
    model, tokens = tiny_model("llama"), prompt_tokens(200)
    mx.eval(model.parameters())
    profile = elsewhere(lambda: mlx_h2o.calibrate(model, tokens, length=100))
    elsewhere(lambda: mlx_h2o.plan(model, max_size=SIZE, prompt=100))
    cache = mlx_h2o.make_prompt_cache(model, SIZE, budgets=profile)
    mx.eval(prefill(model, cache, tokens[:PROMPT], 13))
    compressed = elsewhere(lambda: mlx_h2o.compress_prompt(model, Characters(), tokens, "50%"))
    for one in (cache, compressed):
        assert len(tokens_after(model, one)) == STEPS + 1
