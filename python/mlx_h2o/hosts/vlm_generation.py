"""mlx-vlm's own generation and server: what makes caches beside `make_prompt_cache`.

Batches of bounded caches are bounded. Drafters and the prefix cache have files of their own; what
bounded caches cannot serve is refused before anything is computed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlx_h2o.hosts import vlm_drafts, vlm_own_attention, vlm_prefixes
from mlx_h2o.hosts.cache_lists import listed
from mlx_h2o.hosts.loaded import hosts, is_cache
from mlx_h2o.hosts.trimming import bounded
from mlx_h2o.hosts.vlm_prefixes import made_for

NO_APC = (
    "mlx-vlm's prefix cache (APC) makes caches of its own instead of a bounded prompt_cache: omit "
    "one of the two, and call mlx_h2o.install(...)."
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


def _require_served(arguments: dict[str, Any], caches: Sequence[Any]) -> None:
    """Raise ValueError if an option is given that these bounded caches cannot have."""
    if arguments.get("kv_bits") is not None:
        raise ValueError(NO_KV_BITS)
    if arguments.get("apc_manager") is not None and arguments.get("prompt_cache"):
        raise ValueError(NO_APC)
    if (draft := arguments.get("draft_model")) is not None:
        vlm_drafts.require_drafts(draft, arguments, caches)


def generating(original: Function) -> Function:
    """`generate_step` and `stream_generate`, wrapped to refuse what bounded caches cannot serve."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        call = signature.bind(*args, **kwargs).arguments
        arguments = {**call, **call.get("kwargs", {})}
        options = [arguments.get(name) for name in ("draft_model", "apc_manager", "kv_bits")]
        if any(option is not None for option in options):
            caches = arguments.get("prompt_cache") or made_for(arguments["model"])
            if bounded(caches):
                _require_served(arguments, caches)
                if options[0] is not None:
                    return _drafted(original(*args, **kwargs), options[0], caches)
        steps: Iterator[Any] = original(*args, **kwargs)
        return steps

    return generate


def _drafted(steps: Iterator[Any], draft: Any, caches: Sequence[Any]) -> Iterator[Any]:
    """The tokens of speculative decoding, with a bounded drafter."""
    with vlm_drafts.bounded_drafter(draft, caches):
        yield from steps


def beginning(original: Function) -> Function:
    """`BatchGenerator.__init__`, wrapped to refuse the same, and drafters."""

    @functools.wraps(original)
    def __init__(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        self._wire_stack = None  # its `__del__` looks at it
        if kwargs.get("kv_bits") is not None and bounded(made_for(model)):
            raise ValueError(NO_KV_BITS)
        draft = kwargs.get("draft_model")
        if draft is not None and bounded(made_for(model)):
            raise ValueError(vlm_drafts.in_batches(draft))
        original(self, model, *args, **kwargs)

    return __init__


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
        _require_served({"kv_bits": args[0] if args else kwargs.get("kv_bits")}, ours)
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
    **vlm_prefixes.WRAPPED,
    **vlm_drafts.WRAPPED,
    **vlm_own_attention.WRAPPED,
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
