"""Every kernel variant beside the definition, as a section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from mlx_h2o.attention.backends.verification.verdicts import Verdict
from mlx_h2o.doctor.report import Begun, Over, Section
from mlx_h2o.doctor.variants import Check


def section(
    begun: Begun, checks: list[Check], progress: Callable[[int, int], None], over: Over
) -> None:
    """Run checks until time is over; what is interrupted keeps what was found.

    Args:
        begun: Takes the section.
        checks: In their order.
        progress: Told after each.
        over: Whether there is time for no more.
    """
    found = begun(
        Section(
            "kernels",
            "kernel variants beside the definition",
            ("kernels", "variants", "held", "worst error / tolerated", "seconds"),
        )
    )
    verdicts: list[Verdict] = []
    try:
        for i, check in enumerate(checks, 1):
            verdicts.append(check.run())
            progress(i, len(checks))
            if over():
                break
    finally:
        _fill(found, verdicts, len(checks))


def _fill(found: Section, verdicts: list[Verdict], planned: int) -> None:
    """Rows by kernel, and what did not hold."""
    kinds: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        kinds.setdefault(verdict.variant.partition(" of ")[0], []).append(verdict)
    for kind, of_kind in kinds.items():
        found.rows.append(
            (
                kind,
                str(len(of_kind)),
                str(sum(verdict.held for verdict in of_kind)),
                f"{max(verdict.error for verdict in of_kind):.2f}",
                f"{sum(verdict.seconds for verdict in of_kind):.1f}",
            )
        )
    found.data = [asdict(verdict) for verdict in verdicts]
    found.failures = [f"{v.variant}: {v.why}" for v in verdicts if not v.held]
    if len(verdicts) < planned:
        found.notes.append(f"{planned - len(verdicts)} of {planned} variants were not reached.")
