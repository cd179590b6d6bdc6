"""Models from GGUF files of the llama and qwen2 families, as mlx-lm's own classes.

The file's weights stay packed: MLX reads Q4_0, Q4_1 and Q8_0 as its own affine quantization, and
turns other packed kinds that it reads (`gguf_header.KINDS`) into float16. Source of the format:
ggml's docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_h2o.loading.gguf_header import check_header
from mlx_h2o.loading.gguf_metadata import Metadata, positive, text, whole

SUFFIX = ".gguf"
#: Elements that share a scale in every packed kind that MLX keeps packed.
GROUP_SIZE = 32

# The file's names of a layer's parts, and mlx-lm's names.
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Arrays of a part; scales and biases are those that MLX makes of a packed one.
_OF_A_PART = ("weight", "bias", "scales", "biases")
# Llama stores query and key rows with rotary pairs as neighbours; qwen2 stores them as mlx-lm
# wants them.
_PAIRS_ARE_NEIGHBOURS = {"llama": True, "qwen2": False}
#: Layers, heads and widths: hundreds of times what models have, and little enough to build.
MOST_LAYERS, MOST_HEADS, WIDEST, LONGEST = 1_000, 65_536, 2**24, 2**31 - 1


def read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """A file's arrays and its metadata, with numbers as Python's own.

    Raises:
        ValueError: The file is missing, damaged or cannot be read.
    """
    if not path.is_file():
        raise ValueError(f"There is no model file {path}.")
    try:
        check_header(path)
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(f"Cannot read the model {path}: {error}") from error
    weights, metadata = loaded
    return weights, {
        key: value.tolist() if isinstance(value, mx.array) else value
        for key, value in metadata.items()
    }


def config_of(metadata: Metadata, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """The model's configuration in mlx-lm's words.

    Raises:
        ValueError: The file's family, or a variant of it, is not supported here.
    """
    family = metadata.get("general.architecture")
    if family not in _PAIRS_ARE_NEIGHBOURS:
        raise ValueError(
            f"A GGUF file of architecture {str(family)[:40]!r} cannot be read; "
            f"{' and '.join(_PAIRS_ARE_NEIGHBOURS)} can. Convert the model with mlx_lm.convert."
        )

    def count(name: str, most: int, default: int | None = None) -> int:
        return whole(metadata, f"{family}.{name}", 1, most, default)

    experts = whole(metadata, f"{family}.expert_count", 0, LONGEST, 0)
    if experts or "rope_freqs.weight" in weights:
        raise ValueError(
            "GGUF files of mixture-of-experts models, or with rotary frequencies of their own, "
            "cannot be read; convert the model with mlx_lm.convert."
        )
    embeddings = weights.get("token_embd.weight")
    if embeddings is None or embeddings.ndim != 2:
        raise ValueError("The GGUF file lacks the array token_embd.weight of two axes.")
    heads = count("attention.head_count", MOST_HEADS)
    kv_heads = count("attention.head_count_kv", MOST_HEADS, heads)
    width = count("embedding_length", WIDEST)
    head_dim = count("attention.key_length", WIDEST, max(width // heads, 1))
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"The GGUF file's {family}.attention has {heads} heads, {kv_heads} of keys and values, "
            f"of width {head_dim}: the first must be a multiple of the second, and the width even."
        )
    config = {
        "model_type": family,
        "hidden_size": width,
        "num_hidden_layers": count("block_count", MOST_LAYERS),
        "intermediate_size": count("feed_forward_length", WIDEST),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": positive(metadata, f"{family}.attention.layer_norm_rms_epsilon"),
        "rope_theta": positive(metadata, f"{family}.rope.freq_base", 10000.0),
        "max_position_embeddings": count("context_length", LONGEST),
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in weights,
        "attention_bias": "blk.0.attn_q.bias" in weights,
    }
    scaling = text(metadata, f"{family}.rope.scaling.type", "none")
    if scaling == "linear":
        factor = positive(metadata, f"{family}.rope.scaling.factor")
        config["rope_scaling"] = {"type": "linear", "factor": factor}
    elif scaling != "none":
        raise ValueError(f"GGUF files with {scaling[:40]!r} rotary scaling cannot be read.")
    return config


def weights_for(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The file's arrays under mlx-lm's names, query and key rows in its order.

    Raises:
        ValueError: An array has no known place, or not the shape of its place.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    renamed = {}
    for name, array in weights.items():
        part, _, kind = name.rpartition(".")
        if kind not in _OF_A_PART:
            raise ValueError(f"The GGUF file has an array that is not known here: {name}.")
        if part in _OUTSIDE:
            renamed[f"{_OUTSIDE[part]}.{kind}"] = array
            continue
        block, layer, part = [*part.split(".", 2), "", ""][:3]
        if block != "blk" or part not in _LAYER:
            raise ValueError(f"The GGUF file has an array that is not known here: {name}.")
        if part in heads and _PAIRS_ARE_NEIGHBOURS[config["model_type"]]:
            if array.shape[0] != heads[part] * config["head_dim"]:
                raise ValueError(
                    f"The GGUF file's array {name} has {array.shape[0]} rows; {heads[part]} heads "
                    f"of width {config['head_dim']} need {heads[part] * config['head_dim']}."
                )
            array = halves_apart(array, heads[part])
        renamed[f"model.layers.{layer}.{_LAYER[part]}.{kind}"] = array
    return renamed


def halves_apart(rows: mx.array, heads: int) -> mx.array:
    """Rows `[heads * D, ...]` whose rotary pairs are neighbours (2i, 2i + 1), put D / 2 apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def build(config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> nn.Module:
    """An mlx-lm model with these weights; packed weights stay packed.

    Args:
        config: The configuration from `config_of`.
        weights: The arrays from `weights_for`.

    Raises:
        ValueError: The arrays are not those of such a model.
    """
    from importlib import import_module

    family = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = family.Model(family.ModelArgs.from_dict(dict(config)))

    def packing(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not weights.keys() >= {f"{path}.weight", f"{path}.scales"}:
            return False
        words, scales = weights[f"{path}.weight"], weights[f"{path}.scales"]
        if not hasattr(module, "to_quantized"):
            raise ValueError(f"The GGUF file's {path} is packed, which it must not be.")
        bits = words.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        return {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}

    nn.quantize(model, class_predicate=packing)
    model.load_weights(list(weights.items()), strict=True)
    return model.eval()


def load(path: str | Path) -> tuple[nn.Module, Any]:
    """A model and its tokenizer, both from one file.

    Args:
        path: A `.gguf` file.

    Raises:
        ValueError: The file cannot be read, or its model is not supported here.
    """
    from mlx_h2o.loading.gguf_tokenizer import tokenizer_of

    arrays, metadata = read(Path(path))
    config = config_of(metadata, arrays)
    model = build(config, weights_for(config, arrays))
    model.set_dtype(mx.float16)
    return model, tokenizer_of(metadata, config["vocab_size"])


_PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def unpacked_bytes(model: nn.Module) -> int:
    """Bytes that a model's packed weights would take as numbers of its dtype."""
    modules = [module for _, module in model.named_modules() if isinstance(module, _PACKED)]
    return sum(module.scales.nbytes * module.group_size for module in modules)


def unpack(model: nn.Module) -> None:
    """Turn a model's packed weights into arrays of numbers of its dtype, in place."""

    def unpacked(module: Any) -> nn.Module:
        weight = mx.dequantize(
            module.weight, module.scales, module.biases, module.group_size, module.bits
        )
        plain: nn.Module
        if isinstance(module, nn.QuantizedEmbedding):
            plain = nn.Embedding(*weight.shape)
        else:
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in module)
        plain.update({"weight": weight, **({"bias": module.bias} if "bias" in module else {})})
        return plain

    named = [(n, m) for n, m in model.named_modules() if isinstance(m, _PACKED)]
    model.update_modules(tree_unflatten([(name, unpacked(module)) for name, module in named]))
