"""What doctor found: sections of rows for people, the same as data for machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Section:
    """One part of the report.

    Attributes:
        name: The name in the JSON.
        title: For people.
        columns: The table's columns; the first names the row.
        rows: Cells as text.
        data: The same and more, as JSON types.
        failures: What did not hold, in words; empty where all did.
        notes: What else must be said: what was left out, how figures are meant.
    """

    name: str
    title: str
    columns: tuple[str, ...] = ()
    rows: list[tuple[str, ...]] = field(default_factory=list)
    data: Any = None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


#: Takes a section as it begins, so that what is broken off keeps it, and returns it.
Begun = Callable[[Section], Section]
#: Whether there is time for no more.
Over = Callable[[], bool]


@dataclass
class Report:
    """All that was found.

    Attributes:
        machine: What ran it, by name.
        sections: In order.
        complete: Whether it came to its end.
        seconds: The time taken.
        stopped: What broke it off: Ctrl-C, or SIGTERM.
    """

    machine: dict[str, Any]
    sections: list[Section] = field(default_factory=list)
    complete: bool = False
    seconds: float = 0.0
    stopped: KeyboardInterrupt | None = None

    def begun(self, section: Section) -> Section:
        """Take a section as it begins."""
        self.sections.append(section)
        return section

    @property
    def failures(self) -> list[str]:
        """What did not hold."""
        return [
            f"{section.title}: {what}" for section in self.sections for what in section.failures
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON types."""
        return {
            "machine": self.machine,
            "held": not self.failures,
            "complete": self.complete,
            "seconds": round(self.seconds, 1),
            "failures": self.failures,
            "sections": {
                section.name: {
                    "data": section.data,
                    "failures": section.failures,
                    "notes": section.notes,
                }
                for section in self.sections
            },
        }

    def verdict(self) -> str:
        """All of it in a line."""
        if self.failures:
            return f"{len(self.failures)} checks failed"
        return "everything held" if self.complete else "broken off; what was checked held"
