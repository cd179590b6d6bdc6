"""GPU kernels prove themselves: each variant runs beside the definition before it is used.

A variant is all that decides which text a kernel compiles from. At its first use in a process it
runs on a small case; one that raises, gives a NaN or differs by more than is tolerated is not used,
and other operations do its work. Verdicts are in memory: the next process checks again.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_h2o.attention import tracing as transformations

#: The environment variable that says when kernels are checked, and its values.
VARIABLE = "MLX_H2O_VERIFY"
ONCE, NEVER = MODES = ("once", "never")


def mode() -> str:
    """When kernels are checked, by the environment variable: `once` a process by default.

    Raises:
        ValueError: The variable has another value.
    """
    value = os.environ.get(VARIABLE) or ONCE
    if value not in MODES:
        raise ValueError(f"{VARIABLE} must be {ONCE} or {NEVER}; got {value!r}.")
    return value


class Tolerance(NamedTuple):
    """The tolerated error: absolute + relative * |expected|."""

    absolute: float
    relative: float

    def times(self, factor: float) -> Tolerance:
        """So many times this one."""
        return Tolerance(factor * self.absolute, factor * self.relative)


#: For outputs in a model's dtype, whose numbers are about 1: two to four of its roundings.
OUT = {
    mx.float32: Tolerance(1e-4, 1e-4),
    mx.float16: Tolerance(1e-3, 2e-3),
    mx.bfloat16: Tolerance(8e-3, 1.6e-2),
}
#: The tolerance for MLX's own attention, which rounds weights and logits to the model's dtype, as a
#: multiple of ours.
MLX_OVER_OURS = 4
#: For logits and their log-sum-exp, float32 for every dtype of the operands.
LOGITS = Tolerance(5e-4, 2e-4)
#: For masses and scores made from them: probabilities, many of them small.
MASS = Tolerance(1e-6, 2e-3)
#: For outputs that must be equal.
EXACT = Tolerance(0.0, 0.0)


class Pair(NamedTuple):
    """An output of a kernel, the definition's, and their tolerance."""

    output: mx.array
    expected: mx.array
    tolerance: Tolerance


class Error(NamedTuple):
    """The largest error of a check.

    Attributes:
        size: The error in units of the tolerance; above 1 it is too large.
        where: The output with the error, and what is wrong with it; empty if all is equal.
    """

    size: float
    where: str

    @property
    def tolerable(self) -> bool:
        """Whether it is small enough; a NaN is not."""
        return self.size <= 1


def worst(pairs: Mapping[str, Pair]) -> Error:
    """The largest error among outputs, given by name."""
    return max((error(name, pair) for name, pair in pairs.items()), key=lambda e: e.size)


def error(name: str, pair: Pair) -> Error:
    """The error of one output. Infinities of one sign agree; a NaN agrees with nothing."""
    output, expected = (np.array(x.astype(mx.float32), np.float64) for x in pair[:2])
    if output.shape != expected.shape:
        return Error(np.inf, f"{name} has the shape {output.shape}, not {expected.shape}")
    if np.isnan(output).any():
        return Error(np.inf, f"{name} has a NaN")
    absolute, relative = pair.tolerance
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.where(output == expected, 0.0, np.abs(output - expected))
        size = np.where(apart == 0, 0.0, apart / (absolute + relative * np.abs(expected)))
    size = np.where(np.isnan(size) | (np.isinf(expected) & (apart > 0)), np.inf, size)
    largest = float(size.max(initial=0.0))
    if not largest:
        return Error(0.0, "")
    place = np.unravel_index(int(size.argmax()), size.shape)
    tolerated = absolute + relative * abs(expected[place])
    return Error(
        largest, f"{name} differs by {apart[place]:.2g} where {tolerated:.2g} is tolerated"
    )


@dataclass(frozen=True)
class Verdict:
    """Whether a variant may be used on a device.

    Attributes:
        variant: The variant's name.
        usable: Whether it may be used.
        why: The reason against it; or its largest error, or that nothing was checked.
        error: The largest error, in units of the tolerance.
        seconds: The time of the check, compiling included.
    """

    variant: str
    usable: bool
    why: str = ""
    error: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, variant: str, check: Callable[[], Error]) -> Verdict:
        """Run a check; whatever a compiler or a device raises is a reason against the variant."""
        start = time.perf_counter()
        try:
            size, where = check()
        except Exception as raised:
            first = str(raised).strip().partition("\n")[0][:300]
            size, where = float("inf"), f"raised {type(raised).__name__}: {first}"
        seconds = time.perf_counter() - start
        return cls(variant, Error(size, where).tolerable, where, size, seconds)


class SelfCheck:
    """The verdicts of this process on variants on one device.

    Args:
        device: The function that names the device.
    """

    def __init__(self, device: Callable[[], str]):
        self._device = device
        self._verdicts: dict[Hashable, Verdict] = {}
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._warned = False

    def usable(self, variant: Hashable, check: Callable[[], Error]) -> bool:
        """Whether a variant may be used; it is checked at its first use.

        Args:
            variant: The variant; `str` of it is its name.
            check: The function that compares it with the definition.

        Raises:
            ValueError: The environment variable has an unknown value.
        """
        verdict = self._verdicts.get(variant)
        if verdict is not None:
            return verdict.usable
        if getattr(self._thread, "checking", False):
            return True  # the call comes from the check itself
        with self._lock:
            verdict = self._verdicts.get(variant)
            if verdict is not None:  # by another thread meanwhile
                return verdict.usable
            if mode() == NEVER:
                verdict = Verdict(str(variant), True, f"not checked ({VARIABLE}={NEVER})")
                self._verdicts[variant] = verdict
            elif transformations.tracing():  # nothing can be evaluated: use MLX's operations
                return False
            else:
                verdict = self.check(variant, check)
                self._warn(verdict)
        return verdict.usable

    def check(self, variant: Hashable, check: Callable[[], Error]) -> Verdict:
        """Check a variant now, whatever its earlier verdict says; the arguments are `usable`'s."""
        with self._lock:
            self._verdicts.pop(variant, None)  # a negative one would keep the check from running it
            self._thread.checking = True
            try:
                verdict = Verdict.of(str(variant), check)
            finally:
                self._thread.checking = False
            self._verdicts[variant] = verdict
        return verdict

    @property
    def verdicts(self) -> list[Verdict]:
        """Every verdict of this process."""
        return list(self._verdicts.values())

    @property
    def refused(self) -> list[Verdict]:
        """Those on variants that are not used on this device."""
        return [verdict for verdict in self.verdicts if not verdict.usable]

    def _warn(self, verdict: Verdict) -> None:
        """Warn about the first variant that is not used; `describe` and `doctor` list all."""
        if verdict.usable or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"A kernel is not used on this device ({self._device()}): {verdict.variant}: "
            f"{verdict.why}. Other operations do its work, which is right and slower. "
            "Please run `mlx_h2o doctor` and report what it prints.",
            RuntimeWarning,
            stacklevel=2,
        )
