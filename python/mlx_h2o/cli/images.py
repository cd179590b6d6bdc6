"""`generate --image`: a prompt with images, read and answered by mlx-vlm within bounded memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.cli.sampling import NO_LIMIT

#: Options that need the prompt's tokens, which mlx-vlm makes; by their names in the namespace.
EXCLUDED = {
    "pin_role": "--pin-role",
    "pin": "--pin",
    "prompt_cache_file": "--prompt-cache-file",
    "save_prompt_cache": "--save-prompt-cache",
}


def require_images(args: argparse.Namespace) -> None:
    """Raise ValueError if a file is missing, or an option is given that images exclude."""
    for path in map(Path, args.image):
        if not path.is_file():
            raise ValueError(f"--image: there is no file {path}.")
    given = [option for name, option in EXCLUDED.items() if getattr(args, name)]
    if args.reading == "twice":
        given.append("--reading twice")
    if given:
        raise ValueError(f"{given[0]} cannot be used with --image.")


def load_seeing(path: str) -> tuple[nn.Module, Any]:
    """A model of mlx-vlm, and the processor of its text and images.

    Raises:
        ValueError: mlx-vlm is not installed or does not support the model, or it sees no images.
    """
    try:
        from mlx_vlm import load
    except ImportError as error:
        raise ValueError(f"--image needs mlx-vlm: pip install mlx-vlm ({error}).") from error
    try:
        model, processor = load(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--image needs a model of mlx-vlm, and {path} is none: {error}"
        ) from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(f"{path} sees no images: omit --image, or name a model that does.")
    return model, processor


def begin(
    args: argparse.Namespace,
    model: Any,
    processor: Any,
    prompt: str,
    cache: list[Any],
    sampler: Callable[[mx.array], mx.array],
) -> tuple[Iterator[Any], Any, dict[str, Any]]:
    """Read prompt and images, and generate the first token.

    Args:
        args: The command's options.
        model: The model.
        processor: Its processor.
        prompt: The message.
        cache: The model's caches.
        sampler: Chooses tokens from log-probabilities.

    Returns:
        As `begin` of `generate` without images.
    """
    from mlx_vlm import stream_generate
    from mlx_vlm.prompt_utils import apply_chat_template

    messages = [{"role": "user", "content": prompt}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    text: Any = apply_chat_template(processor, model.config, messages, num_images=len(args.image))
    responses = stream_generate(
        model,
        processor,
        text,
        image=args.image,
        prompt_cache=cache,
        sampler=sampler,
        max_tokens=sys.maxsize if args.max_tokens == NO_LIMIT else args.max_tokens,
    )
    first = next(responses)
    read = {"prompt_tokens": first.prompt_tokens, "prompt_tps": first.prompt_tps}
    return responses, first, {**read, "prompt_readings": 1}
