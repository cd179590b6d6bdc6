"""Measurements on disk as they are made, so that the same command goes on after a break-off."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_h2o._utils.files import replacing
from mlx_h2o.evaluate.machine import machine

#: Of the file's form.
FORM = 1


class Measurements:
    """What is known so far of some work.

    Args:
        settings: Everything that figures depend on but the machine, as JSON types.
        count: How many measurements there are in all.

    Attributes:
        machine: What measures.
        found: By measure, and by what was measured: JSON types.
        profiles: The digest of each cache's profile by the cache's name, or None: not known yet.
    """

    def __init__(self, settings: dict[str, Any], count: int):
        self.settings, self.measurements = settings, count
        self.machine: dict[str, Any] = machine()
        self.found: dict[str, dict[str, Any]] = {}
        self.profiles: dict[str, str] | None = None

    @property
    def measured(self) -> int:
        """How many measurements are done."""
        return sum(map(len, self.found.values()))

    def add(self, measure: str, found: dict[str, Any]) -> None:
        """Some were made, named by what was measured."""
        self.found.setdefault(measure, {}).update(found)

    def lacks(self, measure: str, names: Iterable[str]) -> bool:
        """Whether any of these is still to be measured."""
        found = self.found.get(measure, {})
        return any(name not in found for name in names)

    def take_up(self, file: Path) -> bool:
        """Go on with what a file holds of these settings and versions, if it is unfinished.

        Args:
            file: Where they may have been kept.

        Returns:
            Whether there was anything.
        """
        try:
            versions = json.loads(file.read_text(encoding="utf-8"))["machine"]["versions"]
            found = found_in(file, self.settings)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if versions != self.machine["versions"]:
            return False
        self.found, self.profiles = found, profiles_in(file)
        if self.measured == self.measurements:  # all are known: asking again measures again
            self.found = {}
        return bool(self.found)

    def measured_with(self, profiles: dict[str, str], must_be_same: bool = False) -> None:
        """Note which profiles the caches use; what was measured with others is measured again.

        Args:
            profiles: As in `Measurements.profiles`.
            must_be_same: Whether other profiles are an error.

        Raises:
            ValueError: They are others, and must be the same.
        """
        if self.found and self.profiles is not None and self.profiles != profiles:
            changed = sorted(
                name
                for name in {**profiles, **self.profiles}
                if profiles.get(name) != self.profiles.get(name)
            )
            what = f"The profile of {', '.join(changed)} is not the one that was measured with"
            if must_be_same:
                raise ValueError(f"{what}: put that one back, or begin anew, without --resume.")
            print(f"{what}: everything is measured again.", file=sys.stderr)
            self.found = {}
        self.profiles = profiles

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "form": FORM,
            "settings": self.settings,
            "machine": self.machine,
            "profiles": self.profiles,
            "found": self.found,
        }

    def save(self, file: Path) -> None:
        """Write everything, replacing what is there when all is written."""
        text = json.dumps(self.as_json(), indent=1) + "\n"
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def profiles_in(file: Path) -> dict[str, str] | None:
    """The digests of the profiles that a file's figures were measured with, if it tells them."""
    kept = json.loads(file.read_text(encoding="utf-8")).get("profiles")
    return {str(name): str(of) for name, of in kept.items()} if isinstance(kept, dict) else None


def found_in(file: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a file holds, measured with these settings.

    Raises:
        ValueError: It cannot be read, or has other settings; the message says what differs.
    """
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        found, made_with, form = kept["found"], kept["settings"], kept["form"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"There is no evaluation to go on with in {file}: {error}.") from error
    if form != FORM:
        raise ValueError(f"{file} is of another version: begin anew, without --resume.")
    differs = [name for name in settings if made_with.get(name) != settings[name]]
    if differs:
        raise ValueError(
            f"{file} was begun with another {', '.join(differs)}: give the same options, or begin "
            "anew, without --resume."
        )
    return {name: dict(of) for name, of in found.items()}
