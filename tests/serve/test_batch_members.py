"""Batches of every mix of members: prompts that are new, that go on, or of one token.

Members differ in what their caches hold and in what comes; each must give what it gives alone.
"""

import copy
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o.caches.batch import BatchH2OKVCache
from model_coverage import coverage_model, model_names
from tiny_models import prefill, prompt_tokens, tiny_model

#: Slots of a head, tokens of a prompt's chunk, and tokens that each member generates.
SIZE, CHUNK, COUNT = 24, 16, 5
#: Tokens that a member's cache holds already, and tokens of its prompt.
MEMBERS = {
    "new": (0, 37),
    "short": (0, 6),
    "one token": (0, 1),
    "young": (9, 20),  # a conversation that has evicted nothing yet
    "continued": (60, 11),
    "continued by one token": (45, 1),
}
PAIRS = list(product(MEMBERS, repeat=2))
TRIPLES = [mix for mix in product(MEMBERS, repeat=3) if len(set(mix)) == 3]


def bounded(model: nn.Module) -> list[Any]:
    return mlx_h2o.make_prompt_cache(model, max_size=SIZE)


def continued(
    model: nn.Module, kind: str, seed: int, make: Callable[[nn.Module], list[Any]]
) -> tuple[list[Any], list[int]]:
    """A member's caches and its prompt."""
    read_tokens, length = MEMBERS[kind]
    cache = make(model)
    prefill(model, cache, prompt_tokens(read_tokens, 50 + seed), CHUNK)
    return cache, prompt_tokens(length, seed)


def logprobs_alone(model: nn.Module, cache: list[Any], prompt: list[int]) -> list[Any]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=COUNT, prompt_cache=cache, prefill_step_size=CHUNK
    )
    return [(int(token), logprobs) for token, logprobs in steps]


def require_as_alone(
    model: nn.Module, kinds: Sequence[str], make: Callable[[nn.Module], list[Any]] = bounded
) -> None:
    """Every member of such a batch gives what it gives alone."""
    members = [continued(model, kind, seed, make) for seed, kind in enumerate(kinds)]
    expected = [logprobs_alone(model, copy.deepcopy(cache), prompt) for cache, prompt in members]
    generator = BatchGenerator(model, prefill_step_size=CHUNK, prefill_batch_size=len(kinds))
    caches, prompts = map(list, zip(*members, strict=True))
    uids = generator.insert(prompts, [COUNT] * len(kinds), caches=caches)
    found: dict[int, list[Any]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid].append((response.token, response.logprobs))
    generator.close()
    for kind, single, together in zip(kinds, expected, found.values(), strict=True):
        assert len(single) == len(together) == COUNT
        for step, ((token, own), (other, got)) in enumerate(zip(single, together, strict=True)):
            off = mx.abs(mx.exp(got) - mx.exp(own)).max().item()
            assert off < 1e-3, f"{kind}, in a batch of {kinds}: step {step} is off by {off:.1e}"
            if token != other:  # as likely as each other; the next steps read other tokens
                break


@pytest.fixture(scope="module")
def gemma2() -> nn.Module:
    """The family that hands array masks to caches that can be batched."""
    return tiny_model("gemma2")


def test_this_family_hands_array_masks(gemma2, monkeypatch):
    """Otherwise the tests below would test something else."""
    masks = []
    own = BatchH2OKVCache.attend

    def attend(cache: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
        masks.append(mask)
        return own(cache, *args, mask=mask, **kwargs)

    monkeypatch.setattr(BatchH2OKVCache, "attend", attend)
    require_as_alone(gemma2, ["new", "continued"])
    assert any(isinstance(mask, mx.array) for mask in masks)


@pytest.mark.few(7)
@pytest.mark.parametrize("kinds", PAIRS, ids=" + ".join)
def test_pairs_with_array_masks_give_what_each_gives_alone(gemma2, kinds):
    require_as_alone(gemma2, kinds)


@pytest.mark.few(3)
@pytest.mark.parametrize("kinds", TRIPLES, ids=" + ".join)
def test_triples_with_array_masks_give_what_each_gives_alone(gemma2, kinds):
    require_as_alone(gemma2, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", model_names())
def test_every_model_whose_caches_can_be_batched(name):
    """Whatever masks its layers hand over, and with whatever caches of mlx-lm's own beside ours."""
    model = coverage_model(name)
    try:
        caches = bounded(model)
    except (ValueError, RuntimeError):
        pytest.skip("refused, of fixed size, or not run here (docs/reference/models.md)")
    if not all(hasattr(entry, "merge") for entry in caches):
        pytest.skip("its sequences are served one at a time")
    for kinds in (["new", "continued"], ["one token", "new", "young"], ["short", "continued"]):
        try:
            require_as_alone(model, kinds)
        except Exception:
            if is_wrong_without_us(model, kinds):
                pytest.skip("mlx-lm's own caches do not serve such a batch either")
            raise


def is_wrong_without_us(model: nn.Module, kinds: Sequence[str]) -> bool:
    try:
        require_as_alone(model, kinds, stock_prompt_cache)
    except Exception:  # of any model, about arrays where it wants numbers and the like
        return True
    return False
