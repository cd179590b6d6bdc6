"""Models from GGUF files of the families llama, qwen2, qwen3 and gemma3, as mlx-lm's own classes.

Their weights are dequantized one array at a time. Sources: ggml's docs/gguf.md; the names of arrays
and what the conversion does to them, llama.cpp's gguf-py/gguf/tensor_mapping.py and
convert_hf_to_gguf.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_h2o.loading.gguf_file import GGUFFile, Metadata
from mlx_h2o.loading.gguf_tokenizer import tokenizer_of

SUFFIX = ".gguf"
#: Layers, heads and widths: hundreds of times what models have, and little enough to build.
MOST_LAYERS, MOST_HEADS, WIDEST, LONGEST = 1_000, 65_536, 2**24, 2**31 - 1
# MLX's CPU backend multiplies 16-bit and packed matrices many times more slowly than float32 ones
# (a prompt of 512 tokens: 40 times and more), so a model that takes at most this part of the
# machine's memory in float32 is loaded in it there. Its layout for the CPU takes as much again.
FLOAT32_PART = 0.4

# llama.cpp's names of arrays, and mlx-lm's.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: An array of factors by which a llama's rotary periods are multiplied; no weight of the model.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Family:
    """How the conversion to GGUF treats a family of models.

    Attributes:
        module: mlx-lm's module of the family.
        layer: llama.cpp's names of a layer's parts, and mlx-lm's.
        interleaved: Query and key rows are stored with rotary pairs as neighbours (2i, 2i + 1);
            mlx-lm has them D / 2 apart.
        norm_offset: What the conversion adds to the weights of norms.
        dtype: The 16-bit dtype. float16 keeps more digits of a weight; gemma3's activations exceed
            its range.
    """

    module: str
    layer: dict[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0
    dtype: mx.Dtype = mx.float16


FAMILIES = {
    "llama": Family("llama", _LAYER, interleaved=True),
    "qwen2": Family("qwen2", _LAYER),
    "qwen3": Family("qwen3", _LAYER),
    "gemma3": Family("gemma3_text", _GEMMA3_LAYER, norm_offset=1.0, dtype=mx.bfloat16),
}


def family_of(file: GGUFFile) -> Family:
    """The family of a file's model.

    Raises:
        ValueError: It is not one of `FAMILIES`.
    """
    name = file.metadata.text("general.architecture")
    if name not in FAMILIES:
        *most, last = FAMILIES
        raise ValueError(
            f"A GGUF file of architecture {name[:40]!r} cannot be read; {', '.join(most)} and "
            f"{last} can. Convert the model with mlx_lm.convert."
        )
    return FAMILIES[name]


def config_of(file: GGUFFile) -> dict[str, Any]:
    """The model's configuration in mlx-lm's words.

    Raises:
        ValueError: The file's family, or a variant of it, is not supported here.
    """
    family, metadata = family_of(file), file.metadata
    prefix = metadata["general.architecture"]

    def count(name: str, most: int, default: int | None = None) -> int:
        return metadata.whole(f"{prefix}.{name}", 1, most, default)

    if metadata.whole(f"{prefix}.expert_count", 0, LONGEST, 0):
        raise ValueError(
            "GGUF files of mixture-of-experts models cannot be read; convert the model with "
            "mlx_lm.convert."
        )
    embeddings = file.shapes.get("token_embd.weight", ())
    if len(embeddings) != 2:
        raise ValueError("The GGUF file lacks the array token_embd.weight of two axes.")
    heads = count("attention.head_count", MOST_HEADS)
    kv_heads = count("attention.head_count_kv", MOST_HEADS, heads)
    width = count("embedding_length", WIDEST)
    head_dim = count("attention.key_length", WIDEST, max(width // heads, 1))
    rotated = count("rope.dimension_count", WIDEST, head_dim)
    if heads % kv_heads or head_dim % 2 or rotated != head_dim:
        raise ValueError(
            f"The GGUF file's {prefix}.attention has {heads} heads, {kv_heads} of keys and values, "
            f"of width {head_dim} ({rotated} rotated): the first must be a multiple of the second, "
            "and the width even and rotated whole."
        )
    config = {
        "model_type": family.module,
        "hidden_size": width,
        "num_hidden_layers": count("block_count", MOST_LAYERS),
        "intermediate_size": count("feed_forward_length", WIDEST),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": metadata.positive(f"{prefix}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive(f"{prefix}.rope.freq_base", 10000.0),
        "max_position_embeddings": count("context_length", LONGEST),
        "vocab_size": embeddings[0],
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
    }
    if prefix == "gemma3":
        config |= _gemma3_config(metadata, config)
    if scaling := _rope_scaling(file, prefix, config):
        config["rope_scaling"] = scaling
    return config


def _gemma3_config(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """What a gemma3 has beside the other families' settings."""
    # llama.cpp knows the 27B by its layers too: its queries are scaled by the width of the model
    # over its heads, those of the others by the width of a head.
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] / config["num_attention_heads"]
    return {
        "rope_theta": metadata.positive("gemma3.rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": metadata.positive("gemma3.rope.freq_base_swa", 10_000.0),
        "sliding_window": metadata.whole("gemma3.attention.sliding_window", 1, LONGEST),
        "query_pre_attn_scalar": scalar if is_27b else config["head_dim"],
    }


def _rope_scaling(file: GGUFFile, prefix: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """The rotary scaling, as config.json has it; None where there is none.

    Raises:
        ValueError: It is of a kind that cannot be read.
    """
    if ROPE_FACTORS in file.shapes:
        return _llama3_scaling(file, config)
    key = f"{prefix}.rope.scaling"
    kind = file.metadata.text(f"{key}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"GGUF files with {kind[:40]!r} rotary scaling cannot be read.")
    scaling = {"type": kind, "factor": file.metadata.positive(f"{key}.factor")}
    if kind == "yarn":
        trained = file.metadata.whole(f"{key}.original_context_length", 1, LONGEST)
        scaling["original_max_position_embeddings"] = trained
    return scaling


def _llama3_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3.1 and later, of which the file has the result: factors of periods.

    Raises:
        ValueError: The factors are not those of this scaling.
    """
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaling: dict[str, Any] = {
        "rope_type": "llama3",
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    width, base = config["head_dim"], config["rope_theta"]
    factors = file.array(ROPE_FACTORS, mx.float32)
    scaling["factor"] = factors.max().item()
    periods = base ** (mx.arange(0, width, 2) / width)
    if scaling["factor"] >= 1 and factors.shape == periods.shape:
        rope: Any = Llama3RoPE(width, base=base, scaling_config=scaling)
        expected = rope["_freqs"] / periods
        if mx.allclose(factors, expected, rtol=1e-3).item():
            return scaling
    raise ValueError(
        "GGUF files with rotary frequencies of their own, other than Llama 3's, cannot be read; "
        "convert the model with mlx_lm.convert."
    )


def places_of(file: GGUFFile) -> dict[str, str]:
    """mlx-lm's name of each array in a file.

    Raises:
        ValueError: An array has no known place.
    """
    layer_parts, places = family_of(file).layer, {}
    for name in file.shapes.keys() - {ROPE_FACTORS}:
        part, _, kind = name.rpartition(".")
        block, layer, of_layer = [*part.split(".", 2), "", ""][:3]
        if part in _OUTSIDE:
            place = _OUTSIDE[part]
        elif block == "blk" and of_layer in layer_parts:
            place = f"model.layers.{layer}.{layer_parts[of_layer]}"
        else:
            raise ValueError(f"The GGUF file has an array that is not known here: {name}.")
        places[name] = f"{place}.{kind}"
    return places


def empty_model(config: dict[str, Any]) -> nn.Module:
    """An mlx-lm model of a configuration; no memory is taken for its weights yet."""
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = family.Model(family.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"]:
        model.sanitize({})  # gemma3 drops its own output here; the others have none
    return model


def check_shapes(model: nn.Module, file: GGUFFile, places: dict[str, str]) -> None:
    """Raise ValueError unless a file has the model's arrays, of its shapes, and no others.

    Args:
        model: The model from `empty_model`.
        file: Its file.
        places: The names from `places_of`.
    """
    parameters: Any = tree_flatten(model.parameters())
    shapes = {name: array.shape for name, array in parameters}
    for name, place in sorted(places.items()):
        if place not in shapes:
            raise ValueError(f"The GGUF file has an array that its model has not: {name}.")
        shape = shapes.pop(place)
        if file.shapes[name] != shape:
            raise ValueError(
                f"The GGUF file's array {name} has the shape {file.shapes[name]}; its metadata "
                f"asks for {shape}."
            )
    if shapes:
        raise ValueError(f"The GGUF file lacks the array of {min(shapes)}.")


def halves_apart(rows: mx.array, heads: int) -> mx.array:
    """Rows `[heads * D, ...]` whose rotary pairs are neighbours (2i, 2i + 1), put D / 2 apart."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def default_dtype(file: GGUFFile) -> mx.Dtype:
    """16 bits; float32 on a CPU, for a model that is small enough (`FLOAT32_PART`)."""
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    small = file.elements * mx.float32.size <= FLOAT32_PART * memory
    return mx.float32 if on_cpu and small else family_of(file).dtype


def fill(model: nn.Module, file: GGUFFile, places: dict[str, str], dtype: mx.Dtype) -> None:
    """Give a model its weights, one array after the other.

    Args:
        model: The model from `empty_model`.
        file: Its file.
        places: The names from `places_of`.
        dtype: The weights' dtype.

    Raises:
        ValueError: An array holds numbers of no weight.
    """
    family, args = family_of(file), model.args
    heads = {"attn_q": args.num_attention_heads, "attn_k": args.num_key_value_heads}
    for name, place in places.items():
        part = name.split(".")[-2]
        if family.norm_offset and part.endswith("norm"):
            array = (file.array(name, mx.float32) - family.norm_offset).astype(dtype)
        else:
            array = file.array(name, dtype)
        if family.interleaved and part in heads:
            array = halves_apart(array, heads[part])
        mx.eval(array)
        model.load_weights([(place, array)], strict=False)


def read(path: str | Path, dtype: mx.Dtype | None = None) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, its tokenizer and its configuration, all from one file.

    What is wrong with a file is found before memory for weights is taken; they are then read array
    by array, so that the peak is near the size of the model in `dtype`.

    Args:
        path: A `.gguf` file.
        dtype: The weights' dtype; None for `default_dtype`.

    Raises:
        ValueError: The file cannot be read, or its model is not supported here.
    """
    file = GGUFFile(Path(path))
    config = config_of(file)
    tokenizer = tokenizer_of(file.metadata, config["vocab_size"])
    places = places_of(file)
    model = empty_model(config)
    check_shapes(model, file, places)
    file.check_numbers()
    fill(model, file, places, dtype or default_dtype(file))
    return model.eval(), tokenizer, config


def load(path: str | Path, dtype: mx.Dtype | None = None) -> tuple[nn.Module, Any]:
    """A model and its tokenizer; arguments and errors as in `read`."""
    model, tokenizer, _ = read(path, dtype)
    return model, tokenizer
