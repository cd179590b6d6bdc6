"""mlx-vlm's own generation and server: what makes or copies caches beside `make_prompt_cache`.

Batches of bounded caches are bounded. Speculative drafters and the prefix cache (APC) read and copy
whole caches; beside bounded ones they are refused before anything is computed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_h2o.hosts.cache_lists import listed
from mlx_h2o.hosts.loaded import hosts, is_cache, language_model
from mlx_h2o.hosts.trimming import bounded

NO_DRAFTS = (
    "mlx-vlm's speculative drafters read whole caches, and the caches here are bounded: omit the "
    "draft model, or call mlx_h2o.uninstall() and pass no bounded prompt_cache."
)
NO_APC = (
    "mlx-vlm's prefix cache (APC) copies whole caches, which would grow, and the caches here are "
    "bounded: omit it, or call mlx_h2o.uninstall() and pass no bounded prompt_cache."
)
NO_KV_BITS = (
    "kv_bits cannot pack a bounded cache: omit it, and give bits=8 (or k_bits, v_bits) to "
    "mlx_h2o.make_prompt_cache or install."
)
NO_DIFFUSION = (
    "mlx-vlm's diffusion of text makes caches of its own, which grow and which "
    "mlx_h2o.install(...) does not bound: call mlx_h2o.uninstall() first."
)

Function = Callable[..., Any]


def _makes_bounded(model: Any) -> bool:
    """Whether the caches that mlx-vlm makes for a model are bounded."""
    make = hosts()[1].caches.make_prompt_cache
    return bool(bounded(make(language_model(model))))


def _require_plain(
    model: Any, arguments: dict[str, Any], caches: Sequence[Any] | None = None
) -> None:
    """Raise ValueError if an option is given that bounded caches cannot have."""
    options = (("draft_model", NO_DRAFTS), ("apc_manager", NO_APC), ("kv_bits", NO_KV_BITS))
    reasons = [reason for name, reason in options if arguments.get(name) is not None]
    if reasons and (bounded(caches) if caches else _makes_bounded(model)):
        raise ValueError(reasons[0])


def generating(original: Function) -> Function:
    """`generate_step` and `stream_generate`, wrapped to refuse what copies whole caches."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        call = signature.bind(*args, **kwargs).arguments
        arguments = {**call, **call.get("kwargs", {})}
        _require_plain(arguments["model"], arguments, arguments.get("prompt_cache"))
        steps: Iterator[Any] = original(*args, **kwargs)
        return steps

    return generate


def beginning(original: Function) -> Function:
    """`BatchGenerator.__init__`, wrapped to refuse the same."""

    @functools.wraps(original)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        self._wire_stack = None  # its `__del__` looks at it
        _require_plain(model, kwargs)
        original(self, model, *args, **kwargs)

    return __init__


def coordinating(original: Function) -> Function:
    """`APCCoordinator.__init__`, wrapped to refuse bounded caches."""

    @functools.wraps(original)
    def __init__(self: Any, manager: Any, model: Any) -> None:
        _require_plain(model, {"apc_manager": manager})
        original(self, manager, model)

    return __init__


def validating(original: Function) -> Function:
    """`validate_drafter_compatibility`, wrapped to refuse bounded caches.

    mlx-vlm's server then says so, and goes on without the draft model.
    """

    @functools.wraps(original)
    def validate(target_model: Any, draft_model: Any, *args: Any, **kwargs: Any) -> Any:
        _require_plain(target_model, {"draft_model": draft_model})
        return original(target_model, draft_model, *args, **kwargs)

    return validate


def diffusing(original: Function) -> Function:
    """`stream_diffusion_generate_from_kwargs`, wrapped to refuse once `install` bounds caches."""

    @functools.wraps(original)
    def diffuse(*args: Any, **kwargs: Any) -> Iterator[Any]:
        vlm = hosts()[1]
        if vlm.caches.make_prompt_cache is not vlm.make_prompt_cache:
            raise ValueError(NO_DIFFUSION)
        steps: Iterator[Any] = original(*args, **kwargs)
        return steps

    return diffuse


def batching(original: Function) -> Function:
    """`_make_cache`, the batches' `make_prompt_cache`, wrapped to bound what that bounds."""

    @functools.wraps(original)
    def make_cache(model: Any, left_padding: list[int], *args: Any, **kwargs: Any) -> list[Any]:
        ours = hosts()[1].caches.make_prompt_cache(model)
        if not bounded(ours):
            return list(original(model, left_padding, *args, **kwargs))
        kv_bits = args[0] if args else kwargs.get("kv_bits")
        _require_plain(model, {"kv_bits": kv_bits}, ours)
        theirs = original(model, left_padding, *args, **kwargs)
        pairs = zip(ours, theirs, strict=True)
        return [_batch(one, plain, left_padding) for one, plain in pairs]

    return make_cache


def _batch(one: Any, plain: Any, left_padding: list[int]) -> Any:
    """A layer's caches of several sequences: bounded if `one`, of a sequence, is; else `plain`."""
    if is_cache(one, "CacheList"):
        members = zip(one.caches, plain.caches, strict=True)
        return listed([_batch(*pair, left_padding) for pair in members], type(plain))
    if not bounded([one]):
        return plain
    if not hasattr(one, "merge"):
        raise ValueError(
            f"This model's {type(one).__name__}s cannot be batched: generate one sequence at a "
            "time, by mlx_vlm.generate."
        )
    batch = type(one).merge([one] * len(left_padding))
    batch.prepare(left_padding=left_padding)
    return batch


def dropping(original: Function) -> Function:
    """`_prefix_cache_trim_amount`, wrapped so that no more is taken back than can be."""

    @functools.wraps(original)
    def trim_amount(kv_cache: list[Any], prefix_len: int) -> Any:
        amount = original(kv_cache, prefix_len)
        can = min((layer.trimmable for layer in bounded(kv_cache)), default=amount)
        return amount if not amount or amount <= can else None

    return trim_amount


#: The functions and methods that are wrapped, by their module.
WRAPPED: dict[str, dict[str, Callable[[Function], Function]]] = {
    "mlx_vlm.apc_coordinator": {"APCCoordinator.__init__": coordinating},
    "mlx_vlm.speculative.drafters": {"validate_drafter_compatibility": validating},
    "mlx_vlm.generate.ar": {
        "_make_cache": batching,
        "generate_step": generating,
        "BatchGenerator.__init__": beginning,
    },
    "mlx_vlm.generate.diffusion": {"stream_diffusion_generate_from_kwargs": diffusing},
    "mlx_vlm.generate.dispatch": {
        "stream_generate": generating,
        "_prefix_cache_trim_amount": dropping,
    },
}
