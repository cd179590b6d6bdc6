"""The one shape that all measures have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.sections import Section
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.workers import Tell

#: What a measure found out about one contender, as JSON types.
Found = dict[str, Any]
#: About how often the model is called to ask a question, whose tokens come one by one, and to see
#: the answer.
ASKING = 24
#: Contenders and what was found, the full cache first; those that could not be made are left out.
Findings = Sequence[tuple[Contender, Found]]


class Measure(ABC):
    """Something to find out about a cache; a subclass is a frozen dataclass of its sizes."""

    #: On the command line and in files.
    name: ClassVar[str]
    #: Whether nothing else may run beside it, and each contender needs a process of its own.
    alone: ClassVar[bool] = False
    #: Whether several contenders are measured at once, side by side: a step of a small batch is
    #: spent on reading the model's weights, which they then share.
    shares: ClassVar[bool] = False

    @abstractmethod
    def tokens(self) -> int:
        """How long the conversations are whose full cache the contenders' shares are of."""

    @abstractmethod
    def work(self) -> int:
        """About how many tokens it tells of for each contender."""

    @abstractmethod
    def passes(self) -> int:
        """About how often the model is called for a contender, or for all that are side by side."""

    @abstractmethod
    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        """Measure one contender.

        Args:
            stage: Model and text.
            contender: A cache of a size.
            tell: Called with tokens that were read.

        Raises:
            ValueError: The text is too short, or the contender's bytes are too few.
        """

    def of_all(self, stage: Stage, contenders: Sequence[Contender], tell: Tell) -> list[Found]:
        """Measure several that can be made and read side by side; only where `shares` says so.

        Args:
            stage: Model and text.
            contenders: Not all of them; `suite` says how many at once.
            tell: Told of the tokens of all.

        Raises:
            ValueError: As `of` does.
        """
        return [self.of(stage, contender, tell) for contender in contenders]

    @abstractmethod
    def section(self, findings: Findings) -> Section:
        """What was found, for people."""

    #: What `brief` tells, as a heading; empty where it tells nothing.
    briefly: ClassVar[str] = ""

    def brief(self, found: Found, full: Found) -> str:
        """The one figure that matters most, of a contender beside the full cache."""
        raise NotImplementedError(f"{self.name} has no figure that stands for all.")


def signed(share: float) -> str:
    """0.0123 as "+1.23 %"."""
    return f"{100 * share:+.2f} %"


def part_of(ours: Sequence[bool], full: Sequence[bool]) -> tuple[int, int]:
    """How many of those that the full cache knows are known, and how many those are."""
    return sum(a and b for a, b in zip(ours, full, strict=True)), sum(full)


def fraction(known: int, asked: int) -> str:
    """ "3/4", or "-" where the full cache knows nothing."""
    return f"{known}/{asked}" if asked else "-"
