"""Where a model's profile is kept, and how it is found again by itself."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.nn as nn

from mlx_h2o.builtin import shipped_profiles
from mlx_h2o.model_identity import ModelIdentity
from mlx_h2o.profile import FILE_NAME, Profile
from mlx_h2o.smollm2 import cache_folder

SUFFIX = ".profile.json"


def kept_folder() -> Path:
    """Where this user's profiles are."""
    return cache_folder() / "profiles"


def kept_place(identity: ModelIdentity) -> Path:
    """Of a model's profile among this user's."""
    return kept_folder() / f"{identity.file_stem}{SUFFIX}"


def place_for(model: nn.Module, identity: ModelIdentity) -> Path:
    """Where a new profile is found again: beside local weights where they can be written to, else
    in the user's cache folder, which is made.
    """
    folder = getattr(model, "mlx_h2o_folder", None)
    if folder is not None and os.access(folder, os.W_OK):
        return Path(folder) / FILE_NAME
    kept_folder().mkdir(parents=True, exist_ok=True)
    return kept_place(identity)


def found_profile(model: nn.Module, identity: ModelIdentity) -> Profile | None:
    """The model's own profile: beside its weights, among this user's, or shipped.

    Raises:
        ValueError: What lies beside its weights is another model's, or damaged.
    """
    folder = getattr(model, "mlx_h2o_folder", None)
    if folder is not None and (Path(folder) / FILE_NAME).exists():
        profile = Profile.load(Path(folder) / FILE_NAME)
        profile.require(identity)
        return profile
    kept = sorted(kept_folder().glob(f"*{SUFFIX}")) if kept_folder().is_dir() else []
    # This very model's first; a quantized one is near enough.
    kept.sort(key=lambda path: path != kept_place(identity))
    for path in [*kept, *shipped_profiles()]:
        try:
            profile = Profile.load(path)
        except ValueError:  # a damaged one, perhaps of another model, is no one's
            continue
        if profile.model.difference(identity) is None:
            return profile
    return None
