"""Stop texts, found in an answer's text wherever its tokens and characters begin and end."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Finds the first of several stop texts in an answer that grows.

    Args:
        stops: The texts, none of them empty; without any, nothing stops the answer.

    Attributes:
        cut: The end of the answer's text, once a stop text is complete.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self._longest = max(map(len, self.stops), default=0)
        self._checked = 0
        self.cut: int | None = None

    def stops_in(self, text: str) -> bool:
        """Whether a stop text is complete.

        The stop text that is complete first counts, and the longer one of two that end together: so
        the result does not depend on how the answer's text was split into tokens.

        Args:
            text: The whole answer so far: the earlier text, and more.
        """
        if self.cut is None and self.stops:
            first = max(self._checked - self._longest + 1, 0)
            places = ((text.find(stop, first), stop) for stop in self.stops)
            complete = [(place + len(stop), place) for place, stop in places if place >= 0]
            self.cut = min(complete)[1] if complete else None
            self._checked = len(text)
        return self.cut is not None

    def final(self, text: str) -> int:
        """The number of characters that belong to the answer whatever follows."""
        if self.cut is not None:
            return self.cut
        for place in range(max(len(text) - self._longest + 1, 0), len(text)):
            if any(stop.startswith(text[place:]) for stop in self.stops):
                return place
        return len(text)
