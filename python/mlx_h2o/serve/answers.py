"""Answers in OpenAI's format: mlx-lm's generated tokens, as objects and as pieces of a stream."""

from __future__ import annotations

import json
import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.server import ToolCallFormatter

#: The log-probability reported for a token that cannot come: JSON has no infinity.
LEAST_LOGPROB = -9999.0
KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def error_body(status: int, why: str) -> bytes:
    """An error in the format that OpenAI's clients read."""
    usual = "server_error" if status >= 500 else "invalid_request_error"
    told = {"message": why, "type": KINDS.get(status, usual), "param": None, "code": status}
    return json.dumps({"error": told}).encode()


@dataclass(frozen=True)
class Frame:
    """The fields that all pieces of an answer share.

    Attributes:
        chat: Whether it answers a chat.
        stream: Whether it comes in pieces.
        model: The server's name of the model.
        fingerprint: The system's fingerprint.
        name: The answer's id.
        created: The time of creation, in seconds.
    """

    chat: bool
    stream: bool
    model: str
    fingerprint: str
    name: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        kind = "chatcmpl" if self.chat else "cmpl"
        object.__setattr__(self, "name", self.name or f"{kind}-{uuid.uuid4()}")

    @property
    def kind(self) -> str:
        """The API's name for such an object."""
        if not self.chat:
            return "text_completion"
        return "chat.completion.chunk" if self.stream else "chat.completion"

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An object with these choices."""
        return {
            "id": self.name,
            "system_fingerprint": self.fingerprint,
            "object": self.kind,
            "model": self.model,
            "created": self.created,
            "choices": choices,
            **more,
        }


class Choice:
    """One answer, as it grows by the responses of `BoundedGenerator.generate`.

    Args:
        frame: The fields that all pieces of the answer share.
        index: The answer's number.
        context: mlx-lm's context of the generation.
        tools: The tools that it may call.
        several: Whether it may call more than once.
        logprobs: Whether its tokens' log-probabilities are reported.
        top: The number of likely tokens reported for each token.
    """

    def __init__(
        self,
        frame: Frame,
        index: int,
        context: Any,
        tools: Any,
        several: bool,
        logprobs: bool,
        top: int,
    ):
        self._frame, self._index = frame, index
        self._logprobs, self._top, self._several = logprobs, top, several
        self._formatter = ToolCallFormatter(context.tool_parser, tools, frame.stream)
        self._state = context.text_sm.make_state(context.initial_state)
        self._before = self._now = context.initial_state
        self._tool = ""
        self._called = self._told_call = False
        # The text that has not been sent yet.
        self._text = self._reasoning = ""
        self._calls: list[str] = []
        self._tokens: list[dict[str, Any]] = []
        self.prompt_tokens, self.cached = len(context.prompt), context
        self.tokens = 0
        self.finish_reason = "stop"

    def take(self, response: Any) -> None:
        """Take the next token, and the text that it made final."""
        self._state, segments = TextStateMachine.split(self._state, response.text)
        if response.finish_reason is not None:
            self._state, rest, current = TextStateMachine.flush(self._state)
            segments.append((current, rest))
            self.finish_reason = response.finish_reason
        for current, text in segments:
            if current == "reasoning":
                self._reasoning += text
            elif current == "tool":
                self._tool += text
            elif current == "normal":
                if self._before == "tool":
                    self._call()
                self._text += text
            self._before = self._now = current
        self.tokens += 1
        if self._top > 0:
            self._tokens.append(_with_likely(response))
        elif self._logprobs:
            self._tokens.append({"id": response.token, "logprob": _finite(response.logprob)})

    def _call(self) -> None:
        """Note that a tool call is complete."""
        self._calls.append(self._tool)
        self._tool, self._called = "", True

    @property
    def has_news(self) -> bool:
        """Whether a piece of a stream should be sent now."""
        return self._now != "tool" and bool(self._text or self._calls or self._reasoning)

    def finish(self) -> None:
        """Note that no more tokens come."""
        if self._before == "tool" and self._tool:
            self._call()
        if self.finish_reason == "stop" and self._called:
            self.finish_reason = "tool_calls"

    def told(self, last: bool) -> dict[str, Any]:
        """The content not sent yet, as a choice.

        Args:
            last: Whether to add the reason for which the answer ended.
        """
        stream = self._frame.stream
        choice: dict[str, Any] = {
            "index": self._index,
            "finish_reason": self.finish_reason if last else None,
        }
        if self._tokens:
            choice["logprobs"] = {"content": self._tokens}
        if self._frame.chat:
            said: dict[str, Any] = {"role": "assistant"}
            if self._text or not stream:
                said["content"] = self._text or None
            if self._reasoning:
                said["reasoning"] = self._reasoning
            calls = self._formatted()
            if calls:
                said["tool_calls"] = calls
            choice["delta" if stream else "message"] = said
        else:
            choice["text"] = self._text
        self._text = self._reasoning = ""
        self._calls, self._tokens = [], []
        return choice

    def _formatted(self) -> list[Any]:
        """Tool calls not sent yet; only the answer's first if it may not have several."""
        calls: list[Any] = self._formatter(self._calls)
        if not self._several:
            calls = [] if self._told_call else calls[:1]
        self._told_call = self._told_call or bool(calls)
        return calls


def usage_of(choices: list[Choice]) -> dict[str, Any]:
    """Tokens of a request; its prompt counts once."""
    prompt, generated = choices[0].prompt_tokens, sum(choice.tokens for choice in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    # The count is known only after the prompt was looked up.
    cached = choices[0].cached.prompt_cache_count
    if cached is not None and cached >= 0:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB


def _with_likely(response: Any) -> dict[str, Any]:
    """A token, and the likeliest tokens in its place, likeliest first."""
    likely = [one | {"logprob": _finite(one["logprob"])} for one in response.top_tokens]
    likely.sort(key=lambda one: -one["logprob"])
    own = next((one for one in likely if one["id"] == response.token), {"id": response.token})
    return own | {"logprob": _finite(response.logprob), "top_logprobs": likely}


def event(told: Any) -> bytes:
    """A piece of a stream (server-sent events)."""
    return b"data: " + json.dumps(told).encode() + b"\n\n"
