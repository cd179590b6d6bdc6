"""mlx-h2o: bounded KV memory that keeps what matters, for any mlx-lm model."""

from mlx_h2o import interrupts  # noqa: F401  First: the other imports take seconds.
from mlx_h2o.attention import attention_mass, scaled_dot_product_attention_with_scores
from mlx_h2o.batch_cache import BatchH2OKVCache
from mlx_h2o.bounding import install, uninstall
from mlx_h2o.builtin import load
from mlx_h2o.cache import H2OKVCache
from mlx_h2o.cache_file import load_prompt_cache, save_prompt_cache
from mlx_h2o.calibration import calibrate
from mlx_h2o.conversations import new_turn, pin, unpin
from mlx_h2o.description import describe
from mlx_h2o.frame import Frame
from mlx_h2o.kept_centres import learn_query_centres
from mlx_h2o.key_frames import frames_of
from mlx_h2o.kl_calibration import calibrate_exactly
from mlx_h2o.latent_cache import LatentKVCache
from mlx_h2o.linear_algebra import blas, use_openblas
from mlx_h2o.pin_rules import PinRules, spans_for
from mlx_h2o.pinning import PinAnswer
from mlx_h2o.plain_rows_cache import PlainRowsKVCache
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
from mlx_h2o.profile import Profile
from mlx_h2o.prompt_cache import make_prompt_cache
from mlx_h2o.query_centres import QueryCentres
from mlx_h2o.remainder import Remainder
from mlx_h2o.rereading import compress_prompt
from mlx_h2o.resizing import resize
from mlx_h2o.selection import accumulate, select_victims
from mlx_h2o.shared_cache import SharedKVCache

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
