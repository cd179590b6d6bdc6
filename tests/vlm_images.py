"""Tiny models of mlx-vlm that see images, prompts with images and videos, and their answers."""

import importlib
from typing import Any

import mlx.core as mx
from mlx_vlm.generate.ar import generate_step

from tiny_models import prompt_tokens, with_random_weights
from vlm_models import IMAGE, IMAGE_START, VIDEO, config, config_object

#: Models whose positions have three axes (M-RoPE).
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
MROPE = (*QWEN, "glm4v", "glm4v_moe", "glm_ocr")
#: A model whose layer 1 attends to the image and to no token.
CROSS = "mllama"
# Two images of 4 x 6 patches; 2 x 2 of them are one token.
GRIDS, TOKENS_OF_IMAGE = [[1, 4, 6], [1, 4, 6]], 6

#: What sees images, where they are computed.
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "out_hidden_size": 128,
    "depth": 1,
    "num_heads": 2,
    "intermediate_size": 48,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [],
    "patch_size": 14,
    "num_position_embeddings": 64,
}
DIFFERENT_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": 128},
    CROSS: {
        "image_size": 56,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_num_tiles": 1,
        "max_aspect_ratio_id": 1,
        "num_global_layers": 1,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [1],
        "supported_aspect_ratios": [[1, 1]],
    },
}
DIFFERENT_TEXT: dict[str, dict[str, Any]] = {
    CROSS: {"num_hidden_layers": 3, "cross_attention_layers": [1]}
}


def seeing(name: str) -> Any:
    """A tiny model of a module, with what sees images, of random weights."""
    given = config(name)
    given["text_config"] |= DIFFERENT_TEXT.get(name, {})
    given["vision_config"] |= {**VISION, **DIFFERENT_VISION.get(name, {})}
    mx.random.seed(0)
    module = importlib.import_module(f"mlx_vlm.models.{name}")
    model = with_random_weights(module.Model(config_object(module, given)))
    if name == CROSS:  # its gate lets nothing through before it is trained
        model.language_model.model.layers[1].cross_attn_attn_gate = mx.ones(1)
    return model


def prompt_with_images(
    text: int, grids: list[list[int]], token: int = IMAGE, seed: int = 5
) -> tuple[mx.array, mx.array, mx.array]:
    """Token ids `[1, T]` with images between equal parts of a text, their pixels, and grids."""
    words = [word % 100 for word in prompt_tokens(text)]
    patches = [t * h * w for t, h, w in grids]
    part = text // (len(grids) + 1)
    tokens = words[:part]
    for i, count in enumerate(patches, 1):
        after = words[i * part : (i + 1) * part if i < len(grids) else None]
        tokens += [IMAGE_START, *[token] * (count // 4), *after]
    pixels = mx.random.normal((sum(patches), 3 * 2 * 14 * 14), key=mx.random.key(seed))
    return mx.array([tokens]), pixels, mx.array(grids)


def generated(
    model: Any,
    text: int,
    count: int,
    cache: list[Any] | None = None,
    images: list[list[int]] = GRIDS,
    chunk: int = 16,
    video: bool = False,
    seed: int = 5,
) -> list[int]:
    """Tokens after a prompt with images or videos, by mlx-vlm's own generator."""
    options: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "prompt_cache": cache}
    if model.config.model_type == CROSS:
        tokens = mx.array([prompt_tokens(text)])
        pixels = mx.random.normal((1, 1, 1, 3, 56, 56), key=mx.random.key(seed))
        ratios = mx.ones((1, 1), mx.int32)
        options |= {"aspect_ratio_ids": ratios, "aspect_ratio_mask": ratios[None]}
    else:
        token = VIDEO if video else IMAGE
        tokens, pixels, grids = prompt_with_images(text, images, token, seed)
        options |= {"video_grid_thw" if video else "image_grid_thw": grids}
        if video and model.config.model_type.startswith("qwen3"):
            options["pixel_values_videos"], pixels = pixels, None
    steps = generate_step(tokens, model, pixels, None, prefill_step_size=chunk, **options)
    return [token for token, _ in steps]
