"""Measurements on disk as they are made, so that an interrupted command can continue."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_h2o._utils.files import replacing
from mlx_h2o.evaluate.machine import machine

#: The version of the file format.
FORM = 1


class Measurements:
    """The measurements made so far in some work.

    Args:
        settings: Everything but the machine on which figures depend, as JSON types.
        count: The number of measurements in all.

    Attributes:
        machine: The measuring machine.
        found: Results as JSON types, by measure and by the name of the measured thing.
        profiles: The digest of each cache's profile by the cache's name; None if not known yet.
    """

    def __init__(self, settings: dict[str, Any], count: int):
        self.settings, self.measurements = settings, count
        self.machine: dict[str, Any] = machine()
        self.found: dict[str, dict[str, Any]] = {}
        self.profiles: dict[str, str] | None = None

    @property
    def measured(self) -> int:
        """The number of measurements that are done."""
        return sum(map(len, self.found.values()))

    def add(self, measure: str, found: dict[str, Any]) -> None:
        """Add results of a measure, by the names of the measured things."""
        self.found.setdefault(measure, {}).update(found)

    def lacks(self, measure: str, names: Iterable[str]) -> bool:
        """Whether any of these names is still to be measured."""
        found = self.found.get(measure, {})
        return any(name not in found for name in names)

    def take_up(self, file: Path) -> bool:
        """Take over an unfinished file's measurements if its settings and versions are the same.

        Args:
            file: The file that may hold earlier measurements.

        Returns:
            Whether any were taken over.
        """
        try:
            versions = json.loads(file.read_text(encoding="utf-8"))["machine"]["versions"]
            found = found_in(file, self.settings)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if versions != self.machine["versions"]:
            return False
        self.found, self.profiles = found, profiles_in(file)
        if self.measured == self.measurements:  # all are known: measure again
            self.found = {}
        return bool(self.found)

    def measured_with(self, profiles: dict[str, str], must_be_same: bool = False) -> None:
        """Note the caches' profiles; figures measured with other profiles are measured again.

        Args:
            profiles: As in `Measurements.profiles`.
            must_be_same: Whether other profiles are an error.

        Raises:
            ValueError: The profiles differ, and must be the same.
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
        """All measurements, as JSON types."""
        return {
            "form": FORM,
            "settings": self.settings,
            "machine": self.machine,
            "profiles": self.profiles,
            "found": self.found,
        }

    def save(self, file: Path) -> None:
        """Write all measurements, replacing the file once they are written."""
        text = json.dumps(self.as_json(), indent=1) + "\n"
        with replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")


def profiles_in(file: Path) -> dict[str, str] | None:
    """The digests of the profiles of a file's figures, if the file has them."""
    kept = json.loads(file.read_text(encoding="utf-8")).get("profiles")
    return {str(name): str(of) for name, of in kept.items()} if isinstance(kept, dict) else None


def found_in(file: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A file's results, if it was measured with these settings.

    Raises:
        ValueError: The file cannot be read, or has other settings; the message says which.
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
