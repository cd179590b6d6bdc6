"""The package's own model, its profile and texts; and loading models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import _checks
from mlx_h2o._blas import use_openblas
from mlx_h2o.loading import demo_model, gguf, vlm_text

PACKAGE = Path(__file__).parents[1]
#: The folder of the models named `--model builtin:NAME`.
MODELS = PACKAGE / "data"
PREFIX = "builtin:"
#: The small model that ships with the package: 4 million parameters, for tests and without network.
EMBEDDED_MODEL = "builtin:recall-4m"
#: The model of every command where none is named.
DEFAULT_MODEL = demo_model.NAME
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

SAMPLE_TEXT = PACKAGE / "data" / "sample.txt"
CALIBRATION_TEXT = PACKAGE / "data" / "calibration.txt"
#: Code, tables, languages and chat: the text that fits the key scaling (`Frame`) of packed keys.
MIXED_TEXT = PACKAGE / "data" / "mixed.txt"


def model_path(name: str) -> str:
    """The folder of a `builtin:` model, the file of `smollm2-135m`; any other name as it is.

    Raises:
        ValueError: No such model is built in, or it cannot be fetched.
    """
    if name == demo_model.NAME:
        return str(demo_model.path())
    if not name.startswith(PREFIX):
        return name
    folder = MODELS / name.removeprefix(PREFIX)
    if not (folder / "config.json").exists():
        names = ", ".join(
            sorted(PREFIX + path.parent.name for path in MODELS.glob("*/config.json"))
        )
        raise ValueError(f"There is no {name}; built in: {names}.")
    return str(folder)


def shipped_profiles() -> list[Path]:
    """The profiles of the built-in models, and of `smollm2-135m`."""
    return sorted([*MODELS.glob("*/mlx_h2o_profile.json"), *PACKAGE.glob("data/*.profile.json")])


def laid_out_for_cpu(weight: mx.array) -> mx.array:
    """The same float32 matrix with its columns contiguous in memory.

    x @ W.T is then a product of row-contiguous matrices, which the BLAS in MLX's CPU wheel computes
    two to three times as fast.
    """
    if weight.ndim != 2 or weight.dtype != mx.float32:
        return weight
    return mx.contiguous(weight.T).T


def require_model(name: str, path: str) -> None:
    """Raise ValueError if a name is neither a folder nor could be a hub's id."""
    if Path(path).is_dir():
        return
    if Path(path).exists():
        raise ValueError(
            f"The model {name!r} is a file: give the folder of its config.json, or a .gguf file."
        )
    if not HUB_ID.fullmatch(name):
        near = _checks.suggestion(name, [demo_model.NAME, EMBEDDED_MODEL])
        raise ValueError(
            f"There is no folder {name!r}, and a model's id on the hub is OWNER/NAME.{near}"
        )


def load(name: str = DEFAULT_MODEL, dtype: mx.Dtype | None = None) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer.

    A built-in model is computed in float32 on a CPU: for it MLX's matrix products are those of
    OpenBLAS from then on, where it is installed (`mlx_h2o.use_openblas`).

    Args:
        name: A folder or hub id (mlx-lm's own loader reads them; for text alone, where mlx-vlm is
            installed, that of mlx-vlm reads what mlx-lm does not support), `builtin:recall-4m`,
            `smollm2-135m` (fetched when it is first used), or a `.gguf` file of the families llama,
            qwen2, qwen3 and gemma3, of which every type of weights is dequantized.
        dtype: Cast the weights to it. Built-in models default to float32 on the CPU, where 16-bit
            arithmetic is slow, and to their own dtype elsewhere; GGUF files default to float32 on
            the CPU if their weights then take at most two fifths of the memory, and to 16 bits
            elsewhere.

    Returns:
        The model, which remembers its folder, so that a profile beside its weights is found, and
        its tokenizer, so that the key scaling of packed keys can be fitted; and the tokenizer.

    Raises:
        ValueError: No such model can be found or fetched, or its file is damaged.
    """
    path = model_path(name)
    if name.startswith(PREFIX) or name == demo_model.NAME:
        use_openblas()
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    if path.endswith(gguf.SUFFIX):
        model, tokenizer = gguf.load(path, dtype)
    else:
        model, tokenizer = _loaded_by_a_library(path, name)
        if dtype is None and on_cpu and name.startswith(PREFIX):
            dtype = mx.float32
        if dtype is not None:
            model.set_dtype(dtype)
    if on_cpu:
        model.apply(laid_out_for_cpu)
    if Path(path).is_dir():
        model.mlx_h2o_folder = str(Path(path))
    model.mlx_h2o_tokenizer = tokenizer
    # A lazy array can be evaluated only in the thread that made it.
    mx.eval(model.parameters())
    return model, tokenizer


def _loaded_by_a_library(path: str, name: str) -> tuple[nn.Module, Any]:
    from mlx_lm import load as load_model

    require_model(name, path)
    try:
        try:
            model, tokenizer = load_model(path)[:2]
        except ValueError as error:
            if "not supported" not in str(error):
                raise
            model, tokenizer = vlm_text.load(path, error)
    except OSError as error:  # the hub's errors are OSErrors too
        here = "" if Path(path).is_dir() else "there is no such folder, and the hub says: "
        reason = " ".join(str(error).split())
        raise ValueError(f"Cannot load the model {name!r}: {here}{reason}") from error
    return model, tokenizer
