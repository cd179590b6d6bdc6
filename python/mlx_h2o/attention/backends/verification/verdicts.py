"""Verdicts on kernel variants: checked once, kept for later processes, reported if negative.

A verdict belongs to a device, a system, a version of MLX and the kernels' text; if one of them
differs, the variant is checked anew. It is kept in a file of its own in the user's cache folder.
While a check runs, the file says so: if a kernel ends the process, that entry remains, and the next
process does without the kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_h2o._utils.files import cache_folder, replacing
from mlx_h2o.attention import tracing as transformations
from mlx_h2o.attention.backends.verification.compared import Error

#: The environment variable that says when kernels are checked, and its values.
VARIABLE = "MLX_H2O_VERIFY"
ALWAYS, ONCE, NEVER = MODES = ("always", "once", "never")


def mode() -> str:
    """When kernels are checked, by the environment variable: `once` by default.

    Raises:
        ValueError: The variable has another value.
    """
    said = os.environ.get(VARIABLE) or ONCE
    if said not in MODES:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(MODES)}; got {said!r}.")
    return said


@dataclass(frozen=True)
class Verdict:
    """Whether a variant may be used on a device.

    Attributes:
        variant: The variant's name.
        held: Whether it may be used.
        why: The reason against it; or its largest error, or that nothing was checked.
        error: The largest error, in units of the tolerance.
        seconds: The time of the check, compiling included.
    """

    variant: str
    held: bool
    why: str = ""
    error: float = 0.0
    seconds: float = 0.0


# Functions that read a verdict's parts from a file.
_KINDS: dict[str, Callable[[Any], Any]] = {
    "variant": str,
    "held": bool,
    "why": str,
    "error": float,
    "seconds": float,
}


class Verdicts:
    """The verdicts on variants on one device.

    Args:
        device: The function that names the device.
        text: The function that gives the text of a kernel by its name.
        folder: The folder for verdicts; the user's cache folder by default.
    """

    def __init__(
        self,
        device: Callable[[], str],
        text: Callable[[str], str],
        folder: Path | None = None,
    ):
        self._device, self._text, self._folder = device, text, folder
        self._known: dict[Hashable, Verdict] = {}
        self._lock = threading.RLock()
        self._here = threading.local()
        self._warned = False

    def usable(
        self, variant: Hashable, kernels: tuple[str, ...], check: Callable[[], Error]
    ) -> bool:
        """Whether a variant may be used; it is checked at its first use.

        Args:
            variant: The variant; `str` of it is its name.
            kernels: The names of the kernels that it launches.
            check: The function that compares it with the definition.

        Raises:
            ValueError: The environment variable has an unknown value.
        """
        known = self._known.get(variant)
        if known is not None:
            return known.held
        if getattr(self._here, "checking", False):
            return True  # the call comes from the check itself
        with self._lock:
            known = self._known.get(variant)
            if known is None:
                known = self._decided(str(variant), kernels, check)
                if known is None:
                    return False
                self._known[variant] = known
                self._tell(known)
        return known.held

    def checked(
        self, variant: Hashable, kernels: tuple[str, ...], check: Callable[[], Error]
    ) -> Verdict:
        """Check a variant now, whatever earlier verdicts say.

        Args:
            variant: The variant, as in `usable`.
            kernels: The names of its kernels' files.
            check: The function that runs the small case and returns its largest error.
        """
        with self._lock:
            self._known.pop(variant, None)  # a negative one would keep the check from running it
            verdict = self._check(str(variant), kernels, check)
            self._known[variant] = verdict
        return verdict

    @property
    def refused(self) -> list[Verdict]:
        """Variants not used on this device, by verdicts of this process and of earlier ones."""
        met = {verdict.variant: verdict for verdict in self._kept() + self.all}
        return [verdict for verdict in met.values() if not verdict.held]

    @property
    def all(self) -> list[Verdict]:
        """Every verdict of this process."""
        return list(self._known.values())

    def _kept(self) -> list[Verdict]:
        """The kept verdicts of this device, system, MLX and text."""
        found = []
        for path in sorted(self._where.glob("*.json")):
            names = _content(path)
            variant, kernels = str(names.get("variant")), names.get("kernels")
            if isinstance(kernels, list) and path == self._path(variant, tuple(kernels)):
                found.append(_read(path))
        return [verdict for verdict in found if verdict is not None]

    def _decided(
        self, variant: str, kernels: tuple[str, ...], check: Callable[[], Error]
    ) -> Verdict | None:
        """The verdict on a variant new to this process; None if it cannot be checked now."""
        when = mode()
        if when == NEVER:
            return Verdict(variant, True, f"not checked ({VARIABLE}={NEVER})")
        path = self._path(variant, kernels)
        kept = _read(path) if when == ONCE else None
        if kept is not None:
            return kept
        if transformations.tracing():  # nothing can be evaluated: use MLX's operations
            return None
        return self._check(variant, kernels, check)

    def _check(self, variant: str, kernels: tuple[str, ...], check: Callable[[], Error]) -> Verdict:
        """Run a check and keep its verdict."""
        path = self._path(variant, kernels)
        named = {"variant": variant, "kernels": kernels, "device": self._device()}
        _write(path, {**named, "checking": os.getpid()})
        start = time.perf_counter()
        self._here.checking = True
        try:
            error = check()
            held, why, size = error.held, error.where, error.size
        except Exception as raised:  # any error of a compiler or a device
            first = str(raised).strip().partition("\n")[0][:300]
            held, why, size = False, f"raised {type(raised).__name__}: {first}", float("inf")
        except BaseException:  # interrupted: there is no verdict
            path.unlink(missing_ok=True)
            raise
        finally:
            self._here.checking = False
        verdict = Verdict(variant, held, why, size, time.perf_counter() - start)
        _write(path, {**asdict(verdict), **named, "system": _system(), "mlx": version("mlx")})
        return verdict

    def _tell(self, verdict: Verdict) -> None:
        """Warn about the first variant that is not used; `describe` and `doctor` list all."""
        if verdict.held or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"A kernel is not used on this device ({self._device()}): {verdict.variant}: "
            f"{verdict.why}. Other operations do its work, which is right and slower. "
            "Please run `mlx_h2o doctor` and report what it prints.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _path(self, variant: str, kernels: tuple[str, ...]) -> Path:
        """The path of the verdict on a variant."""
        parts = [self._device(), _system(), version("mlx"), variant, *map(self._text, kernels)]
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        return self._where / f"{digest}.json"

    @property
    def _where(self) -> Path:
        return self._folder or cache_folder() / "kernels"


def _system() -> str:
    return platform.platform()


def _read(path: Path) -> Verdict | None:
    """A kept verdict, or None."""
    kept = _content(path)
    if isinstance(kept.get("checking"), int):
        if _alive(kept["checking"]):
            return None
        return Verdict(str(kept.get("variant")), False, "a process ended while it was checked")
    try:
        return Verdict(*(kind(kept[name]) for name, kind in _KINDS.items()))
    except (KeyError, TypeError, ValueError):
        return None


def _content(path: Path) -> dict[str, Any]:
    """The content of a file, or nothing."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _alive(process: int) -> bool:
    """Whether another process runs; False for this one."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _write(path: Path, content: dict[str, object]) -> None:
    """Write a file; if that fails, the next process checks again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content))
    except OSError:
        pass
