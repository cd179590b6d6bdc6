"""The caches of an evaluation by their bytes: mlx-lm's own in every run, ours, and any policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o.budgets.settings import DEFAULT_POLICY, PROFILES, ModelSettings, budgets_of_model
from mlx_h2o.evaluate.arms import FULL, OURS, PACKED, WINDOW, Arm
from mlx_h2o.evaluate.stage import Stage, read
from mlx_h2o.evaluate.workers import Tell
from mlx_h2o.model_caches.compress import compress_into
from mlx_h2o.policies.settings import setting_of

#: The default parts of a full 16-bit cache's bytes.
SHARES = (0.5, 0.25, 0.125, 0.0625)
# A share is written as a fraction with no larger denominator.
LARGEST_DENOMINATOR = 64
#: The name that stands in the place of a policy.
COMPRESSOR = "kvzip"
#: Slots of each head that a compressor leaves for an answer.
ANSWER = 8


@dataclass(frozen=True)
class Contender:
    """A cache, and the bytes that it gets.

    Attributes:
        arm: The cache.
        share: The part of a full 16-bit cache's bytes that it gets; None if it keeps all tokens.
    """

    arm: Arm
    share: float | None = None

    #: How often the cache reads a prompt.
    readings: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """The contender's name for people: "mlx-h2o, 1/8"."""
        return self.arm.name if self.share is None else f"{self.arm.name}, {label(self.share)}"

    def make(self, model: nn.Module, tokens: int) -> list[Any]:
        """An empty cache for a conversation of `tokens` tokens.

        Raises:
            ValueError: The bytes are too few for it.
        """
        return self.arm.make(model, max(round((self.share or 1) * tokens), 1), context=tokens)

    def after(self, stage: Stage, tokens: mx.array, context: int, tell: Tell) -> list[Any]:
        """A cache that has read a prompt `[B, T]` of a conversation of `context` tokens.

        Args:
            stage: Model and text.
            tokens: The prompt `[B, T]`.
            context: The conversation's tokens in all.
            tell: Called with the tokens read since the last call.

        Raises:
            ValueError: The bytes are too few for it.
        """
        cache = self.make(stage.model, context)
        read(stage.model, cache, tokens, stage.chunk, tell)
        return cache


class Compressor(Contender):
    """KVzip: a prompt that is known whole is read twice, and cut down once."""

    readings = 2

    def make(self, model: nn.Module, tokens: int) -> list[Any]:
        raise ValueError(
            f"{COMPRESSOR} cuts prompts down that are known whole; it does not read along."
        )

    def after(self, stage: Stage, tokens: mx.array, context: int, tell: Tell) -> list[Any]:
        # Question and answer get the rest of the bytes, and nothing beyond them.
        room = context - tokens.shape[1] + ANSWER
        return compress_into(
            super().make(stage.model, context),
            *(stage.model, stage.tokenizer, tokens),
            room=room,
            within=True,
            chunk=stage.chunk,
            tell=tell,
        )


def label(share: float) -> str:
    """0.125 as "1/8", 0.3 as "30%"."""
    part = Fraction(share).limit_denominator(LARGEST_DENOMINATOR)
    return str(part) if part.numerator == 1 else f"{share:.0%}"


def contenders(
    policies: Sequence[str] = (),
    shares: Sequence[float] = SHARES,
    budgets: str | None = None,
    profile: str = PROFILES[0],
) -> list[Contender]:
    """The full cache first, mlx-lm's packed ones, then the window, ours and policies by shares.

    Args:
        policies: The policies, as `arm_of` reads them.
        shares: Parts of a full 16-bit cache's bytes.
        budgets: "uniform" or a profile's path instead of the model's own, for ours.
        profile: Whether a model without a profile is measured.

    Raises:
        ValueError: A policy, a setting or a share is invalid, or the profile is unreadable.
    """
    budgets_of_model(budgets)
    for share in shares:
        if not 0 < share < 1:
            raise ValueError(f"A share of the bytes must be between 0 and 1; got {share}.")
    ours = Arm(OURS, DEFAULT_POLICY, budgets=budgets, by_bytes=True)
    bounded = [replace(arm, profile=profile) for arm in (ours, *map(arm_of, policies))]
    return [
        Contender(Arm(FULL)),
        *(Contender(Arm(name)) for name in PACKED),
        *(_kind_of(arm)(arm, share) for share in shares for arm in (Arm(WINDOW), *bounded)),
    ]


def _kind_of(arm: Arm) -> type[Contender]:
    return Compressor if arm.name.split(":")[0] == COMPRESSOR else Contender


def arm_of(spec: str) -> Arm:
    """A policy as written on the command line.

    Args:
        spec: `h2o`, `h2o:recent=64`, `salient:bits=6:budgets=uniform`, `keydiff:remainder=false`.
            Budgets are uniform unless the text names others, and rows are dense. `kvzip` compresses
            prompts (model_caches/compress.py), with bits chosen by bytes.

    Raises:
        ValueError: There is no such policy or setting.
    """
    policy, *given = spec.split(":")
    fields = dict(setting_of(field) for field in given)
    if policy == COMPRESSOR:
        ModelSettings.of(1, **fields)
        settings = tuple(fields.items())
        return Arm(spec, DEFAULT_POLICY, settings=settings, by_bytes="bits" not in fields)
    remainder, budgets = fields.pop("remainder", True), fields.pop("budgets", "uniform")
    arm = Arm(spec, policy, remainder, None if budgets == "profile" else budgets)
    arm = replace(arm, settings=tuple(fields.items()))
    ModelSettings.of(1, policy=policy, remainder=remainder, **fields)
    budgets_of_model(arm.budgets)
    return arm
