"""All properties that decide which texts a fused step compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from mlx_h2o.attention.backends.verification.compared import Error
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.storage.packed import Packing

#: The kernels of a step, whose text a verdict belongs to.
KERNELS = ("overwrite", "attention_vector", "attention_merge", "kept_keys", "update")


#: A function that compares small steps of a variant, with settings like a layer's, with the
#: definition.
Proof = Callable[["FusedVariant", CacheSettings], Error]


class Form(NamedTuple):
    """A layer's part of the variant (`CacheSettings.gpu_form`)."""

    score: str
    priority: str
    per_layer: bool
    age_normalised: bool
    value_weighted: bool
    packing: Packing
    framed: bool
    remembers: bool
    answers: bool


class FusedVariant(NamedTuple):
    """A layer's form, with the types of its rows and calls.

    Attributes:
        form: The layer's form, the attributes of `Form`.
        dtype: The dtype of keys and values.
        widths: The widths D and Dv.
        group: Query heads of a KV head.
        heads: KV heads where a layer's heads decide together, else 0.
        sinks: Whether there are attention sinks.
    """

    form: tuple[object, ...]
    dtype: mx.Dtype
    widths: tuple[int, int]
    group: int
    heads: int
    sinks: bool

    @classmethod
    def of(
        cls, settings: CacheSettings, call: AttentionCall, keys: mx.array, values: mx.array
    ) -> FusedVariant:
        """The variant of a step; computed at every step.

        Args:
            settings: The settings of a layer, whose policy has kernels.
            call: The call, with queries `[B, Hq, 1, D]` and sinks.
            keys: `[B, H, 1, D]`.
            values: `[B, H, 1, Dv]`.
        """
        form, (_, H, _, D) = settings.gpu_form, keys.shape
        assert form is not None
        heads = H if form[2] else 0
        group = call.q.shape[1] // H
        return cls(form, keys.dtype, (D, values.shape[-1]), group, heads, call.sinks is not None)

    def __str__(self) -> str:
        form = Form(*self.form)  # type: ignore[arg-type]
        dtype = str(self.dtype).rpartition(".")[2]
        parts = [f"a fused step of {dtype}, keys {self.widths[0]} wide, values {self.widths[1]}"]
        parts[0] += str(form.packing)
        if form.packing.packs:
            parts[0] += f" by {form.packing.group_size}"
        parts += [f"{self.group} query heads a KV head"]
        parts += [f"scores {form.score}", f"victims by {form.priority}"]
        parts += [f"{self.heads} heads together"] * bool(self.heads)
        parts += ["by age"] * form.age_normalised + ["by values"] * form.value_weighted
        parts += ["in a frame"] * form.framed + ["sinks"] * self.sinks
        parts += ["a remainder"] * form.answers
        parts += ["statistics of the evicted"] * (form.remembers and not form.answers)
        return ", ".join(parts)
