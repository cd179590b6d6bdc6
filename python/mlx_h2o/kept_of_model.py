"""Files of what was found out about one model, kept among this user's for the next time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mlx_h2o import profile_places
from mlx_h2o.files import replacing
from mlx_h2o.model_identity import ModelIdentity

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
        return profile_places.kept_folder() / f"{identity.file_stem}{self.suffix}"

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
