"""One request's claim on memory, from the moment it comes until its last token."""

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
    """An answer, by which its conversation is found again.

    Attributes:
        name: The answer's id, which its client was told, and which cannot be guessed.
        title: How the conversation began.
    """

    name: str
    title: str


def title_of(request: Any) -> str:
    """How a request's conversation began: the first line that its user said, cut short."""
    texts = [request.prompt] if request.request_type == "text" else []
    for message in request.messages:
        content = message.get("content") if message.get("role") == "user" else None
        for part in content if isinstance(content, list) else [content]:
            texts.append(part.get("text") if isinstance(part, dict) else part)
    first = next((text for text in texts if isinstance(text, str) and text.strip()), "")
    return shorten(first, LONGEST_TITLE, placeholder="…")


#: How often a thread that waits for another looks whether that is still alive, in seconds.
LOOKED_AT_EVERY = 1.0


@dataclass(frozen=True)
class Place:
    """Where a conversation's caches are among the idle ones.

    Attributes:
        mark: Of their settings and pins.
        key: Of their tokens (`sessions.key_of`).
    """

    mark: Mark
    key: bytes


class Kept:
    """What has become of an answer's caches: told once, by the thread that generates."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._places: tuple[Place, Place | None] | None = None

    def tell(self, end: Place | None, prompt: Place | None = None) -> None:
        """Caches are kept, or are not.

        Args:
            end: Where those are that end with the answer; None: they were not kept.
            prompt: Where those are that end with its prompt, if they were kept.
        """
        if not self._told.is_set():
            self._places = None if end is None else (end, prompt)
            self._told.set()

    def wait(self, alive: Callable[[], bool]) -> tuple[Place, Place | None] | None:
        """What was told; None where nothing is kept.

        Args:
            alive: Whether the thread that tells it still runs.
        """
        while not self._told.wait(LOOKED_AT_EVERY):
            if not alive():
                return None
        return self._places


def still_there() -> bool:
    """Of a request without a client that could go away."""
    return False


@dataclass(eq=False)
class Ticket:
    """A request as memory sees it.

    Attributes:
        label: Its settings as text: caches of other settings are never gone on with.
        settings: What its cache may hold, as `ModelSettings.of` takes it.
        need: Bytes that its cache takes at most.
        pins: What of its prompt is never to be evicted.
        gone: Whether its client went away.
        came: When it came (`time.monotonic`).
        admitted: When it was let in (`time.monotonic`).
        evicted: Tokens that its caches had evicted when it began (mean over layers).
        turn: What its answer is called, if a client is told.
        said: Its text, once it is tokenized; None for prompts with images.
        kept: What becomes of its caches.
        noted: Where the conversation is that was written down with its answer.
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
        """This one, and the other ones of its request."""
        return self, *self.beside

    def __reduce__(self) -> tuple[Any, ...]:
        # Other ranks learn of a request by pickle; its client's socket is of this process.
        return Ticket, (self.label, self.settings, self.need, self.pins)
