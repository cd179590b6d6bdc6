"""scikit-build-core, with the commit written into what it builds.

A wheel and an sdist hold `mlx_h2o/data/commit.txt`, from which `mlx_h2o --version` and doctor know
what they were made of. An editable installation holds none: it asks git.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("python/mlx_h2o")
# Without importing the package, which needs MLX.
PACKAGES_OWN = runpy.run_path(str(ROOT / PACKAGE / "doctor/commit.py"))
RECORD = PACKAGE / PACKAGES_OWN["RECORD"]
#: git writes the commit into it where it makes an archive, as GitHub does for a tag.
OF_ARCHIVE = Path(".git_archival.txt")


def build_wheel(directory: str, *arguments: Any, **options: Any) -> str:
    """As PEP 517 has it."""
    with recorded(ROOT):
        return build.build_wheel(directory, *arguments, **options)


def build_sdist(directory: str, *arguments: Any, **options: Any) -> str:
    """As PEP 517 has it."""
    with recorded(ROOT):
        return build.build_sdist(directory, *arguments, **options)


@contextmanager
def recorded(root: Path) -> Iterator[None]:
    """Within it the sources hold their commit, where it is known; an sdist's stays."""
    record, found = root / RECORD, commit(root)
    if not found:
        yield
        return
    record.write_text(found + "\n", encoding="utf-8")
    try:
        yield
    finally:
        record.unlink()


def commit(root: Path) -> str:
    """The commit by git or by its archive, or nothing."""
    if found := str(PACKAGES_OWN["of_checkout"](root)):
        return found
    try:
        written = (root / OF_ARCHIVE).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return "" if "$" in written else written[:12]
