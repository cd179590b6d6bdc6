"""A server whose model's heads several processes share (`mlx.launch`).

Rank 0 listens; the others follow it step by step. Each holds the caches of its own KV heads, and
all must do the same with them at the same time, since every layer of the model waits for the
others. So anything that one rank would decide by its own bytes, its own files or a click is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.loading.demo_model import NAME as SMOLLM2
from mlx_h2o.loading.gguf import SUFFIX
from mlx_h2o.loading.load import PREFIX, load, model_path

#: The beginning of every refusal.
SHARED = "Here several processes share the model (mlx.launch)"


class Ended(Exception):
    """Rank 0 has ended, and so does this one."""


def processes() -> int:
    """The number of processes that share the model."""
    return int(mx.distributed.init().size())


def require_shareable(bounded: bool, saving: bool) -> None:
    """Raise ValueError for settings that would make ranks differ.

    Args:
        bounded: Whether there is a bound for all conversations.
        saving: Whether there is a folder for them.
    """
    if bounded:
        raise ValueError(
            f"{SHARED}, and --kv-memory would bound one of them: omit it, and bound each "
            "conversation by --max-kv-size or --conversation-memory."
        )
    if saving:
        raise ValueError(
            f"{SHARED}, each with caches of its own heads, and --sessions saves those of one "
            "process only: omit it."
        )


def require_batchable(body: dict[str, Any]) -> None:
    """Raise ValueError for a request that mlx-lm would serve outside of batches.

    mlx-lm cannot end such a request on all ranks when its client goes away.
    """
    if body.get("seed") is not None:
        raise ValueError(f"{SHARED}, and seed is not served there: omit it.")


def require_alone(what: str) -> None:
    """Raise ValueError if several processes share the model, but only one gets the request."""
    if processes() > 1:
        raise ValueError(f"{SHARED}, and this page sees the heads of one of them: {what}")


def any_failed(failed: bool) -> bool:
    """Whether a step failed on any rank; all ranks must call this."""
    return bool(mx.any(mx.distributed.all_sum(mx.array(int(failed))) > 0).item())


def is_own(name: str) -> bool:
    """Whether a model of this name is one that mlx-lm's loader cannot share out."""
    return name.startswith(PREFIX) or name == SMOLLM2 or model_path(name).endswith(SUFFIX)


def load_shared(name: str, group: mx.distributed.Group) -> tuple[nn.Module, Any]:
    """A model that is loaded whole and then shared out: an embedded model, or a GGUF file.

    Raises:
        ValueError: Its heads cannot be shared.
    """
    model, tokenizer = load(name)
    if not hasattr(model, "shard"):
        raise ValueError(f"{SHARED}, and mlx-lm cannot share out the heads of {name!r}.")
    model.shard(group)
    return model, tokenizer


def remember(model: nn.Module, tokenizer: Any, name: str) -> None:
    """Let a model that mlx-lm loaded find its profile, as after `mlx_h2o.load`.

    Args:
        model: The loaded model.
        tokenizer: The model's tokenizer.
        name: The name of its folder, or its id on the hub.
    """
    if Path(name).is_dir():
        model.mlx_h2o_folder = str(Path(name))
    model.mlx_h2o_tokenizer = tokenizer
