"""Folders of mlx-vlm's models, loaded for text alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_tokenizer


class TextModel(nn.Module):
    """The language model of a model of mlx-vlm, called as mlx-lm's models are.

    Args:
        model: A model of mlx-vlm; what sees images or hears is left out.
    """

    def __init__(self, model: nn.Module):
        super().__init__()  # type: ignore[no-untyped-call]
        self.language_model: Any = getattr(model, "language_model", model)
        self.model_type = getattr(model, "model_type", None) or model.config.model_type

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """The logits `[B, L, V]` of tokens `[B, L]`."""
        model = self.language_model
        # M-RoPE: without images positions are those of the tokens, whatever was read before.
        state = {"_position_ids": None, "_rope_deltas": mx.zeros((inputs.shape[0], 1), mx.int32)}
        for name, value in state.items():
            if hasattr(model, name):
                setattr(model, name, value)
        logits: mx.array = model(inputs, cache=cache).logits
        return logits

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The language model's blocks."""
        layers: Sequence[nn.Module] = self.language_model.layers
        return layers

    @property
    def args(self) -> Any:
        """The language model's settings."""
        model = self.language_model
        return getattr(model, "args", None) or getattr(model, "config", None)

    def make_cache(self) -> list[Any]:
        """The language model's own caches."""
        from mlx_vlm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.language_model)
        return caches


def load(path: str, refusal: ValueError) -> tuple[TextModel, Any]:
    """A model of mlx-vlm for text, and its tokenizer.

    Args:
        path: A folder, or an id on the hub.
        refusal: What mlx-lm said of it.

    Raises:
        ValueError: mlx-vlm is not installed, or does not support the model either.
        OSError: There is no such folder and no such id, or weights are missing.
    """
    try:
        from mlx_vlm.utils import get_model_path, load_model
    except ImportError as error:
        raise ValueError(
            f"{refusal} If mlx-vlm supports it: pip install mlx-vlm ({error})."
        ) from refusal
    model = TextModel(load_model(get_model_path(path), lazy=True))
    return model, load_tokenizer(path, eos_token_ids=getattr(model.args, "eos_token_id", None))
