"""mlx-vlm's speculative decoding with bounded caches: MTP heads and Eagle 3, of one sequence.

The model reads a block of drafts, and the rejected ones are taken back by `undo`. A drafter's own
caches, which would grow, are bounded as the model's are. What reads the model's caches whole
(DFlash, Gemma 4's assistants) and batches are refused before anything is computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_h2o.hosts.cache_lists import entries, replaced
from mlx_h2o.hosts.loaded import is_cache, is_plain
from mlx_h2o.hosts.trimming import bounded
from mlx_h2o.hosts.vlm_prefixes import made_for

NO_DRAFTS = (
    "mlx-vlm's {what}, which bounded caches do not serve: omit the draft model, or call "
    "mlx_h2o.uninstall() and pass no bounded prompt_cache."
)
KINDS = ("mtp", "eagle3")

Function = Callable[..., Any]


def require_drafts(draft: Any, arguments: dict[str, Any], caches: Sequence[Any]) -> None:
    """Raise ValueError unless bounded caches can serve a drafter.

    Args:
        draft: The draft model.
        arguments: Those of `generate_step`.
        caches: The model's caches, some of them bounded.
    """
    kind = arguments.get("draft_kind", "dflash")
    if kind not in KINDS:
        raise ValueError(NO_DRAFTS.format(what=f"drafter {kind!r} changes the model's caches"))
    own = [entry for _, entry in entries(draft.make_cache())]
    if not own or not all(is_plain(e) or is_cache(e, "RotatingKVCache") for e in own):
        name = type(draft).__name__
        raise ValueError(NO_DRAFTS.format(what=f"{name} reads or keeps whole caches"))
    shape = getattr(arguments.get("input_ids"), "shape", (1,))
    if len(shape) > 1 and shape[0] > 1:
        raise ValueError(in_batches(draft))
    most = _most_drafted(draft, arguments.get("draft_block_size"))
    undo = min(entry.undo for entry in bounded(caches))
    if undo < most:
        raise ValueError(
            f"This drafter drafts up to {most} tokens at once, and a bounded cache here was made "
            f"with undo={undo}: give undo={most} to mlx_h2o.install or make_prompt_cache"
            + (f", or pass draft_block_size={undo + 1}." if undo else ".")
        )


def _most_drafted(draft: Any, block: int | None) -> int:
    """The most tokens that a drafter proposes at once."""
    config = draft.config
    adaptive = getattr(config, "adaptive_max_block_size", None) if block is None else None
    return max(int(block or config.block_size), int(adaptive or 0)) - 1


@contextmanager
def bounded_drafter(draft: Any, caches: Sequence[Any]) -> Iterator[None]:
    """Bound what a drafter keeps of the text, as the model's caches are bounded.

    Args:
        draft: The draft model.
        caches: The model's caches, some of them bounded.
    """
    like = bounded(caches)[0]
    kind: type[Any] = type(like)
    make: Function = draft.make_cache

    @functools.wraps(make)
    def make_cache(*args: Any, **kwargs: Any) -> list[Any]:
        size = max(like.budgets or [like.settings.max_size])
        return [
            replaced(entry, lambda: kind(size, undo=like.undo)) for entry in make(*args, **kwargs)
        ]

    draft.make_cache = make_cache
    try:
        yield
    finally:
        vars(draft).pop("make_cache", None)  # its class's own again


def initializing(original: Function) -> Function:
    """The server's `_initialize_model`, wrapped to go on without a drafter beside batches."""

    @functools.wraps(original)
    def initialize(self: Any) -> None:
        original(self)
        if self.draft_model is not None and bounded(made_for(self.model)):
            logging.getLogger("mlx_vlm.server").warning(
                "The server goes on without its draft model: %s", in_batches(self.draft_model)
            )
            self.draft_model = self.draft_kind = None

    return initialize


def in_batches(draft: Any) -> str:
    """Why a drafter does not serve batches of bounded caches."""
    return NO_DRAFTS.format(what=f"batches take drafts of {type(draft).__name__} back row by row")


def left_padded(original: Function) -> Function:
    """Qwen 3.5's attention of its verifier, which asks a bounded cache for all queries at once."""

    @functools.wraps(original)
    def attention(queries: Any, keys: Any, values: Any, **options: Any) -> Any:
        cache = options["cache"]
        if not getattr(cache, "attending", False):
            return original(queries, keys, values, **options)
        return cache.attend(queries, keys, values, scale=options["scale"], mask=options["mask"])

    return attention


#: The functions that are wrapped, by their module.
WRAPPED: dict[str, dict[str, Callable[[Function], Function]]] = {
    "mlx_vlm.server.generation": {"ResponseGenerator._initialize_model": initializing},
    "mlx_vlm.models.qwen3_5.language": {"_qwen3_5_left_padded_attention": left_padded},
}
