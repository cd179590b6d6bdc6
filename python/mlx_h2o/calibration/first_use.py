"""A profile measured for a model without one, when a size in bytes first needs it.

Without a profile all heads get the same number of slots, which at a quarter of the bytes costs
several percent of perplexity on some models. The profile is the one that `mlx_h2o calibrate` makes
with its defaults; it is kept among this user's profiles.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.nn as nn

from mlx_h2o._files import replacing
from mlx_h2o._progress import progress_bar
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile, kept_place
from mlx_h2o.budgets.tensor_parallel import ranks_of
from mlx_h2o.calibration.calibrate import calibrated
from mlx_h2o.hosts.layer_probe import identity_by_kinds
from mlx_h2o.hosts.recorder import (
    LEAST_TOKENS,
    profiled_kinds,
    require_weighable,
    trained_context,
)
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.loading.identity import ModelIdentity, architecture
from mlx_h2o.loading.load import CALIBRATION_TEXT

#: Results of this process by the model's file stem: profiles, or the reason that there is none.
#: Profiles are here too in case no file can be written.
_tried: dict[str, Profile | str] = {}


def first_profile(model: nn.Module, identity: ModelIdentity) -> Profile | str:
    """A model's profile, measured now and kept, or the reason that it has none.

    Args:
        model: A model without a profile, whose heads can have different budgets.
        identity: The model's identity.
    """
    stem = identity.file_stem
    if stem not in _tried:
        reason = _unmeasurable(model)
        _tried[stem] = reason or _measured(model, identity)
    return _tried[stem]


def profile_at_load(model: nn.Module) -> None:
    """Measure a model's profile now if it has none and can have one, so that no request waits."""
    try:
        identity = identity_by_kinds(model, profiled_kinds(model))
    except (NothingToBound, ValueError):  # it has none and needs none
        return
    if ranks_of(model) is None and found_profile(model, identity) is None:
        first_profile(model, identity)


def _unmeasurable(model: nn.Module) -> str:
    """The reason that a model cannot be measured, or an empty text. Nothing is computed."""
    if getattr(model, "mlx_h2o_tokenizer", None) is None:
        return "the model was not loaded by mlx_h2o.load, so its tokenizer is not known"
    if trained_context(model) < LEAST_TOKENS:
        return f"the model was trained on fewer than {LEAST_TOKENS} tokens"
    try:
        require_weighable(model)
    except ValueError as error:
        return str(error)
    return ""


def _measured(model: nn.Module, identity: ModelIdentity) -> Profile | str:
    tokenizer: Any = model.mlx_h2o_tokenizer
    place = kept_place(identity)
    print(
        f"{architecture(model)} has no profile yet: measuring which of its heads need "
        f"memory (once, kept in {place.parent}). "
        'To do without: profile="never", or --profile never.',
        file=sys.stderr,
    )
    try:
        with progress_bar("measuring heads") as bar:
            profile = calibrated(model, tokenizer, CALIBRATION_TEXT, bar)
    except Exception as error:  # any error of any model; its caches are made all the same
        print(f"It could not be measured: {error}", file=sys.stderr)
        return f"measuring the model failed ({type(error).__name__}: {error})"
    _keep(profile, identity)
    return profile


def _keep(profile: Profile, identity: ModelIdentity) -> None:
    """Write the profile among this user's; if that fails, it serves only this process."""
    place = kept_place(identity)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as temporary:
            profile.save(temporary)
    except OSError as error:
        print(f"The profile could not be kept: {error}", file=sys.stderr)
