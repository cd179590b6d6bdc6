"""A digest that tells models apart, whatever they are called and wherever they lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

#: Numbers of each array of weights that are part of the digest.
SAMPLES = 16


def fingerprint(model: nn.Module, tokenizer: Any = None) -> str:
    """A digest of a model's weights, settings and tokenizer.

    Of the weights it has the names, shapes and dtypes, and a few numbers of each array, evenly
    spread: another training differs in all of them.

    Args:
        model: A loaded model.
        tokenizer: The model's tokenizer, or None.
    """
    digest = hashlib.sha256()
    arrays = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    samples = [_samples(array) for _, array in arrays]
    mx.eval(samples)
    for (name, array), sample in zip(arrays, samples, strict=True):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.array(sample).tobytes())
    args = getattr(model, "args", None)
    settings = asdict(args) if is_dataclass(args) and not isinstance(args, type) else {}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    if tokenizer is not None:
        words = sorted(tokenizer.get_vocab().items())
        digest.update(json.dumps(words).encode())
        digest.update(str(getattr(tokenizer, "chat_template", None)).encode())
    return digest.hexdigest()


def model_metadata(name: str, digest: str) -> dict[str, str]:
    """What a saved cache says about its model, for `require_model`: its name and `fingerprint`."""
    return {"model": name, "fingerprint": digest}


def require_model(metadata: Mapping[str, str], digest: str, name: str, path: str | Path) -> None:
    """Raise ValueError if the metadata of a saved cache are those of another model.

    Args:
        metadata: The strings of the file; without a digest the model's name counts.
        digest: The model's `fingerprint`.
        name: The model's name.
        path: The file, for the message.
    """
    written = metadata.get("model", name)
    if "fingerprint" in metadata:
        if metadata["fingerprint"] != digest:
            other = written if written != name else f"another model of the name {name}"
            raise ValueError(f"{path} was saved with {other}, whose weights are not these: {name}.")
    elif written != name:
        raise ValueError(f"{path} was saved with --model {written}; this is {name}.")


def _samples(array: mx.array) -> mx.array:
    """Some of an array's numbers, as float32: exact for 16 and 32 bits, enough to tell others."""
    count = min(SAMPLES, array.size)
    places = np.linspace(0, max(array.size - 1, 0), count).astype(np.int64)
    flat = array.reshape(-1)
    return flat[mx.array(places)].astype(mx.float32)
