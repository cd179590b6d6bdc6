"""One request: what its client wants, and where the pieces of its answers go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from mlx_h2o.serve.errors import ApiError
from mlx_h2o.serve.pins import PinRequest
from mlx_h2o.serve.protocol import Body, Chat

#: Characters of a conversation's title.
TITLE_LENGTH = 60


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer with its log-probability.

    Attributes:
        token: The token's number.
        text: The token's text.
        data: The token's bytes; None if they are not known.
        logprob: The log-probability.
        likely: The likeliest tokens in its place, likeliest first.
    """

    token: int
    text: str
    data: bytes | None
    logprob: float
    likely: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Start:
    """The prompt of an answer is about to be read.

    Attributes:
        prompt: The number of the prompt's tokens.
        prefix: The number of those that caches hold already.
        trained: The tokens beyond which the model was not trained; 0: unknown, or positions roll.
    """

    prompt: int
    prefix: int
    trained: int = 0


@dataclass(frozen=True)
class Progress:
    """The tokens of a prompt that were read, and all of them; some are read twice."""

    read: int
    whole: int


@dataclass(frozen=True)
class Piece:
    """Some more of an answer.

    Attributes:
        text: More of its text.
        reasoning: More of its thoughts.
        calls: More of its tool calls, as OpenAI writes them.
        logprobs: Its next tokens.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)

    def __add__(self, more: Piece) -> Piece:
        return Piece(
            self.text + more.text,
            self.reasoning + more.reasoning,
            (*self.calls, *more.calls),
            (*self.logprobs, *more.logprobs),
        )


@dataclass(frozen=True)
class End:
    """An answer is complete.

    Attributes:
        reason: OpenAI's name of the reason: "stop", "length" or "tool_calls".
        tokens: The number of generated tokens.
        twice: The number of the prompt's tokens that were read twice.
        file: The file that holds the conversation now, or None.
    """

    reason: str
    tokens: int
    twice: int = 0
    file: Path | None = None


Event = Start | Progress | Piece | End | ApiError


def _nowhere(index: int, event: Event) -> None:
    """A `deliver` without a client: of a process that only computes its share."""


@dataclass(eq=False)
class Request:
    """A client's request, from its arrival until its last answer is sent.

    Attributes:
        body: The fields that the client sent.
        model: The model's name.
        name: The answer's id, which cannot be guessed.
        settings: The caches' settings, as `ModelSettings.of` takes them.
        pins: The pins of its prompt.
        seeds: The seed of each answer.
        deliver: Takes the number of an answer and an event; the thread that generates calls it.
        gone: Set when the client went away, or the server ends.
        arrival: The time of its arrival (`time.monotonic`).
    """

    body: Body
    model: str
    name: str
    settings: dict[str, Any]
    pins: PinRequest
    seeds: Sequence[int]
    deliver: Callable[[int, Event], None] = _nowhere
    gone: threading.Event = field(default_factory=threading.Event)
    arrival: float = field(default_factory=time.monotonic)

    @property
    def count(self) -> int:
        """The number of answers."""
        return self.body.n or 1

    @property
    def title(self) -> str:
        """The conversation's title: the first line of its user's first message, cut short."""
        body = self.body
        if isinstance(body, Chat):
            messages = [message.for_template() for message in body.messages]
            texts = [one["content"] for one in messages if one["role"] == "user"]
        else:
            texts = [body.prompt]
        first = next((text for text in texts if text.strip()), "")
        return shorten(first, TITLE_LENGTH, placeholder="…")

    def answer_name(self, index: int) -> str:
        """The name by which an answer's conversation is found."""
        return self.name if index == 0 else f"{self.name}-{index}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes receive it by pickle; its client is connected to this one.
        own = self.body, self.model, self.name, self.settings, self.pins, list(self.seeds)
        return Request, own
