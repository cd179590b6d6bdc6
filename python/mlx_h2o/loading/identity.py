"""A model's identity: tells models apart without reading their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import _checks

LARGEST_PROBE = 1e30
# Two models count as the same when their probes point the same way: quantizing a model turns its
# probe by a percent or two, and another training run turns it anywhere.
LEAST_LIKENESS = 0.9


@dataclass(frozen=True)
class ModelIdentity:
    """A model's identity: enough to tell models apart without reading their weights.

    Attributes:
        model_type: As in the model's config.
        kv_heads: KV heads of each bounded layer.
        key_widths: D of each bounded layer.
        vocab_size: Rows of the embedding, 0 if unknown.
        probe: A few entries of the embedding.
    """

    model_type: str
    kv_heads: tuple[int, ...]
    key_widths: tuple[int, ...]
    vocab_size: int
    probe: tuple[float, ...]

    def check(self) -> None:
        """Raise ValueError unless these are texts and numbers that a model can have."""
        if not isinstance(self.model_type, str):
            raise ValueError(f"A profile is damaged: model_type is {self.model_type!r}.")
        for name in ("kv_heads", "key_widths"):
            _checks.wholes(name, getattr(self, name), 1)
        _checks.whole("vocab_size", self.vocab_size, 0)
        if not all(type(x) in (int, float) and abs(x) <= LARGEST_PROBE for x in self.probe):
            raise ValueError("A profile is damaged: its grid, losses and probe must be numbers.")

    @classmethod
    def of_json(cls, data: Any) -> ModelIdentity:
        """The identity that `asdict` wrote, read from JSON; `check` has still to be called."""
        return cls(
            data["model_type"],
            tuple(data["kv_heads"]),
            tuple(data["key_widths"]),
            data["vocab_size"],
            tuple(data["probe"]),
        )

    @property
    def file_stem(self) -> str:
        """A file name for this very model: its type, and a digest of the whole identity."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        kind = "".join(c if c.isalnum() else "-" for c in self.model_type)
        return f"{kind}-{digest}"

    def difference(self, other: ModelIdentity) -> str | None:
        """Why the other model is a different one, or None if it is the same."""
        for name in ("model_type", "kv_heads", "key_widths", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {mine}, not {theirs}"
        if not self.probe:
            return None
        if len(self.probe) != len(other.probe):
            return "its embedding differs"
        a, b = (mx.array([float(x) for x in probe]) for probe in (self.probe, other.probe))
        likeness = (a * b).sum() / mx.maximum(mx.linalg.norm(a) * mx.linalg.norm(b), 1e-12)
        return None if (likeness >= LEAST_LIKENESS).item() else "its embedding differs"


def architecture(model: nn.Module) -> str:
    """The library's name of a model's architecture, for messages: "llama".

    Raises:
        ValueError: `model` is a model's name instead of a model.
    """
    if isinstance(model, str | Path):
        raise ValueError(
            f"A loaded model is needed; got its name {_checks.shown(str(model))}: load it first, "
            f"as in `model, tokenizer = mlx_h2o.load({_checks.shown(str(model))})`."
        )
    # "mlx_lm.models.llama", "mlx_vlm.models.qwen2_vl.language"
    parts = type(model).__module__.split(".")
    return parts[2] if parts[1:2] == ["models"] and len(parts) > 2 else parts[-1]


def identity_of(model: nn.Module, heads: Sequence[int], widths: Sequence[int]) -> ModelIdentity:
    """The identity of a loaded model.

    Args:
        model: An mlx-lm model.
        heads: KV heads of each bounded layer.
        widths: D of each bounded layer.
    """
    names = ("embed_tokens", "wte")  # phi3_v's vision_embed_tokens takes images
    embedding = next(
        (m for name, m in model.named_modules() if name.rpartition(".")[2] in names), None
    )
    probe: tuple[float, ...] = ()
    if embedding is not None:
        rows = embedding(mx.array([1, 2, 3, 4])).astype(mx.float32)[:, :16]
        probe = tuple(round(x, 5) for x in rows.flatten().tolist())
    args = getattr(model, "args", None)
    vocab = getattr(args, "vocab_size", 0) or 0
    kind = getattr(model, "model_type", None) or getattr(args, "model_type", "unknown")
    return ModelIdentity(str(kind), tuple(heads), tuple(widths), int(vocab), probe)
