"""Where a model's profile lies and how it is found.

A profile lies beside the weights, among the user's files, or is shipped.

Other findings about one model (frames, query centres) are kept among the user's files in the same
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

from mlx_h2o._utils.files import replacing
from mlx_h2o.budgets.profile import FILE_NAME, Profile
from mlx_h2o.loading.demo_model import cache_folder
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.loading.load import shipped_profiles

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


Found = TypeVar("Found")


@dataclass(frozen=True)
class KeptOfModel:
    """Files of one kind: JSON that says of what form it is, and of which model.

    Attributes:
        format: What they say they are.
        suffix: What their names end in.
        version: Of their form.
    """

    format: str
    suffix: str
    version: int = 1

    def place_of(self, identity: ModelIdentity) -> Path:
        """Of a model's file."""
        return kept_folder() / f"{identity.file_stem}{self.suffix}"

    def keep(self, identity: ModelIdentity, fields: dict[str, Any]) -> None:
        """Write what was found, as JSON types; where that fails, say so and go on."""
        path = self.place_of(identity)
        head = {"format": self.format, "version": self.version, "model": asdict(identity)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(head | fields))
        except OSError as error:
            print(f"It could not be kept: {error}", file=sys.stderr)

    def load(self, identity: ModelIdentity, read: Callable[[Any], Found]) -> Found | None:
        """What was kept of this model; None where there is none, or it is damaged: to be made anew.

        Args:
            identity: Of the model.
            read: Makes it of the file's JSON. It may raise whatever damaged data raises there.
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
