"""A tiny language model of every module of mlx-vlm that has one: configs, and what differs.

Configs are those of mlx-lm's models (`model_configs.py`) with what mlx-vlm's own need besides. Only
the language model is made: images come in as embeddings.
"""

import copy
import importlib
import pkgutil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_vlm.models
from mlx_vlm.utils import update_module_configs

from mlx_h2o.hosts.loaded import language_model
from model_configs import SHARED, config_of
from tiny_models import with_random_weights

# Tokens for images, and around them, of models that find images by their tokens.
IMAGE, VIDEO, IMAGE_START = 120, 121, 122

SHARED_WITH_IMAGES: dict[str, Any] = {
    **SHARED,
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "vision_start_token_id": IMAGE_START,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "use_qk_norm": False,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1],
    "full_attention_interval": 2,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

#: What sees images is made, tiny, and never computed.
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "intermediate_size": 32,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 128,
    "out_hidden_size": 128,
    "embed_dim": 32,
    "vocab_size": 128,
    "num_channels": 3,
    "initializer_range": 0.02,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "pixel_shuffle_ratio": 0.5,
    "projector_dropout": 0.0,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
PARTS = ("text", "vision", "perceiver", "projector", "audio")

#: Modules whose parts take no field that they do not know, and those with a part that speaks.
STRICT = ("glm_ocr", "phi4_siglip")
SPEAKING = ("qwen3_omni_moe",)
#: Modules whose language model is that of another.
LIKE = {"nemotron_h_nano_omni": "nemotron_h", "plamo2vl": "plamo2", "lille_130m": "lille-130m"}

#: What modules need beyond that.
DIFFERENT: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_type": "siglip_vision_model"},
    "gemma3": {"vision_type": "siglip_vision_model"},
    "llava": {"vision_type": "clip_vision_model", "text_type": "llama"},
    "llava_next": {"vision_type": "clip_vision_model", "text_type": "llama"},
    "llava_onevision": {"vision_type": "siglip_vision_model"},
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "gemma3n": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "intermediate_size": [96, 96],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "mimo_v2": {"moe_layer_freq": [0, 1], "hybrid_layer_pattern": [0, 1]},
    "mimo_v2_flash": {"moe_layer_freq": [0, 1], "hybrid_layer_pattern": [0, 1]},
    "minimax_m3": {"moe_layer_freq": [0, 1]},
    "minimax_m3_vl": {"moe_layer_freq": [0, 1]},
    "glm4v": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "glm4v_moe": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "paddleocr_vl": {
        "rope_parameters": {
            "rope_type": "default",
            "type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 6, 6],
        }
    },
    "hunyuan_vl": {
        "rope_scaling": {"type": "xdrope", "xdrope_section": [4, 4, 4, 4], "alpha": 1e3}
    },
    "deepseek_v2": {
        "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 4096}
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        }
    },
    # It asks for an image's grid where a token is one of these.
    "minicpmv4_7": {"image_token_id": 1000, "video_token_id": 1001, "vision_start_token_id": 1002},
    "spark2_5": {"layer_types": ["sliding_attention", "full_attention"]},
    "step3p7": {"num_attention_groups": 2},
    "paligemma": {
        "vision_type": "siglip_vision_model",
        "query_pre_attn_scalar": 32,
        "text_type": "gemma",
    },
    "llava_bunny": {"auto_map": {}, "mm_hidden_size": 32},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"]},
    "kolibri1": {"layer_types": ["sliding_attention", "full_attention"]},
    "hunyuan": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "qwen2_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "qwen2_5_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "qwen3_vl": {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "qwen3_omni_moe": {"rope_scaling": {"type": "default", "mrope_section": [4, 6, 6]}},
    "glm_ocr": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "mrope_section": [4, 6, 6],
        }
    },
    "kimi_k3": {"hidden_act": "situ", "num_experts_per_token": 2},
    "mistral_large3": {"vision_type": "pixtral"},
    "llmjpvl": {"text_type": "llama"},
    "plamo2vl": {"text_type": "plamo2"},
    "glm5_next": {"num_key_value_heads": 4},
    "ministral3_embedding": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
        }
    },
    "molmo": {
        "d_model": 128,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 192,
        "embedding_size": 128,
    },
    "deepseek_v41": {
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "compress_ratios": [0, 0],
    },
    "llama4": {"num_hidden_layers": 4, "num_experts_per_tok": 1},
    "nemotron_nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            }
        ]
        * 2
    },
}


def vlm_names() -> list[str]:
    """Modules of `mlx_vlm.models`, with a language model and without."""
    return sorted(m.name for m in pkgutil.iter_modules(mlx_vlm.models.__path__) if m.ispkg)


def config(name: str) -> dict[str, Any]:
    """The tiny config of a module, with its text part also below "text_config"."""
    of_mlx_lm = config_of(LIKE.get(name, name))
    inner = of_mlx_lm.pop("text_config", {})
    text = {**of_mlx_lm, **inner, **SHARED_WITH_IMAGES, **DIFFERENT.get(name, {})}
    text["model_type"] = text.get("text_type", name)
    vision = {**VISION, "model_type": DIFFERENT.get(name, {}).get("vision_type", name)}
    parts = {f"{part}_config": vision for part in PARTS if part != "text"}
    whole = {**text, **parts, "text_config": dict(text)}
    if name in SPEAKING:  # a part thinks, and others speak its answers
        talker = {"text_config": text, "code_predictor_config": {}}
        return {"model_type": name, "thinker_config": whole, "talker_config": talker}
    return whole


def whole_vlm_model(
    name: str, vocab_size: int, **changes: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of a module, with what sees images, and its config.json, parts of it changed."""
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    given = config(name)
    for part, fields in changes.items():
        given[part] |= fields
    for part in (given, given["text_config"]):
        part["vocab_size"] = vocab_size
    return module.Model(config_object(module, given)), given


def vlm_model(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The tiny language model of a module."""
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    mx.random.seed(0)
    made = config_object(module, config(name))
    made = getattr(made, "thinker_config", made)
    text = getattr(made, "text_config", made)
    ways = (
        lambda: module.LanguageModel(text, made),
        lambda: module.LanguageModel(text),
        lambda: language_model(module.Model(made)),
    )
    failures: list[Exception] = []
    for way in ways:  # what sees images is left out where that is possible
        try:
            return with_random_weights(way(), dtype=dtype)
        except Exception as error:  # of any module, about its config
            failures.append(error)
    raise failures[-1]


def config_object(module: Any, given: dict[str, Any]) -> Any:
    """A module's config object, of its config.json."""
    known = [part for part in PARTS if hasattr(module, f"{part.title()}Config")]
    if module.__name__.rpartition(".")[2] in STRICT:
        for part in known:
            fields = vars(getattr(module, f"{part.title()}Config"))["__dataclass_fields__"]
            of_part = given[f"{part}_config"]
            given = {**given, f"{part}_config": {k: of_part[k] for k in of_part.keys() & fields}}
    made = module.ModelConfig.from_dict(copy.deepcopy(given))
    return update_module_configs(made, module, given, known)
