"""What ships inside the package: the embedded model, its profile, and texts; and loading models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

PACKAGE = Path(__file__).parent
#: `--model builtin:NAME` means a folder of this one.
MODELS = PACKAGE / "models"
PREFIX = "builtin:"
DEFAULT_MODEL = "builtin:recall-4m"

SAMPLE_TEXT = PACKAGE / "data" / "sample.txt"
CALIBRATION_TEXT = PACKAGE / "data" / "calibration.txt"


def model_path(name: str) -> str:
    """The folder of a `builtin:` model; any other name (a folder or hub id) as it is.

    Raises:
        ValueError: No such model is built in.
    """
    if not name.startswith(PREFIX):
        return name
    folder = MODELS / name.removeprefix(PREFIX)
    if not (folder / "config.json").exists():
        known = ", ".join(
            sorted(PREFIX + path.parent.name for path in MODELS.glob("*/config.json"))
        )
        raise ValueError(f"There is no {name}; built in: {known}.")
    return str(folder)


def shipped_profiles() -> list[Path]:
    """The profiles of the built-in models."""
    return sorted(MODELS.glob("*/mlx_h2o_profile.json"))


def laid_out_for_cpu(weight: mx.array) -> mx.array:
    """The same float32 matrix with its columns contiguous in memory.

    x @ W.T is then a product of row-contiguous matrices, which the BLAS in MLX's CPU wheel computes
    two to three times as fast.
    """
    if weight.ndim != 2 or weight.dtype != mx.float32:
        return weight
    return mx.contiguous(weight.T).T


def load(name: str = DEFAULT_MODEL, dtype: mx.Dtype | None = None) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer with mlx-lm's own loader.

    Args:
        name: A folder, a hub id, or `builtin:recall-4m`.
        dtype: Cast the weights to it; built-in models default to float32 on the CPU, where 16-bit
            arithmetic is slow, and to their own dtype elsewhere.

    Returns:
        The model, which remembers its folder so that a profile beside its weights is found, and the
        tokenizer.

    Raises:
        ValueError: No such model can be found.
    """
    from mlx_lm import load as load_model

    path = model_path(name)
    try:
        model, tokenizer = load_model(path)[:2]
    except FileNotFoundError as error:
        raise ValueError(f"Cannot load the model {name!r}: {error}") from error
    if dtype is None and name.startswith(PREFIX) and mx.default_device() == mx.Device(mx.cpu):
        dtype = mx.float32
    if dtype is not None:
        model.set_dtype(dtype)
    if mx.default_device() == mx.Device(mx.cpu):
        model.apply(laid_out_for_cpu)
    if Path(path).is_dir():
        model.mlx_h2o_folder = str(Path(path))
    return model, tokenizer
