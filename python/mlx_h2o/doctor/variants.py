"""The kernel variants that doctor checks, and the checks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.backends.verification import attention_case, fused_variant, mlx_attention
from mlx_h2o.attention.backends.verification.attention_case import AttentionVariant
from mlx_h2o.attention.backends.verification.compared import Error
from mlx_h2o.attention.backends.verification.fused_variant import FusedVariant
from mlx_h2o.attention.backends.verification.mlx_attention import MLXVariant
from mlx_h2o.attention.backends.verification.verdicts import Verdict
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.doctor.cover import pairs_covered
from mlx_h2o.engine.step import prove_fused
from mlx_h2o.policies import make_policy
from mlx_h2o.storage.key_scaling import Frame
from mlx_h2o.storage.packed import Packing

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
#: D and Dv: usual ones, one that is no power of two, and those of a latent cache.
WIDTHS = ((64, 64), (128, 128), (96, 96), (192, 128), (576, 512))
#: Bits of keys and of values; 0 is dense.
BITS = ((0, 0), (8, 8), (6, 6), (5, 5), (4, 4), (3, 3), (2, 2), (8, 4))
GROUP_SIZE = 32
GROUPS = (1, 4, 8)
#: A policy of each form that the kernels know, with its settings.
POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("salient", {}),
    ("h2o", {}),
    ("h2o", {"age_normalised": True, "evict_every": 3}),
    ("ema", {"unit": "layer"}),
    ("ema-logits", {}),
    ("tova", {}),
    ("streaming", {}),
    ("keydiff", {}),
    ("distinct", {}),
    ("distinct", {"unit": "layer"}),
    ("h2o", {"value_weighted": True}),
)


class Check(NamedTuple):
    """One variant, and what runs it beside the definition."""

    name: str
    run: Callable[[], Verdict]


def checks() -> Iterator[Check]:
    """Every variant of the default device's kernels, such that all pairs of options occur."""
    for variant in attention_variants():
        yield Check(str(variant), partial(_attention, variant))
    for fused, settings in fused_variants():
        yield Check(str(fused), partial(_fused, fused, settings))
    for dtype, group in itertools.product(DTYPES, GROUPS):
        of_mlx = MLXVariant(dtype, (128, 128), group, 1, masked=False, sinks=False)
        yield Check(str(of_mlx), partial(_mlx, of_mlx))


def attention_variants() -> list[AttentionVariant]:
    """Of the operations."""
    choices = {
        "operation": attention_case.OPERATIONS,
        "dtype": DTYPES,
        "widths": WIDTHS,
        "bits": BITS,
        "group": GROUPS,
        "queries": (1, 4, 0),
        "mask": ("none", "causal", "bool", "float"),
        "sinks": (False, True),
        "ranges": (False, True),
    }

    def allowed(chosen: dict[str, Any]) -> bool:
        dense, one = chosen["bits"] == (0, 0), chosen["queries"] == 1
        if chosen["operation"] == "attention" and dense and not chosen["ranges"]:
            return False  # MLX's own
        if chosen["operation"] == "attention_with_scores" and not chosen["queries"]:
            return False  # no policy needs the logits of many queries
        if chosen["ranges"] and chosen["mask"] in ("bool", "float"):
            return False
        return not (one and chosen["mask"] == "causal")

    return [_attention_variant(chosen) for chosen in pairs_covered(choices, allowed)]


def _attention_variant(chosen: dict[str, Any]) -> AttentionVariant:
    k, v = chosen["bits"]
    mask = chosen["mask"]
    if mask == "float":
        mask = str(chosen["dtype"]).rpartition(".")[2]
    return AttentionVariant(
        chosen["operation"],
        chosen["dtype"],
        chosen["widths"],
        (k, GROUP_SIZE if k else 1, v, GROUP_SIZE if v else 1),
        chosen["group"],
        chosen["queries"],
        mask,
        chosen["sinks"],
        chosen["ranges"],
    )


def fused_variants() -> list[tuple[FusedVariant, CacheSettings]]:
    """Of fused steps, with settings of a layer that has them."""
    choices = {
        "policy": POLICIES,
        "dtype": DTYPES,
        "widths": WIDTHS,
        "bits": BITS,
        "group": GROUPS,
        "remainder": (True, False),
        "framed": (False, True),
        "sinks": (False, True),
    }
    on_gpu = choice.gpu() is not None

    def allowed(chosen: dict[str, Any]) -> bool:
        by_values = chosen["policy"][1].get("value_weighted")
        return not (chosen["framed"] and chosen["bits"] == (0, 0)) and (on_gpu or not by_values)

    return [_fused_variant(chosen) for chosen in pairs_covered(choices, allowed)]


def _fused_variant(chosen: dict[str, Any]) -> tuple[FusedVariant, CacheSettings]:
    name, own = chosen["policy"]
    k, v = (bits or None for bits in chosen["bits"])
    D, Dv = chosen["widths"]
    heads = 2
    settings = CacheSettings(
        budgets=(64,) * heads,
        policy=make_policy(name, **own),
        remainder=chosen["remainder"],
        packing=Packing(k, v, GROUP_SIZE) if k else Packing(),
        frame=Frame(mx.zeros((heads, D)), mx.ones((heads, D))) if chosen["framed"] else None,
    )
    form = settings.gpu_form
    assert form is not None
    together = heads if settings.policy.unit == "layer" else 0
    variant = FusedVariant(
        form, chosen["dtype"], (D, Dv), chosen["group"], together, chosen["sinks"]
    )
    return variant, settings


def _attention(variant: AttentionVariant) -> Verdict:
    """An operation on the default device; of a GPU the verdict is kept."""
    gpu = choice.gpu()
    if gpu is not None:
        return gpu.verdicts.checked(
            variant, attention_case.KERNELS, lambda: attention_case.check(gpu, variant)
        )
    return _tried(str(variant), lambda: attention_case.check(choice.backend(), variant))


def _fused(variant: FusedVariant, settings: CacheSettings) -> Verdict:
    """A fused step on the default device, likewise."""
    gpu = choice.gpu()
    if gpu is not None:
        return gpu.verdicts.checked(
            variant, fused_variant.KERNELS, lambda: prove_fused(variant, settings)
        )
    return _tried(str(variant), lambda: prove_fused(variant, settings))


def _mlx(variant: MLXVariant) -> Verdict:
    """MLX's own attention on the default device, likewise."""
    gpu = choice.gpu()
    if gpu is not None:
        return gpu.verdicts.checked(variant, (), lambda: mlx_attention.check(variant))
    return _tried(str(variant), lambda: mlx_attention.check(variant))


def _tried(name: str, check: Callable[[], Error]) -> Verdict:
    """A check whose kernels are not asked for a verdict: those of the CPU."""
    start = time.perf_counter()
    try:
        found = check()
        held, why, size = found.held, found.where, found.size
    except (RuntimeError, ValueError) as raised:
        held, why, size = False, f"raised {type(raised).__name__}: {raised}", math.inf
    return Verdict(name, held, why, size, time.perf_counter() - start)
