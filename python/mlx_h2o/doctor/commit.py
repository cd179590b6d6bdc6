"""The commit that this package is of: a checkout's, or the one that its build recorded."""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
#: Written into wheels and sdists by python/backend.
RECORD = Path("data/commit.txt")
UNKNOWN = "unknown"


def commit(package: Path = PACKAGE) -> str:
    """The commit, and whether files differ from it; "unknown" where nothing tells.

    Args:
        package: The folder of the package.
    """
    return of_checkout(package.parents[1]) or _recorded(package / RECORD) or UNKNOWN


def of_checkout(root: Path) -> str:
    """The commit of the repository's root, or nothing where git does not know it."""
    if not ((root / ".git").exists() and (root / "pyproject.toml").exists()):
        return ""
    revision = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return f"{revision}, changed" if revision and changed else revision


def _recorded(record: Path) -> str:
    try:
        return record.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _git(root: Path, *arguments: str) -> str:
    """What git says, or nothing. In a container the checkout may be another user's."""
    command = ["git", "-c", "safe.directory=*", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
