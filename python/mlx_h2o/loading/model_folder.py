"""Writes a GGUF file's model as a folder for mlx-lm's own server, chat and tools."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_h2o.loading import gguf
from mlx_h2o.loading.gguf_tokenizer import tokenizer_of

CONFIG = "config.json"


def write_folder(file: Path, folder: Path) -> Path:
    """Write a GGUF file's model as a folder of mlx-lm, unless it is there already.

    Weights that are packed in the file stay packed; their scales and all other weights get the
    dtype in which this machine computes well. The folder appears whole or not at all.

    Args:
        file: A `.gguf` file.
        folder: A folder that does not exist yet, or that this function wrote.

    Returns:
        The folder.

    Raises:
        ValueError: The file cannot be read, or its model is not supported here.
        OSError: The folder cannot be written.
    """
    if (folder / CONFIG).is_file():
        return folder
    arrays, metadata = gguf.read(file)
    config = gguf.config_of(metadata, arrays)
    model = gguf.build(config, gguf.weights_for(config, arrays))
    # MLX's CPU backend takes twenty times as long for 16-bit scales.
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    dtype = mx.float32 if on_cpu else mx.float16
    model.set_dtype(dtype)
    tokenizer = tokenizer_of(metadata)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(temporary / "model.safetensors"), weights, {"format": "mlx"})
        tokenizer.save_pretrained(str(temporary))
        config |= {
            "eos_token_id": sorted(tokenizer.eos_token_ids),
            "torch_dtype": str(dtype).split(".")[-1],
        }
        if packing := packing_of(model):
            config["quantization"] = packing
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        temporary.chmod(0o755)  # mkdtemp's mode admits its owner alone
        shutil.rmtree(folder, ignore_errors=True)  # a folder without a config is no model
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def packing_of(model: nn.Module) -> dict[str, Any]:
    """How a model's packed modules are packed, in config.json's form; empty if none is packed."""
    packed: dict[str, dict[str, Any]] = {
        name: {"group_size": module.group_size, "bits": module.bits, "mode": "affine"}
        for name, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    }
    if not packed:
        return {}
    kinds = list(packed.values())
    usual = max(kinds, key=kinds.count)
    others = {name: kind for name, kind in packed.items() if kind != usual}
    return usual | others
