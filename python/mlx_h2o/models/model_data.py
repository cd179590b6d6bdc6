"""What is known of a model before its caches are planned: its profile, key scaling, and RoPE.

A profile is the caller's, or the model's own (`budgets/profile_store.py` looks for it), or is
measured now, quickly and once (`calibration/first_use.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.nn as nn

from mlx_h2o.budgets.plan import LayerKind, ModelData
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.calibration.scaling_build import Frames, found_frames, made_frames
from mlx_h2o.hosts.layer_probe import identity_by_kinds
from mlx_h2o.loading.identity import ModelIdentity, architecture
from mlx_h2o.models.per_cache import frames_of_caches, slots_of_caches
from mlx_h2o.policies import Policy

if TYPE_CHECKING:
    from mlx_h2o.slots.rope import Rope


def model_data(
    model: nn.Module,
    kinds: Sequence[LayerKind],
    caches: Sequence[Any],
    settings: ModelSettings,
    policy: Policy,
    whole: bool,
) -> ModelData:
    """What is known of a model, measured now if the settings want it.

    Args:
        model: An mlx-lm model.
        kinds: The model's plain KV caches.
        caches: The model's own caches.
        settings: Settings of all caches.
        policy: The eviction policy.
        whole: Whether this process has all of the model, so that it can be measured.

    Raises:
        ValueError: What the caller gave does not suit the model.
    """
    one_mask = any(kind.derived or not kind.routed for kind in kinds)
    shared = any(kind.sharers > 1 for kind in kinds)
    identity = identity_by_kinds(model, kinds)
    slots = profile = key_scaling = None
    no_profile = ""
    if settings.layer_budgets is not None:
        heads = [kind.heads for kind in kinds]
        slots = slots_of_caches(settings.layer_budgets, caches, heads, one_mask)
    else:
        uniform = one_mask or shared or policy.unit == "layer"
        profile = _profile(model, identity, settings.profile, uniform)
        if profile is None and not uniform and settings.profile is None:
            profile, no_profile = _first_profile(model, identity, settings, whole)
    if settings.frames is None and policy.suits_frames and not one_mask:
        key_scaling = _key_scaling(model, identity, profile, settings, whole and not shared)
    frames = frames_of_caches(caches, settings.frames)
    ropes: Sequence[Rope | None] = [None] * len(kinds)
    if settings.rolls:
        from mlx_h2o.hosts.rope_probe import ropes_in_keys

        ropes = ropes_in_keys(architecture(model), model, len(kinds))
    return ModelData(profile, key_scaling, frames, slots, ropes, no_profile)


def _profile(
    model: nn.Module, identity: ModelIdentity, source: str | Path | Profile | None, uniform: bool
) -> Profile | None:
    """The profile by which slots are shared out, or None for even shares."""
    if source == "uniform" or (source is None and uniform):
        return None
    if uniform:
        raise ValueError(
            "All heads need the same budget here (one mask serves them all, layers share keys, or "
            'the policy\'s unit is the layer): pass budgets="uniform".'
        )
    if source is None:
        return found_profile(model, identity)
    profile = source if isinstance(source, Profile) else Profile.load(source)
    profile.require(identity)
    return profile


def _first_profile(
    model: nn.Module, identity: ModelIdentity, settings: ModelSettings, whole: bool
) -> tuple[Profile | None, str]:
    """A profile that is measured now, or None, and the reason."""
    if settings.max_bytes is None:
        return None, ""
    if settings.measures == "never":
        return None, 'profile="never"'
    if not whole:
        return None, "this process has a part of the model"
    from mlx_h2o.calibration.first_use import first_profile  # few models need it

    measured = first_profile(model, identity)
    return (measured, "") if isinstance(measured, Profile) else (None, measured)


def _key_scaling(
    model: nn.Module,
    identity: ModelIdentity,
    profile: Profile | None,
    settings: ModelSettings,
    measurable: bool,
) -> Frames | None:
    """Key scaling (`Frame`) for packed keys, measured now if bits are left to us; None without.

    It is not measured for keys that layers share, or of which this process has only a part
    (`measurable`), nor if nothing may be measured.
    """
    if settings.packing.k_bits is None and not settings.chooses_bits:
        return None
    stored = found_frames(identity, profile)
    if stored is not None or not settings.chooses_bits or settings.measures == "never":
        return stored
    return made_frames(model, identity) if measurable else None
