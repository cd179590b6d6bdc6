"""Stop texts, found in an answer's text wherever its tokens and characters begin and end.

mlx-lm looks for the tokens of a stop text encoded by itself, and a model hardly ever writes those.
Here the thread that generates ends the answer at the step that completes the first stop text; the
thread that reads the answer cuts it before that text, and holds back text that may become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.server import Response


class Ends(list[int]):
    """Characters of an answer after each of its tokens."""

    def before(self, cut: int) -> int:
        """The number of tokens that lie wholly before a character.

        A token that completes no character (a part of one, or a token that is not shown) belongs to
        the text that follows it.
        """
        return next((i + (end == cut) for i, end in enumerate(self) if end >= cut), len(self))


class StopFinder:
    """Finds the first of several stop texts in an answer that grows.

    Args:
        stops: The texts, none of them empty.

    Attributes:
        cut: The end of the answer's text, once a stop text is complete.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self._longest = max(map(len, self.stops))
        self._checked = 0
        self.cut: int | None = None

    def found(self, text: str) -> bool:
        """Whether a stop text is complete.

        The stop text that is complete first counts, and the longer one of two that end together: so
        the result does not depend on how the answer's text was split into tokens.

        Args:
            text: The whole answer so far: the earlier text, and more.
        """
        if self.cut is None:
            first = max(self._checked - self._longest + 1, 0)
            places = ((text.find(stop, first), stop) for stop in self.stops)
            complete = [(place + len(stop), place) for place, stop in places if place >= 0]
            self.cut = min(complete)[1] if complete else None
            self._checked = len(text)
        return self.cut is not None

    def sure(self, text: str) -> int:
        """The number of characters that belong to the answer whatever follows."""
        if self.cut is not None:
            return self.cut
        for place in range(max(len(text) - self._longest + 1, 0), len(text)):
            if any(stop.startswith(text[place:]) for stop in self.stops):
                return place
        return len(text)


class TextStops:
    """mlx-lm's `StopSequences` for texts: ends an answer of a batch at its stop texts or tokens.

    Args:
        tokens: mlx-lm's own stop sequences, of the model's end tokens.
        tokenizer: The model's tokenizer.
        stops: The stop texts.
    """

    def __init__(self, tokens: Any, tokenizer: Any, stops: Sequence[str]):
        self._tokens, self._tokenizer, self._stops = tokens, tokenizer, stops

    def matcher(self) -> TextMatcher:
        """A matcher for one answer, from its beginning."""
        return TextMatcher(self._tokens.matcher(), self._tokenizer, self._stops)


class TextMatcher:
    """Checks one answer for the stops of `TextStops`, token after token."""

    def __init__(self, tokens: Any, tokenizer: Any, stops: Sequence[str]):
        self._tokens, self._detokenizer = tokens, tokenizer.detokenizer
        self._finder = StopFinder(stops)

    def advance(self, token: int) -> bool:
        """Take one token; return whether the answer ends with it."""
        if self._tokens.advance(token):
            return True
        self._detokenizer.add_token(token)
        return self._finder.found(self._detokenizer.text)


def ends_of(tokenizer: Any, tokens: Sequence[int], cut: bool = False) -> tuple[str, Ends]:
    """An answer's text as its client reads it, and the place in it where each token ends.

    Args:
        tokenizer: The model's tokenizer.
        tokens: The answer's tokens.
        cut: Whether an end token or a stop text came after them: the client is not sent a character
            that is incomplete.
    """
    detokenizer, ends = tokenizer.detokenizer, Ends()
    for token in tokens:
        if token not in tokenizer.eos_token_ids:
            detokenizer.add_token(token)
        ends.append(len(detokenizer.text))
    if tokens and not cut and tokens[-1] not in tokenizer.eos_token_ids:
        detokenizer.finalize()
        ends[-1] = len(detokenizer.text)
    return detokenizer.text, ends


def stopped(
    responses: Iterable[Response], stops: Sequence[str], tokenizer: Any
) -> Iterator[Response]:
    """An answer up to its first stop text.

    A token's response comes once its text certainly belongs to the answer. The last response has
    no text if `finish_reason` is "stop": it stands for the token that ended the answer. If the
    answer's text ends within that token, the response before it has that text too.

    Args:
        responses: mlx-lm's responses, one for each token.
        stops: The stop texts.
        tokenizer: The model's tokenizer.
    """
    finder, detokenizer = StopFinder(stops), tokenizer.detokenizer
    held: list[Response] = []
    ends, given = Ends(), 0
    text = ""
    for response in responses:
        ended = response.finish_reason
        if ended != "stop" or response.token not in tokenizer.eos_token_ids:
            detokenizer.add_token(response.token)
        if ended == "length":
            detokenizer.finalize()
        text = detokenizer.text
        held.append(response)
        ends.append(len(text))
        if finder.found(text):
            yield from _cut(held, ends, given, text, finder.sure(text))
            return
        if ended is not None:
            last = "" if ended == "stop" else None
            yield from _shown(held, ends, given, text, last)
            return
        sure = finder.sure(text)
        # The last token waits, so that it can take the next one's text before a stop text.
        ready = min(ends.before(sure), len(held) - 1)
        yield from _shown(held[:ready], ends, given, text)
        given = ends[ready - 1] if ready else given
        held, ends = held[ready:], Ends(ends[ready:])


def _shown(
    held: Sequence[Response], ends: Sequence[int], given: int, text: str, last: str | None = None
) -> Iterator[Response]:
    """Responses with their parts of a text; `last` replaces the last one's part."""
    for i, response in enumerate(held):
        part, given = text[given : ends[i]], ends[i]
        if last is not None and i + 1 == len(held):
            part = last
        yield replace(response, text=part)


def _cut(held: list[Response], ends: Ends, given: int, text: str, cut: int) -> Iterator[Response]:
    """The last responses of an answer whose text a stop text ends at a character."""
    whole = ends.before(cut)
    yield from _shown(held[: max(whole - 1, 0)], ends, given, text)
    rest = text[ends[whole - 2] if whole > 1 else given : cut]
    if whole or rest:
        yield replace(held[max(whole - 1, 0)], text=rest, finish_reason=None)
    yield replace(held[-1], text="", finish_reason="stop")
