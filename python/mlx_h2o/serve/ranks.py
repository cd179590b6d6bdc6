"""A server whose model's heads several processes share (`mlx.launch`).

Rank 0 listens; the others follow it step by step. Each holds the caches of its own KV heads, and
all must do the same with them at the same time, since every layer of the model waits for the
others. So anything that one rank would decide by its own bytes, its own files or a click is
refused.
"""

from __future__ import annotations

import pickle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o.loading.demo_model import NAME as SMOLLM2
from mlx_h2o.loading.gguf import SUFFIX
from mlx_h2o.loading.load import PREFIX, load, model_path

#: The beginning of every refusal.
SHARED = "Here several processes share the model (mlx.launch)"


def processes() -> int:
    """The number of processes that share the model."""
    return int(mx.distributed.init().size())


def rank() -> int:
    """The number of this process."""
    return int(mx.distributed.init().rank())


def require_shareable(models: int, bounded: bool, saving: bool) -> None:
    """Raise ValueError for settings that would make ranks differ.

    Args:
        models: The number of models.
        bounded: Whether there is a bound for all conversations.
        saving: Whether there is a folder for them.
    """
    if models > 1:
        raise ValueError(f"{SHARED}, which can be one model only: give one --model.")
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


def require_alone(what: str) -> None:
    """Raise ValueError if several processes share the model, but only one gets the request."""
    if processes() > 1:
        raise ValueError(f"{SHARED}, and this page sees the heads of one of them: {what}")


def shared_by_first(value: Any) -> Any:
    """Rank 0's value, on every rank; all of them must call this."""
    if processes() == 1:
        return value
    if rank() == 0:
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        mx.eval(mx.distributed.all_sum(mx.array(data.size)))
        mx.eval(mx.distributed.all_sum(mx.array(data)))
        return value
    size = int(mx.distributed.all_sum(mx.array(0)).item())  # type: ignore[arg-type]
    data = np.array(mx.distributed.all_sum(mx.zeros(size, dtype=mx.uint8)))
    return pickle.loads(data.tobytes())


def any_failed(failed: bool) -> bool:
    """Whether something failed on any rank; all of them must call this."""
    if processes() == 1:
        return failed
    return bool(mx.distributed.all_sum(mx.array(int(failed))).item())


def is_own(name: str) -> bool:
    """Whether a model of this name is one that mlx-lm's loader cannot share out."""
    return name.startswith(PREFIX) or name == SMOLLM2 or model_path(name).endswith(SUFFIX)


def shared(name: str, group: mx.distributed.Group) -> tuple[nn.Module, Any]:
    """A model that is loaded whole and then shared out: an embedded model, or a GGUF file.

    Raises:
        ValueError: Its heads cannot be shared.
    """
    model, tokenizer = load(name)
    if not hasattr(model, "shard"):
        raise ValueError(f"{SHARED}, and mlx-lm cannot share out the heads of {name!r}.")
    model.shard(group)
    return model, tokenizer
