"""A tiny language model of every module of mlx-vlm that has one: configs, and what differs.

Configs are those of mlx-lm's models (`model_configs.py`) with what mlx-vlm's own need besides. Only
the language model is made: images come in as embeddings.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm.models

from model_configs import SHARED, config_of
from tiny_models import with_random_weights

# Tokens for images, and around them, of models that find images by their tokens.
IMAGE, VIDEO, IMAGE_START = 120, 121, 122

SHARED_WITH_IMAGES: dict[str, Any] = {
    **SHARED,
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE_START,
}

#: What modules need beyond that.
DIFFERENT: dict[str, dict[str, Any]] = {}

MROPE = {"type": "mrope", "mrope_section": [4, 6, 6]}


def vlm_names() -> list[str]:
    """Modules of `mlx_vlm.models` with a language model."""
    found = sorted(m.name for m in pkgutil.iter_modules(mlx_vlm.models.__path__) if m.ispkg)
    return [name for name in found if has_language_model(name)]


def has_language_model(name: str) -> bool:
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    return hasattr(module, "Model") and hasattr(module, "ModelConfig")


def config(name: str) -> dict[str, Any]:
    """The tiny config of a module, with its text part also below "text_config"."""
    text = {**config_of(name), **SHARED_WITH_IMAGES, **DIFFERENT.get(name, {})}
    text.pop("text_config", None)
    text["model_type"] = name
    return {**text, "text_config": dict(text), "vision_config": {"model_type": name}}


def vlm_model(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The tiny language model of a module."""
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelConfig.from_dict(config(name)))
    part = model
    while isinstance(inner := getattr(part, "language_model", None), nn.Module):
        part = inner
    return with_random_weights(part, dtype=dtype)
