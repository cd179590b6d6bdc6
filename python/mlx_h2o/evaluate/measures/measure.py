"""The interface of all measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from mlx_h2o.evaluate.contenders import Contender
from mlx_h2o.evaluate.sections import Section
from mlx_h2o.evaluate.stage import Stage
from mlx_h2o.evaluate.workers import Tell

#: A measure's result for one contender, as JSON types.
Found = dict[str, Any]
#: The approximate number of model calls to ask a question, whose tokens come one by one, and to
#: read the answer.
ASKING = 24
#: Contenders and their results, the full cache first; contenders that failed are left out.
Findings = Sequence[tuple[Contender, Found]]


class Measure(ABC):
    """A property of caches to measure; a subclass is a frozen dataclass of its sizes."""

    #: The measure's name on the command line and in files.
    name: ClassVar[str]
    #: Whether nothing else may run beside it, and each contender needs a process of its own.
    alone: ClassVar[bool] = False
    #: Whether several contenders are measured at once, side by side: a step of a small batch is
    #: spent on reading the model's weights, which they then share.
    shares: ClassVar[bool] = False

    @abstractmethod
    def tokens(self) -> int:
        """Tokens of a conversation; the contenders' shares refer to its full cache."""

    @abstractmethod
    def work(self) -> int:
        """The approximate number of tokens that it passes to `tell` for each contender."""

    @abstractmethod
    def passes(self) -> int:
        """The approximate number of model calls for a contender, or for all side by side."""

    @abstractmethod
    def of(self, stage: Stage, contender: Contender, tell: Tell) -> Found:
        """Measure one contender.

        Args:
            stage: Model and text.
            contender: A cache of a size.
            tell: Called with the tokens read since the last call.

        Raises:
            ValueError: The text is too short, or the contender's bytes are too few.
        """

    def of_all(self, stage: Stage, contenders: Sequence[Contender], tell: Tell) -> list[Found]:
        """Measure several contenders that can be read side by side; used only if `shares` is true.

        Args:
            stage: Model and text.
            contenders: Some of all contenders; `suite` says how many at once.
            tell: Called with the tokens of all of them read since the last call.

        Raises:
            ValueError: As in `of`.
        """
        return [self.of(stage, contender, tell) for contender in contenders]

    @abstractmethod
    def section(self, findings: Findings) -> Section:
        """The findings for people."""

    #: The heading of the figure that `brief` returns; empty if there is none.
    briefly: ClassVar[str] = ""

    def brief(self, found: Found, full: Found) -> str:
        """The most important figure of a contender, beside the full cache."""
        raise NotImplementedError(f"{self.name} has no figure that stands for all.")


def signed(share: float) -> str:
    """0.0123 as "+1.23 %"."""
    return f"{100 * share:+.2f} %"


def part_of(ours: Sequence[bool], full: Sequence[bool]) -> tuple[int, int]:
    """The number of facts known among those that the full cache knows, and the number of those."""
    return sum(a and b for a, b in zip(ours, full, strict=True)), sum(full)


def fraction(known: int, asked: int) -> str:
    """ "3/4", or "-" if the full cache knows nothing."""
    return f"{known}/{asked}" if asked else "-"
