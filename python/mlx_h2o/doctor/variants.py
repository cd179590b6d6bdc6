"""The kernel variants that doctor compares with the definition."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.backends.self_check import Error, Verdict
from mlx_h2o.attention.backends.self_check_variants import (
    OF_MLX,
    OPERATIONS,
    AttentionVariant,
    FusedVariant,
    check_attention,
)
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.layer.step import prove_fused
from mlx_h2o.policies import make_policy
from mlx_h2o.slots.key_scaling import Frame
from mlx_h2o.slots.packed import Packing

#: Of attention's operations, and of fused steps: so many that most pairs of options occur.
VARIANTS = 80
GROUP_SIZE, HEADS = 32, 2
#: What both kinds of variants have, by name. Widths are D and Dv: usual ones, one that is no power
#: of two, and those of a latent cache. Bits are those of keys and values; 0 is dense.
SHARED: dict[str, Sequence[Any]] = {
    "dtype": (mx.float32, mx.float16, mx.bfloat16),
    "widths": ((64, 64), (128, 128), (96, 96), (192, 128), (576, 512)),
    "bits": ((0, 0), (8, 8), (6, 6), (5, 5), (4, 4), (3, 3), (2, 2), (8, 4)),
    "group": (1, 4, 8),
    "sinks": (False, True),
}
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
    """A variant, and the function that compares it with the definition."""

    variant: AttentionVariant | FusedVariant
    error: Callable[[], Error]

    def verdict(self) -> Verdict:
        """Run it on the default device, whose GPU remembers the verdict."""
        gpu = choice.gpu()
        if gpu is not None:
            return gpu.self_check.check(self.variant, self.error)
        return Verdict.of(str(self.variant), self.error)


def every_check() -> Iterator[Check]:
    """Checks of the default device's kernels and of MLX's own attention."""
    for variant in attention_variants():
        yield Check(variant, partial(_attention_error, variant))
    for fused, settings in fused_variants():
        yield Check(fused, partial(prove_fused, fused, settings))
    for dtype, group in product(SHARED["dtype"], SHARED["group"]):
        of_mlx = AttentionVariant(OF_MLX, dtype, (128, 128), (0, 1, 0, 1), group, queries=1)
        yield Check(of_mlx, partial(_attention_error, of_mlx))


def _attention_error(variant: AttentionVariant) -> Error:
    return check_attention(choice.gpu() or choice.backend(), variant)


def attention_variants() -> Iterator[AttentionVariant]:
    """Variants of the attention operations; 0 queries are a prompt."""
    choices = {
        "operation": OPERATIONS,
        "queries": (1, 4, 0),
        "mask": ("none", "causal", "bool", "float"),
        "ranges": (False, True),
        **SHARED,
    }

    def exists(c: dict[str, Any]) -> bool:
        if c["operation"] == "attention" and c["bits"] == (0, 0) and not c["ranges"]:
            return False  # MLX's own
        if c["operation"] == "attention_with_scores" and not c["queries"]:
            return False  # no policy needs the logits of many queries
        if c["ranges"] and c["mask"] in ("bool", "float"):
            return False
        return not (c["queries"] == 1 and c["mask"] == "causal")

    for c in sample(choices, exists):
        k, v = c.pop("bits")
        c["packing"] = (k, GROUP_SIZE if k else 1, v, GROUP_SIZE if v else 1)
        if c["mask"] == "float":
            c["mask"] = str(c["dtype"]).rpartition(".")[2]
        yield AttentionVariant(**c)


def fused_variants() -> Iterator[tuple[FusedVariant, CacheSettings]]:
    """Variants of fused steps, each with settings of a layer that has such steps."""
    choices = {"policy": POLICIES, "remainder": (True, False), "framed": (False, True), **SHARED}
    on_gpu = choice.gpu() is not None

    def exists(c: dict[str, Any]) -> bool:
        by_values = c["policy"][1].get("value_weighted")  # a GPU's alone
        return not (c["framed"] and c["bits"] == (0, 0)) and (on_gpu or not by_values)

    for c in sample(choices, exists):
        (name, own), (k, v) = c["policy"], c["bits"]
        key_scaling = Frame(mx.zeros((HEADS, c["widths"][0])), mx.ones((HEADS, c["widths"][0])))
        settings = CacheSettings(
            budgets=(64,) * HEADS,
            policy=make_policy(name, **own),
            remainder=c["remainder"],
            packing=Packing(k, v, GROUP_SIZE) if k else Packing(),
            frame=key_scaling if c["framed"] else None,
        )
        assert settings.gpu_form is not None
        together = HEADS if settings.policy.unit == "layer" else 0
        variant = FusedVariant(
            settings.gpu_form, c["dtype"], c["widths"], c["group"], together, c["sinks"]
        )
        yield variant, settings


def sample(
    choices: Mapping[str, Sequence[Any]], exists: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """`VARIANTS` of the combinations of choices that exist, always the same."""
    every = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    return random.Random(0).sample([chosen for chosen in every if exists(chosen)], VARIANTS)
