"""mlx-h2o: bounded KV memory that keeps what matters, for any mlx-lm model.

Importing this package changes nothing in the process and takes milliseconds: a module is imported
when one of its names is first used. (mlx-lm, on which most of them stand, takes seconds.)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_h2o._install import backend_missing

if TYPE_CHECKING:
    from mlx_h2o._blas import use_openblas
    from mlx_h2o.attention.ops import (
        scaled_dot_product_attention_quantized_with_scores,
        scaled_dot_product_attention_with_scores,
    )
    from mlx_h2o.budgets.options import CacheOptions
    from mlx_h2o.budgets.profile import Profile
    from mlx_h2o.caches.conversation import new_turn, pin, unpin
    from mlx_h2o.caches.describe import describe
    from mlx_h2o.caches.files import load_prompt_cache, save_prompt_cache
    from mlx_h2o.caches.kv_cache import H2OKVCache
    from mlx_h2o.calibration.calibrate import calibrate
    from mlx_h2o.chat.memory_plan import plan
    from mlx_h2o.compression.compress import compress_prompt
    from mlx_h2o.loading.load import load
    from mlx_h2o.models.install import install, uninstall
    from mlx_h2o.models.make import make_prompt_cache
    from mlx_h2o.models.resize import resize
    from mlx_h2o.policies import (
        EMA,
        H2O,
        TOVA,
        Distinct,
        EMALogits,
        KeyDiff,
        Observation,
        Policy,
        Salient,
        Slots,
        SnapKV,
        Streaming,
        make_policy,
        register_policy,
    )
    from mlx_h2o.spill.setting import Spill

__version__ = "0.1.0"

# Each module with the public names that it gives: those imported above, for type checkers.
_NAMES_OF_MODULES = {
    "_blas": "use_openblas",
    "attention.ops": "scaled_dot_product_attention_quantized_with_scores "
    "scaled_dot_product_attention_with_scores",
    "budgets.options": "CacheOptions",
    "budgets.profile": "Profile",
    "caches.conversation": "new_turn pin unpin",
    "caches.describe": "describe",
    "caches.files": "load_prompt_cache save_prompt_cache",
    "caches.kv_cache": "H2OKVCache",
    "calibration.calibrate": "calibrate",
    "loading.load": "load",
    "compression.compress": "compress_prompt",
    "models.install": "install uninstall",
    "models.make": "make_prompt_cache",
    "chat.memory_plan": "plan",
    "models.resize": "resize",
    "policies": "EMA H2O TOVA Distinct EMALogits KeyDiff Observation "
    "Policy Salient Slots SnapKV Streaming make_policy register_policy",
    "spill.setting": "Spill",
}
_MODULE_OF = {
    name: f"{__name__}.{module}"
    for module, names in _NAMES_OF_MODULES.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first used.

    Raises:
        AttributeError: The package has no such public name.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULE_OF[name]), name)
    except ImportError as error:
        if (advice := backend_missing(error)) is None:
            raise
        raise ImportError(advice) from None
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "EMA",
    "H2O",
    "TOVA",
    "CacheOptions",
    "Distinct",
    "EMALogits",
    "H2OKVCache",
    "KeyDiff",
    "Observation",
    "Policy",
    "Profile",
    "Salient",
    "Slots",
    "SnapKV",
    "Spill",
    "Streaming",
    "calibrate",
    "compress_prompt",
    "describe",
    "install",
    "load",
    "load_prompt_cache",
    "make_policy",
    "make_prompt_cache",
    "new_turn",
    "pin",
    "plan",
    "register_policy",
    "resize",
    "save_prompt_cache",
    "scaled_dot_product_attention_quantized_with_scores",
    "scaled_dot_product_attention_with_scores",
    "uninstall",
    "unpin",
    "use_openblas",
]
