"""mlx-h2o: bounded KV memory that keeps what matters, for any mlx-lm model."""

from mlx_h2o._utils import interrupts  # noqa: F401  First: the other imports take seconds.
from mlx_h2o.attention.blas import blas, use_openblas
from mlx_h2o.attention.ops import attention_mass, scaled_dot_product_attention_with_scores
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.caches.conversation import new_turn, pin, unpin
from mlx_h2o.caches.describe import describe
from mlx_h2o.caches.files import load_prompt_cache, save_prompt_cache
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.caches.latent import LatentKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.caches.shared import SharedKVCache
from mlx_h2o.calibration.calibrate import calibrate
from mlx_h2o.calibration.centres_build import learn_query_centres
from mlx_h2o.calibration.exact_kl import calibrate_exactly
from mlx_h2o.calibration.scaling_build import frames_of
from mlx_h2o.chat.pin_rules import PinRules, spans_for
from mlx_h2o.engine.pins_and_turns import PinAnswer
from mlx_h2o.loading.load import load
from mlx_h2o.model_caches.compress import compress_prompt
from mlx_h2o.model_caches.install import install, uninstall
from mlx_h2o.model_caches.make import make_prompt_cache
from mlx_h2o.model_caches.memory_plan import MemoryPlan, plan
from mlx_h2o.model_caches.resize import resize
from mlx_h2o.policies import (
    EMA,
    H2O,
    RKV,
    TOVA,
    AdaKV,
    ChunkKV,
    Distinct,
    EMALogits,
    KeyDiff,
    Observation,
    Policy,
    Slots,
    SnapKV,
    Streaming,
    TriAttention,
    make_policy,
    policy_names,
    register_policy,
    register_preset,
)
from mlx_h2o.policies.selection import accumulate, select_victims
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.query_centres import QueryCentres
from mlx_h2o.storage.remainder import Remainder

__version__ = "0.1.0"

use_openblas()

__all__ = [
    "EMA",
    "H2O",
    "RKV",
    "TOVA",
    "AdaKV",
    "BatchH2OKVCache",
    "ChunkKV",
    "Distinct",
    "EMALogits",
    "Frame",
    "H2OKVCache",
    "KeyDiff",
    "LatentKVCache",
    "MemoryPlan",
    "Observation",
    "PinAnswer",
    "PinRules",
    "PlainRowsKVCache",
    "Policy",
    "Profile",
    "QueryCentres",
    "Remainder",
    "SharedKVCache",
    "Slots",
    "SnapKV",
    "Streaming",
    "TriAttention",
    "accumulate",
    "attention_mass",
    "blas",
    "calibrate",
    "calibrate_exactly",
    "compress_prompt",
    "describe",
    "frames_of",
    "install",
    "learn_query_centres",
    "load",
    "load_prompt_cache",
    "make_policy",
    "make_prompt_cache",
    "new_turn",
    "pin",
    "plan",
    "policy_names",
    "register_policy",
    "register_preset",
    "resize",
    "save_prompt_cache",
    "scaled_dot_product_attention_with_scores",
    "select_victims",
    "spans_for",
    "uninstall",
    "unpin",
]
