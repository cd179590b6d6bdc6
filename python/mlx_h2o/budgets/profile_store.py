"""The places of models' profiles, and the search for them.

A profile lies beside the weights, in the user's folder, or is shipped with the package.

Other data about one model (key scaling) are kept in the user's folder in the same
way.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.nn as nn

from mlx_h2o._files import replacing
from mlx_h2o.budgets.profile import FILE_NAME, Profile
from mlx_h2o.loading.demo_model import cache_folder
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.loading.load import shipped_profiles

SUFFIX = ".profile.json"


def kept_folder() -> Path:
    """The folder of this user's profiles."""
    return cache_folder() / "profiles"


def kept_place(identity: ModelIdentity) -> Path:
    """The path of a model's profile in this user's folder."""
    return kept_folder() / f"{identity.file_stem}{SUFFIX}"


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


Found = TypeVar("Found")


@dataclass(frozen=True)
class KeptOfModel:
    """Files of one kind: JSON with its format and its model.

    Attributes:
        format: The name of the format.
        suffix: The end of the files' names.
        version: The version of the format.
    """

    format: str
    suffix: str
    version: int = 1

    def place_of(self, identity: ModelIdentity) -> Path:
        """The path of a model's file."""
        return kept_folder() / f"{identity.file_stem}{self.suffix}"

    def keep(self, identity: ModelIdentity, fields: dict[str, Any]) -> None:
        """Write data, as JSON types; if that fails, print a message and go on."""
        path = self.place_of(identity)
        head = {"format": self.format, "version": self.version, "model": asdict(identity)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(head | fields))
        except OSError as error:
            print(f"It could not be kept: {error}", file=sys.stderr)

    def load(self, identity: ModelIdentity, read: Callable[[Any], Found]) -> Found | None:
        """The data kept of this model; None if the file is missing or damaged.

        Args:
            identity: The model's identity.
            read: The function that converts the file's JSON; with damaged data it may raise
                whatever damaged data raises there.
        """
        try:
            data = json.loads(self.place_of(identity).read_text())
            if (data["format"], data["version"]) != (self.format, self.version):
                return None
            if ModelIdentity.of_json(data["model"]).difference(identity) is not None:
                return None
            return read(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
