"""A loaded model's weights as a folder that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

#: Model types whose parameters have the same names in mlx-lm and in transformers.
SAME_NAMES = ("llama", "qwen2", "qwen3", "mistral")

#: Where transformers keeps a chat's template, if not among the tokenizer's settings.
TEMPLATE = "chat_template.jinja"


def write(model: nn.Module, tokenizer: Any, config: dict[str, Any], folder: Path) -> None:
    """Write config, dense float32 weights and the tokenizer.

    Packed weights are unpacked, so that both programs compute with the same numbers.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer.
        config: The model's own `config.json`.
        folder: An existing folder.

    Raises:
        ValueError: The names of its parameters in transformers are not known.
    """
    if config["model_type"] not in SAME_NAMES:
        raise ValueError(f"the names of {config['model_type']}'s weights are not known here")
    arrays: dict[str, mx.array] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            packed = module.weight, module.scales, module.get("biases")
            arrays[f"{name}.weight"] = mx.dequantize(
                *packed, group_size=module.group_size, bits=module.bits, mode=module.mode
            )
            if "bias" in module:
                arrays[f"{name}.bias"] = module.bias
    flat = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    for name, array in flat:
        owner = name.rpartition(".")[0]
        if f"{owner}.weight" not in arrays:
            arrays[name] = array
    dense = {name: mx.contiguous(array.astype(mx.float32)) for name, array in arrays.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), dense)
    plain = {name: value for name, value in config.items() if not name.startswith("quantization")}
    plain |= {"torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(plain))
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    inner.save_pretrained(folder)
    # Prompts are plain text. KVzip's press would skip as many tokens as the template begins with.
    (folder / TEMPLATE).unlink(missing_ok=True)
    settings = folder / "tokenizer_config.json"
    if settings.exists():
        named = json.loads(settings.read_text(encoding="utf-8"))
        named.pop("chat_template", None)
        settings.write_text(json.dumps(named), encoding="utf-8")
