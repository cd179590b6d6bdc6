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
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache

# Whether "can be trimmed" has to mean "by any number of tokens".
_by_any: ContextVar[bool] = ContextVar("by_any", default=False)


def bounded(cache: Iterable[Any]) -> Iterator[Any]:
    """The bounded caches of a list, members of a CacheList too."""
    for entry in cache:
        if hasattr(entry, "require_trimmable"):
            yield entry
        else:
            yield from bounded(getattr(entry, "caches", ()))


def trimming(original: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's `trim_prompt_cache`, wrapped to raise if not all layers can take that many back."""

    @functools.wraps(original)
    def trim_prompt_cache(cache: list[Any], num_tokens: int) -> Any:
        ours = list(bounded(cache))
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


def asking(original: Callable[..., bool]) -> Callable[..., bool]:
    """mlx-lm's `can_trim_prompt_cache`; for the LRU cache it means "by any number of tokens"."""

    @functools.wraps(original)
    def can_trim_prompt_cache(cache: list[Any]) -> bool:
        if _by_any.get() and any(layer.trimmable < layer.offset for layer in bounded(cache)):
            return False
        return bool(original(cache))

    return can_trim_prompt_cache


def by_any_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of mlx-lm's LRU cache, which trims as many tokens as a new prompt requires."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        token = _by_any.set(True)
        try:
            return original(*args, **kwargs)
        finally:
            _by_any.reset(token)

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
        ours = list(bounded(caches))
        if ours:
            drafted = call.arguments.get(
                "num_draft_tokens", signature.parameters["num_draft_tokens"].default
            )
            require_undo(min(layer.undo for layer in ours), drafted)
            call.arguments.setdefault("prefill_step_size", chunk)
        return original(*call.args, **call.kwargs)

    return speculative_generate_step


def require_undo(undo: int, drafted: int) -> None:
    """Raise ValueError unless caches with this `undo` can take back as many drafted tokens."""
    if undo >= drafted:
        return
    raise ValueError(
        f"Speculative decoding with num_draft_tokens={drafted} takes up to {drafted} tokens back, "
        f"and a bounded cache here was made with undo={undo}: make the caches of both models with "
        f"undo={drafted}" + (f", or pass num_draft_tokens={undo}." if undo else ".")
    )
