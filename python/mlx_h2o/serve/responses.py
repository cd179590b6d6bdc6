"""Answers in OpenAI's format, as whole objects and as pieces of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mlx_h2o.serve.protocol import Body
from mlx_h2o.serve.request import End, Event, Piece, Start, TokenLogprob


@dataclass
class Choice:
    """One answer as far as it has come.

    Attributes:
        index: The answer's number.
        start: The lengths of its prompt, once they are known.
        answer: What has come of it.
        end: Its end, once it has come.
    """

    index: int
    start: Start | None = None
    answer: Piece = field(default_factory=Piece)
    end: End | None = None

    def take(self, event: Event) -> None:
        """Grow by an event."""
        if isinstance(event, Piece):
            self.answer += event
        elif isinstance(event, Start):
            self.start = event
        elif isinstance(event, End):
            self.end = event


@dataclass(frozen=True)
class Format:
    """The objects that answer one request.

    Attributes:
        body: The request.
        name: The answer's id.
        model: The model's name.
        fingerprint: The system's fingerprint.
        created: The time of creation, in seconds.
    """

    body: Body
    name: str
    model: str
    fingerprint: str
    created: int

    def _around(self, choices: list[dict[str, Any]], chunk: bool, **more: Any) -> dict[str, Any]:
        kind = "text_completion"
        if self.body.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }

    # -- whole ------------------------------------------------------------------------------------

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        """The whole answer."""
        return self._around([self._choice(c) for c in choices], False, usage=usage_of(choices))

    def _choice(self, choice: Choice) -> dict[str, Any]:
        assert choice.end is not None
        answer = choice.answer
        own = {"index": choice.index, "finish_reason": choice.end.reason}
        own["logprobs"] = self._logprobs(answer.logprobs)
        if not self.body.chat:
            return own | {"text": answer.text}
        # Without any text there is none only beside calls: so it can be sent back as it is.
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {name: value for name, value in call.items() if name != "index"}
                for call in answer.calls
            ]
        if answer.reasoning:
            message |= _thoughts(answer.reasoning)
        return own | {"message": message}

    # -- pieces -----------------------------------------------------------------------------------

    def first(self, index: int) -> dict[str, Any]:
        """The first piece of an answer of a chat: its role."""
        delta = {"role": "assistant", "content": ""}
        return self._around([{"index": index, "delta": delta, "finish_reason": None}], True)

    def piece(self, index: int, piece: Piece) -> dict[str, Any]:
        """Some more of an answer."""
        own: dict[str, Any] = {"index": index, "finish_reason": None}
        own["logprobs"] = self._logprobs(piece.logprobs)
        if not self.body.chat:
            return self._around([own | {"text": piece.text}], True)
        delta: dict[str, Any] = {}
        if piece.text:
            delta["content"] = piece.text
        if piece.reasoning:
            delta |= _thoughts(piece.reasoning)
        if piece.calls:
            delta["tool_calls"] = list(piece.calls)
        return self._around([own | {"delta": delta}], True)

    def last(self, index: int, end: End) -> dict[str, Any]:
        """The end of an answer."""
        rest: dict[str, Any] = {"delta": {}} if self.body.chat else {"text": ""}
        return self._around([{"index": index, "finish_reason": end.reason} | rest], True)

    def usage(self, choices: list[Choice]) -> dict[str, Any]:
        """The piece with a stream's usage."""
        return self._around([], True, usage=usage_of(choices))

    # -- log-probabilities ------------------------------------------------------------------------

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self.body.wants_logprobs or not tokens:
            return None
        content = [
            _token(one) | {"top_logprobs": [_token(other) for other in one.likely]}
            for one in tokens
        ]
        if self.body.chat:
            return {"content": content, "refusal": None}
        likely = [{other.text: other.logprob for other in one.likely} for one in tokens]
        return {
            "content": content,
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": likely if self.body.likely else None,
        }


def _token(one: TokenLogprob) -> dict[str, Any]:
    data = None if one.data is None else list(one.data)
    return {"id": one.token, "token": one.text, "bytes": data, "logprob": one.logprob}


def _thoughts(text: str) -> dict[str, str]:
    """Thoughts, by both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    """Tokens of a request; its prompt counts once."""
    start, end = choices[0].start or Start(0, 0), choices[0].end
    generated = sum(choice.end.tokens for choice in choices if choice.end)
    return {
        "prompt_tokens": start.prompt,
        "completion_tokens": generated,
        "total_tokens": start.prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": start.prefix,
            "twice_read_tokens": end.twice if end else 0,
        },
    }


def event(value: Any) -> bytes:
    """A piece of a stream (server-sent events)."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


#: The end of a stream.
DONE = b"data: [DONE]\n\n"
