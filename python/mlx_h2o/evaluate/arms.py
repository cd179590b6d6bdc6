"""The caches of a comparison: mlx-lm's own and ours, each of a certain size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o.budgets.cost import group_size_of
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.budgets.settings import DEFAULT_POLICY, PROFILES, ModelSettings, budgets_of_model
from mlx_h2o.calibration.first_use import profile_at_load
from mlx_h2o.evaluate.equal_bytes import caches_in_16_bits, slots_in_16_bits
from mlx_h2o.integration.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.integration.stock_caches import stock_caches
from mlx_h2o.model_caches.make import bounded_caches
from mlx_h2o.policies.settings import setting_of

FULL = "full cache"
WINDOW = "sliding window"
OURS = "mlx-h2o"
# mlx-lm's own packed caches, which keep every token.
PACKED = {"mlx-lm, 8 bits": 8, "mlx-lm, 4 bits": 4}
# Tokens of the beginning that RotatingKVCache keeps in mlx-lm's own make_prompt_cache.
WINDOW_KEEP = 4
# The suffix of a cache's name where there are several sizes.
OF_SIZE = ", {} tokens"


@dataclass(frozen=True)
class Arm:
    """One cache of a comparison.

    Attributes:
        name: The cache's name, for people.
        policy: A policy's name, or None for mlx-lm's own cache (full, or the window).
        remainder: Whether evicted tokens are kept as a remainder.
        budgets: As in `make_prompt_cache`.
        settings: Fields of the policy, as pairs.
        by_bytes: Whether the size is given in bytes, so that bits and slots are chosen together.
        size: Tokens whose bytes (or slots) it gets; None means those of the comparison.
        profile: Whether a model without a profile is measured, as in `make_prompt_cache`.
    """

    name: str
    policy: str | None = None
    remainder: bool = True
    budgets: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    by_bytes: bool = False
    size: int | None = None
    profile: str = PROFILES[0]

    @property
    def base(self) -> str:
        """The cache's name without the size, which names tell if there are several."""
        return self.name.removesuffix(OF_SIZE.format(self.size))

    def make(
        self, model: nn.Module, max_size: int, equal: str = "bytes", context: int | None = None
    ) -> list[Any]:
        """An empty cache.

        Args:
            model: The model that the cache is for.
            max_size: Tokens that the window holds, unless the arm has a size of its own.
            equal: "bytes": no more bytes than those tokens take in a 16-bit model; "slots": as many
                slots per KV head, on average, however rows are stored.
            context: Tokens that will come, where bits are chosen; None means the model's longest
                context.

        Raises:
            ValueError: There is no such cache, or the size is too small for it.
        """
        max_size = self.size or max_size
        if self.name == FULL:
            return stock_caches(model)
        if self.name in PACKED:
            group_size = group_size_of([kind.widths for kind in layer_kinds(model)])
            if group_size is None:
                raise ValueError(
                    f"{self.name}: this model's keys and values are too narrow to be packed "
                    "(`compare --only` leaves a cache out)."
                )
            return [
                mlx_lm_cache.QuantizedKVCache(group_size=group_size, bits=PACKED[self.name])
                if type(entry) is mlx_lm_cache.KVCache
                else entry
                for entry in stock_caches(model)
            ]
        if self.policy is None:
            return [
                mlx_lm_cache.RotatingKVCache(max_size=max_size, keep=WINDOW_KEEP)
                if type(entry) is mlx_lm_cache.KVCache
                else entry
                for entry in stock_caches(model)
            ]
        try:
            settings = self.model_settings(max_size)
            if self.by_bytes and equal == "bytes":
                return caches_in_16_bits(model, settings, max_size, context)
            if equal == "bytes":
                slots = slots_in_16_bits(model, settings, max_size, context)
                settings = replace(settings, max_size=slots)
            return bounded_caches(model, settings)
        except ValueError as error:
            of = "slots" if equal == "slots" else "tokens' bytes"
            given = f"a max_size of {max_size} {of}"
            raise ValueError(f"{self.name}, with {given}: {error}") from error

    def described(self) -> str:
        """The cache in words, with every default written out."""
        if self.policy is None:
            return "mlx-lm's own"
        settings = self.model_settings(1)
        policy = settings.policy_for(attending=True)
        fields = ", ".join(f"{name}={value}" for name, value in asdict(policy).items())
        budgets = Path(self.budgets).name if self.budgets else "the model's own profile"
        remainder = "remainder" if self.remainder else "no remainder"
        undo = f"undo {settings.undo}" if settings.undo else ""
        chosen = self.by_bytes and not settings.packing.packs
        packing = "bits by bytes" if chosen else str(settings.packing).strip()
        unmeasured = "" if self.profile == PROFILES[0] else f"profile {self.profile}"
        parts = (remainder, budgets, packing, undo, unmeasured)
        return ", ".join([f"{policy.name}({fields})", *filter(None, parts)])

    def model_settings(self, max_size: int) -> ModelSettings:
        """The settings of a policy's caches."""
        options: dict[str, Any] = {
            "policy": self.policy,
            "remainder": self.remainder,
            "budgets": self.budgets,
            "profile": self.profile,
            **dict(self.settings),
        }
        return ModelSettings.of(max_size, **options)


def profile_digests(model: nn.Module, arms: Sequence[Arm]) -> dict[str, str]:
    """A digest of each cache's profile, by the names of the caches that share slots by one.

    A model that has no profile yet is measured now if its caches ask for one.
    """
    if any(arm.by_bytes and not arm.budgets and arm.profile == PROFILES[0] for arm in arms):
        profile_at_load(model)
    if not any(arm.policy for arm in arms):
        return {}
    identity = identity_by_kinds(model, layer_kinds(model))
    # Each profile is read and hashed once, however many caches use it.
    digests = {}
    for budgets in {arm.budgets for arm in arms if arm.policy}:
        profile = budgets_of_model(budgets) if budgets else found_profile(model, identity)
        if isinstance(profile, Profile):
            digests[budgets] = profile.digest
    return {a.name: digests[a.budgets] for a in arms if a.policy and a.budgets in digests}


def default_arms(
    policies: Sequence[str] = (),
    budgets: Sequence[str] = (),
    bits: Sequence[int] = (),
    profile: str = PROFILES[0],
) -> list[Arm]:
    """mlx-lm's own, ours with bits and slots chosen by bytes and in 16 bits, any policies named.

    Args:
        policies: Their names, with settings if wanted: `h2o`, `distinct:recent=0.25:evict_every=8`,
            `h2o:bits=4:recent_bits=8`.
        budgets: "uniform" or a profile's path instead of the model's own; with several, ours is
            made once for each.
        bits: Widths of rows for ours beside the chosen width.
        profile: Whether a model without a profile is measured.

    Raises:
        ValueError: A policy or a setting is unknown, or the profile cannot be read.
    """
    arms = [Arm(FULL), Arm(WINDOW), *map(Arm, PACKED)]
    for shares in budgets or (None,):
        budgets_of_model(shares)
        by = f", {Path(shares).name}" if shares and len(budgets) > 1 else ""
        arms += [
            Arm(OURS + by, DEFAULT_POLICY, budgets=shares, by_bytes=True, profile=profile),
            Arm(f"{DEFAULT_POLICY}, 16 bits{by}", DEFAULT_POLICY, budgets=shares, profile=profile),
        ]
        for width in bits:
            arm = Arm(f"{OURS}, {width} bits{by}", DEFAULT_POLICY, budgets=shares, by_bytes=True)
            arms.append(replace(arm, settings=(("bits", width),), profile=profile))
    for spec in policies:
        policy, *fields = spec.split(":")
        settings = tuple(setting_of(field) for field in fields)
        ModelSettings.of(1, policy=policy, **dict(settings))  # raises if it is unknown
        arms.append(Arm(f"{spec}, uniform", policy, True, "uniform", settings))
        arms.append(Arm(f"{spec}, uniform, no remainder", policy, False, "uniform", settings))
    return arms


def arms_of_sizes(arms: Sequence[Arm], sizes: Sequence[int]) -> list[Arm]:
    """The bounded caches once for each size, after those that keep every token.

    Args:
        arms: The caches, as `default_arms` returns them.
        sizes: Tokens whose bytes the caches get; with one size, names stay as they are.
    """
    if len(sizes) == 1:
        return [replace(arm, size=sizes[0]) for arm in arms]
    keeping = [arm for arm in arms if arm.name in (FULL, *PACKED)]
    bounded = [arm for arm in arms if arm not in keeping]
    return keeping + [
        replace(arm, name=arm.name + OF_SIZE.format(size), size=size)
        for size in sizes
        for arm in bounded
    ]
