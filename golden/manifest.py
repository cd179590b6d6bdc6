"""The files of golden vectors: a manifest, its flat text for C, a safetensors file per group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from golden.group import Parameters

FORMAT = "mlx-h2o golden"
# A file with another number would be misread by a replayer written for this one.
SCHEMA = 1
FILE_NAME = "manifest.json"
CASES_NAME = "cases.txt"

# |got - golden| <= absolute + relative * |golden|, by the dtype of the golden array. Whole numbers,
# booleans and infinities are compared exactly. Halves are results rounded once: one unit in the
# last place, as the order of sums may move a number over a rounding boundary.
TOLERANCES = {
    "float32": {"absolute": 1e-5, "relative": 1e-5},
    "float16": {"absolute": 1e-5, "relative": 2.0**-10},
    "bfloat16": {"absolute": 1e-5, "relative": 2.0**-7},
}


class GoldenError(ValueError):
    """Golden files that cannot be used, or results that differ from them."""


@dataclass(frozen=True)
class Case:
    """One case: its group, its name there, and its parameters.

    Attributes:
        group: The group's name.
        name: The case's name, unique within the group.
        parameters: Parameters as plain JSON.
        margin: The margin of the case's closest choice; None if nothing is chosen.
    """

    group: str
    name: str
    parameters: Parameters
    margin: float | None


@dataclass(frozen=True)
class Golden:
    """The golden vectors of a folder.

    Attributes:
        cases: The cases, in order.
        tolerances: Absolute and relative tolerances, by dtype.
        arrays: For each group, its arrays by "case/name".
    """

    cases: list[Case]
    tolerances: dict[str, dict[str, float]]
    arrays: dict[str, dict[str, mx.array]]

    def of(self, case: Case, kind: str) -> dict[str, mx.array]:
        """The arrays of a case that are "in" or "out", by name."""
        prefix = f"{case.name}/{kind}."
        return {
            name.removeprefix(prefix): array
            for name, array in self.arrays[case.group].items()
            if name.startswith(prefix)
        }


def read(folder: Path, groups: Container[str] | None = None) -> Golden:
    """Read the files and check them against the manifest.

    Args:
        folder: The folder of the files.
        groups: The groups to read arrays of; None means all.

    Raises:
        GoldenError: A file is missing, is not the one that the manifest describes, or has another
            schema.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        raise GoldenError(f"There are no golden vectors in {folder}: {FILE_NAME} is missing.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GoldenError(f"{path} is damaged: {error}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise GoldenError(f"{path} is no manifest of golden vectors.")
    if manifest.get("schema") != SCHEMA:
        raise GoldenError(
            f"{path} has schema {manifest.get('schema')}; this version reads schema {SCHEMA}. "
            "Use the files and the package of one version."
        )
    try:
        cases = [Case(**case) for case in manifest["cases"]]
        named = list(dict.fromkeys(case.group for case in cases))
        chosen = [group for group in named if groups is None or group in groups]
        files = [CASES_NAME, *(f"{group}.safetensors" for group in chosen)]
        for name in manifest["files"] if groups is None else files:
            check_file(folder / name, manifest["files"][name])
        arrays = {group: loaded(folder / f"{group}.safetensors") for group in chosen}
        if any(f"{group}.safetensors" not in manifest["files"] for group in named):
            raise GoldenError(f"{path} has cases whose file it does not list.")
        if "\n".join(flat_text(cases)) + "\n" != (folder / CASES_NAME).read_text(encoding="utf-8"):
            raise GoldenError(f"{folder / CASES_NAME} and {path} hold different cases.")
        return Golden(cases, manifest["tolerances"], arrays)
    except (KeyError, TypeError, AttributeError) as error:
        raise GoldenError(f"{path} is damaged: {error!r}.") from error


def loaded(path: Path) -> dict[str, mx.array]:
    """The arrays of a safetensors file."""
    try:
        arrays = mx.load(str(path))
    except RuntimeError as error:
        raise GoldenError(f"{path} cannot be read: {error}") from error
    assert isinstance(arrays, dict)
    return arrays


def digest(path: Path) -> dict[str, Any]:
    """The manifest's entry for a file."""
    data = path.read_bytes()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def check_file(path: Path, expected: dict[str, Any]) -> None:
    """Raise GoldenError unless the file is the one that the manifest describes."""
    if not path.is_file():
        raise GoldenError(f"The golden file {path} is missing.")
    actual = digest(path)
    if actual["bytes"] != expected["bytes"]:
        raise GoldenError(
            f"The golden file {path} has {actual['bytes']} bytes and should have "
            f"{expected['bytes']}: it was cut off or changed."
        )
    if actual["sha256"] != expected["sha256"]:
        raise GoldenError(f"The golden file {path} is corrupted: its SHA-256 does not match.")


def flat_text(cases: Sequence[Case]) -> Iterator[str]:
    """The cases line by line, for languages without JSON: `name value value ...`."""
    yield f"{FORMAT} {SCHEMA}"
    for dtype, tolerance in TOLERANCES.items():
        yield f"tolerance {dtype} {tolerance['absolute']!r} {tolerance['relative']!r}"
    for case in cases:
        yield ""
        yield f"case {case.group} {case.name}"
        yield from flattened(case.parameters, "")


def flattened(parameters: Parameters, prefix: str) -> Iterator[str]:
    """Parameters with nested names joined by dots and lists flattened; nulls are left out."""
    for name, value in parameters.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name} {' '.join(words(value))}"


def words(value: Any) -> Iterator[str]:
    """A value's scalars as JSON writes them, strings without quotes."""
    if isinstance(value, list):
        for item in value:
            yield from words(item)
    else:
        yield value if isinstance(value, str) else json.dumps(value)
