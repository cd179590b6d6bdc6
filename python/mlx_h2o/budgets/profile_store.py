"""The places of models' profiles, and the search for them.

A profile lies beside the weights, in the user's folder, or is shipped with the package.
"""

from __future__ import annotations

import os
from pathlib import Path

import mlx.nn as nn

from mlx_h2o.budgets.profile import FILE_NAME, Profile
from mlx_h2o.loading.demo_model import cache_folder
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.loading.load import shipped_profiles

SUFFIX = ".profile.json"


def kept_folder() -> Path:
    """The folder of this user's profiles."""
    return cache_folder() / "profiles"


def kept_place(identity: ModelIdentity, suffix: str = SUFFIX) -> Path:
    """The path of a model's profile, or of another file about it, in this user's folder."""
    return kept_folder() / f"{identity.file_stem}{suffix}"


def place_for(model: nn.Module, identity: ModelIdentity) -> Path:
    """The path for a new profile: beside local weights if they are writable, else in the user's
    cache folder, which is created.
    """
    folder = getattr(model, "mlx_h2o_folder", None)
    if folder is not None and os.access(folder, os.W_OK):
        return Path(folder) / FILE_NAME
    kept_folder().mkdir(parents=True, exist_ok=True)
    return kept_place(identity)


def found_profile(model: nn.Module, identity: ModelIdentity) -> Profile | None:
    """The model's own profile: beside its weights, among this user's, or shipped.

    Raises:
        ValueError: The profile beside the weights is another model's, or damaged.
    """
    folder = getattr(model, "mlx_h2o_folder", None)
    if folder is not None and (Path(folder) / FILE_NAME).exists():
        profile = Profile.load(Path(folder) / FILE_NAME)
        profile.require(identity)
        return profile
    files = sorted(kept_folder().glob(f"*{SUFFIX}")) if kept_folder().is_dir() else []
    # The profile of this very model first; then that of one with other quantization.
    files.sort(key=lambda path: path != kept_place(identity))
    for path in [*files, *shipped_profiles()]:
        try:
            profile = Profile.load(path)
        except ValueError:  # a damaged one is skipped; it may be another model's
            continue
        if profile.model.difference(identity) is None:
            return profile
    return None
