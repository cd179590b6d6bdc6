"""The interface of all measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from mlx_h2o.evaluate.methods import Method
from mlx_h2o.evaluate.reader import Reader, Tell
from mlx_h2o.evaluate.report import Section

#: A measure's result for one method, as JSON types.
Result = dict[str, Any]
#: Methods and their results, the full cache first; methods that failed are left out.
Results = Sequence[tuple[Method, Result]]
#: The approximate number of model calls to ask a question, whose tokens come one by one, and to
#: read the answer.
ASKING = 24


class Measure(ABC):
    """A property of caches to measure; a subclass is a frozen dataclass of its sizes."""

    #: The measure's name on the command line and in files.
    name: ClassVar[str]
    #: Whether several methods are measured at once, side by side: a step of a small batch is
    #: spent on reading the model's weights, which they then share.
    shares: ClassVar[bool] = False
    #: The heading of the figure that `brief` returns; empty if there is none.
    briefly: ClassVar[str] = ""

    @abstractmethod
    def tokens(self) -> int:
        """Tokens of a conversation; the methods' shares refer to its full cache."""

    @abstractmethod
    def work(self) -> int:
        """The approximate number of tokens that it passes to `tell` for each method."""

    @abstractmethod
    def passes(self) -> int:
        """The approximate number of model calls for a method, or for all side by side."""

    @abstractmethod
    def of(self, reader: Reader, method: Method, tell: Tell) -> Result:
        """Measure one method.

        Args:
            reader: Model and text.
            method: A cache of a size.
            tell: Called with the tokens read since the last call.

        Raises:
            ValueError: The text is too short, or the method's bytes are too few.
        """

    def of_all(self, reader: Reader, methods: Sequence[Method], tell: Tell) -> list[Result]:
        """Measure several methods that can be read side by side; used only if `shares` is true.

        Args:
            reader: Model and text.
            methods: Some of all methods; the evaluation says how many at once.
            tell: Called with the tokens of all of them read since the last call.

        Raises:
            ValueError: As in `of`.
        """
        return [self.of(reader, method, tell) for method in methods]

    @abstractmethod
    def section(self, results: Results) -> Section:
        """The results for people."""

    def brief(self, result: Result, full: Result) -> str:
        """The most important figure of a method, beside the full cache."""
        raise NotImplementedError(f"{self.name} has no figure that stands for all.")


def signed(ratio: float) -> str:
    """0.0123 as "+1.23 %"."""
    return f"{100 * ratio:+.2f} %"


def part_of(ours: Sequence[bool], full: Sequence[bool]) -> tuple[int, int]:
    """The number of facts known among those that the full cache knows, and the number of those."""
    return sum(a and b for a, b in zip(ours, full, strict=True)), sum(full)


def fraction(right: int, total: int) -> str:
    """ "3/4", or "-" if the full cache knows nothing."""
    return f"{right}/{total}" if total else "-"
