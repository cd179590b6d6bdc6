"""Writes a GGUF file's model as a folder for mlx-lm's own server, chat and tools."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_h2o.loading import gguf

CONFIG = "config.json"


def write_folder(file: Path, folder: Path) -> Path:
    """Write a GGUF file's model as a folder of mlx-lm, unless it is there already.

    Its weights are dequantized, in the dtype that `mlx_h2o.load` gives them on this machine. The
    folder appears whole or not at all.

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
    model, tokenizer, config = gguf.read(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(temporary / "model.safetensors"), weights, {"format": "mlx"})
        tokenizer.save_pretrained(str(temporary))
        config["eos_token_id"] = sorted(tokenizer.eos_token_ids)
        config["torch_dtype"] = str(model.model.norm.weight.dtype).split(".")[-1]
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        temporary.chmod(0o755)  # mkdtemp's mode admits its owner alone
        shutil.rmtree(folder, ignore_errors=True)  # a folder without a config is no model
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
