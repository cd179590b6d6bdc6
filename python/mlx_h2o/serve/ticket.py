"""One request's claim on memory, from its arrival until its last token."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from mlx_h2o.serve.asked_pins import NO_PINS, AskedPins
from mlx_h2o.serve.marks import Mark
from mlx_h2o.serve.turn_text import TurnText

#: Characters of a conversation's title.
LONGEST_TITLE = 60


class HungUp(ConnectionError):
    """The client of a request went away."""


@dataclass(frozen=True)
class Turn:
    """An answer's name, by which its conversation is found again.

    Attributes:
        name: The answer's id, which its client was sent, and which cannot be guessed.
        title: The conversation's title.
    """

    name: str
    title: str


def title_of(request: Any) -> str:
    """A conversation's title: the first line of its user's first message, cut short."""
    texts = [request.prompt] if request.request_type == "text" else []
    for message in request.messages:
        content = message.get("content") if message.get("role") == "user" else None
        for part in content if isinstance(content, list) else [content]:
            texts.append(part.get("text") if isinstance(part, dict) else part)
    first = next((text for text in texts if isinstance(text, str) and text.strip()), "")
    return shorten(first, LONGEST_TITLE, placeholder="…")


#: Seconds between two checks that the thread waited for is still alive.
LOOKED_AT_EVERY = 1.0


@dataclass(frozen=True)
class Place:
    """The place of a conversation's caches among the idle ones.

    Attributes:
        mark: The mark of their settings and pins.
        key: The key of their tokens (`sessions.key_of`).
    """

    mark: Mark
    key: bytes


class Kept:
    """The places of an answer's caches, set once by the thread that generates."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._places: tuple[Place, Place | None] | None = None

    def tell(self, end: Place | None, prompt: Place | None = None) -> None:
        """Set the places, or that the caches are not kept.

        Args:
            end: The place of the caches that end with the answer; None if they were not kept.
            prompt: The place of the caches that end with its prompt, if they were kept.
        """
        if not self._told.is_set():
            self._places = None if end is None else (end, prompt)
            self._told.set()

    def wait(self, alive: Callable[[], bool]) -> tuple[Place, Place | None] | None:
        """The places; None if no caches are kept.

        Args:
            alive: Whether the thread that sets them still runs.
        """
        while not self._told.wait(LOOKED_AT_EVERY):
            if not alive():
                return None
        return self._places


def still_there() -> bool:
    """The `gone` of a request without a client that could go away."""
    return False


@dataclass(eq=False)
class Ticket:
    """A request's claim on memory.

    Attributes:
        label: Its settings as text: caches with other settings are never reused.
        settings: Its cache's settings, as `ModelSettings.of` takes them.
        need: The most bytes of its cache.
        pins: The pins of its prompt.
        gone: Whether its client went away.
        came: The time of its arrival (`time.monotonic`).
        admitted: The time of its admission (`time.monotonic`).
        evicted: Tokens that its caches had evicted when it began (mean over layers).
        turn: Its answer's name, if a client is sent one.
        said: Its text, once it is tokenized; None for prompts with images.
        kept: The places of its caches after the answer.
        noted: The place of the conversation that was noted with its answer.
        beside: The other tickets of the same request, which asks for several answers.
    """

    label: str
    settings: Mapping[str, Any]
    need: int
    pins: AskedPins = NO_PINS
    gone: Callable[[], bool] = still_there
    came: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    evicted: float = 0.0
    turn: Turn | None = None
    said: TurnText | None = None
    kept: Kept = field(default_factory=Kept)
    noted: Place | None = None
    beside: tuple[Ticket, ...] = ()

    @property
    def together(self) -> tuple[Ticket, ...]:
        """All tickets of its request."""
        return self, *self.beside

    def __reduce__(self) -> tuple[Any, ...]:
        # Other ranks receive a request by pickle; its client's socket belongs to this process.
        return Ticket, (self.label, self.settings, self.need, self.pins)
