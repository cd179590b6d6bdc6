"""Policies, one a file; importing them registers them."""

from mlx_h2o.policies.base import KernelPolicy, Observation, ObservedMass, Policy, Slots
from mlx_h2o.policies.distinct import Distinct
from mlx_h2o.policies.ema import EMA
from mlx_h2o.policies.ema_logits import EMALogits
from mlx_h2o.policies.h2o import H2O
from mlx_h2o.policies.keydiff import KeyDiff
from mlx_h2o.policies.registry import make_policy, policy_names, register_policy, register_preset
from mlx_h2o.policies.salient import Salient
from mlx_h2o.policies.snapkv import SnapKV
from mlx_h2o.policies.streaming import Streaming
from mlx_h2o.policies.tova import TOVA

__all__ = [
    "EMA",
    "H2O",
    "TOVA",
    "Distinct",
    "EMALogits",
    "KernelPolicy",
    "KeyDiff",
    "Observation",
    "ObservedMass",
    "Policy",
    "Salient",
    "Slots",
    "SnapKV",
    "Streaming",
    "make_policy",
    "policy_names",
    "register_policy",
    "register_preset",
]
