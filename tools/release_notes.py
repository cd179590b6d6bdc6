#!/usr/bin/env python3
"""Prints a release's section of CHANGELOG.md, and refuses a tag that the sources do not agree with.

    tools/release_notes.py 0.1.0 > notes.md

The tag is the version, as SwiftPM takes it: what is tagged is the Swift package of that version.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Where the version stands; CMake takes that of pyproject.toml.
VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    "python/mlx_h2o/__init__.py": r'^__version__ = "(.+)"$',
    "Package.swift": r'"MLX_H2O_VERSION", to: "\\"(.+)\\""',
}
# "## 0.1.0" or "## 0.1.0 (2026-11-25)".
HEADING = re.compile(r"^## (?P<version>\S+)(?: \((?P<date>.+)\))?$", re.MULTILINE)


class NotReady(Exception):
    """Something does not allow the release."""


def section(changelog: str, version: str) -> str:
    """What the changelog says of a version, without its heading.

    Raises:
        NotReady: It has no such section, an empty one, or one that is not dated yet.
    """
    headings = list(HEADING.finditer(changelog))
    for heading, end in zip(headings, [*headings[1:], None], strict=True):
        if heading["version"] != version:
            continue
        if heading["date"] == "unreleased":
            raise NotReady(f'CHANGELOG.md calls {version} "unreleased": give it its date.')
        if text := changelog[heading.end() : end.start() if end else None].strip():
            return text + "\n"
        raise NotReady(f"CHANGELOG.md says nothing of {version}.")
    raise NotReady(f'CHANGELOG.md has no section "## {version}".')


def check_versions(root: Path, version: str) -> None:
    """Raise NotReady, with the files, where the sources name another version."""
    others = []
    for name, pattern in VERSIONS.items():
        versions = re.findall(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        if versions != [version]:
            others.append(f"{name} says {' and '.join(versions) or 'none'}")
    if others:
        raise NotReady(f"The tag says {version}; {'; '.join(others)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="the tag")
    version = parser.parse_args().version
    try:
        check_versions(ROOT, version)
        print(section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version), end="")
    except NotReady as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
