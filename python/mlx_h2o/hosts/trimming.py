"""Taking tokens back in mlx-lm: speculative decoding, and its LRU cache of prompts.

mlx-lm asks `can_trim_prompt_cache` and trusts a yes for any number of tokens, and its
`trim_prompt_cache` returns 0 after a no. A bounded cache can take back a limited number. So
`routing.install` puts the functions here around mlx-lm's: rejected drafts are taken back from all
layers, or an error is raised and none changes, and a draft too long for the caches' `undo` is
refused before anything is computed. Calls without a bounded cache reach mlx-lm's own unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.hosts.cache_lists import entries

# What "can be trimmed" has to mean: by some tokens now, by any number of tokens (the LRU cache), or
# by the tokens that come next (the beginning of speculative decoding).
Meaning = Literal["some", "any", "next"]
_meaning: ContextVar[Meaning] = ContextVar("meaning", default="some")


@contextmanager
def _meant(meaning: Meaning) -> Iterator[None]:
    token = _meaning.set(meaning)
    try:
        yield
    finally:
        _meaning.reset(token)


def bounded(cache: Sequence[Any]) -> list[Any]:
    """The bounded caches of a list, members of a CacheList too."""
    return [entry for _, entry in entries(cache) if hasattr(entry, "require_trimmable")]


def trimming(original: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's `trim_prompt_cache`, wrapped to raise if not all layers can take that many back."""

    @functools.wraps(original)
    def trim_prompt_cache(cache: list[Any], num_tokens: int) -> Any:
        ours = bounded(cache)
        if ours and num_tokens > 0:
            for layer in ours:
                layer.require_trimmable(num_tokens)
            others = sorted({type(c).__name__ for c in cache if not c.is_trimmable()})
            if others:
                raise ValueError(
                    f"Cannot take back {num_tokens} tokens: the model's own {', '.join(others)} "
                    "cannot be trimmed any more. Nothing was changed."
                )
        return original(cache, num_tokens)

    return trim_prompt_cache


def trimmability(original: Callable[..., bool]) -> Callable[..., bool]:
    """mlx-lm's `can_trim_prompt_cache`, in the meaning that its caller needs.

    What a cache took in before speculative decoding begins (a loaded cache, a prompt that was read
    alone) need not be taken back: `undo` says what of the next tokens can be.
    """

    @functools.wraps(original)
    def can_trim_prompt_cache(cache: list[Any]) -> bool:
        ours, meaning = bounded(cache), _meaning.get()
        if meaning == "any" and any(layer.trimmable < layer.offset for layer in ours):
            return False
        if meaning == "next" and ours:
            others = [e for _, e in entries(cache) if not hasattr(e, "require_trimmable")]
            return all(layer.undo for layer in ours) and bool(original(others))
        return bool(original(cache))

    return can_trim_prompt_cache


def by_any_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of mlx-lm's LRU cache, which trims as many tokens as a new prompt requires."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        with _meant("any"):
            return original(*args, **kwargs)

    return method


def speculating(original: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's `speculative_generate_step`, wrapped to refuse drafts that could not be taken back.

    By default the prompt is then read in the chunks of plain decoding: what a bounded cache keeps
    of a long prompt depends on them.
    """
    signature = inspect.signature(original)
    chunk = inspect.signature(generate_step).parameters["prefill_step_size"].default

    @functools.wraps(original)
    def speculative_generate_step(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        caches = call.arguments.get("prompt_cache")
        if caches is None:  # mlx-lm will make caches, which `install` may bound
            models = (call.arguments[name] for name in ("model", "draft_model"))
            caches = [c for model in models for c in mlx_lm_cache.make_prompt_cache(model)]
        ours = bounded(caches)
        if ours:
            drafted = call.arguments.get(
                "num_draft_tokens", signature.parameters["num_draft_tokens"].default
            )
            require_undo(min(layer.undo for layer in ours), drafted)
            call.arguments.setdefault("prefill_step_size", chunk)
        return _begun(original(*call.args, **call.kwargs))

    return speculative_generate_step


def _begun(steps: Iterator[Any]) -> Iterator[Any]:
    """The tokens of speculative decoding, which asks at its first whether caches can be trimmed."""
    with _meant("next"):
        first = next(steps, None)
    if first is not None:
        yield first
        yield from steps


def require_undo(undo: int, drafted: int) -> None:
    """Raise ValueError unless caches with this `undo` can take back as many drafted tokens."""
    if undo >= drafted:
        return
    raise ValueError(
        f"Speculative decoding with num_draft_tokens={drafted} takes up to {drafted} tokens back, "
        f"and a bounded cache here was made with undo={undo}: make the caches of both models with "
        f"undo={drafted}" + (f", or pass num_draft_tokens={undo}." if undo else ".")
    )
