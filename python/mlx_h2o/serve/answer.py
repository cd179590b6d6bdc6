"""An answer's text as it grows: exact, cut at stop texts, split into text, thoughts and calls."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Sequence
from typing import Any

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from mlx_h2o.serve.protocol import Chat
from mlx_h2o.serve.request import Piece, Request, TokenLogprob
from mlx_h2o.serve.stops import StopFinder

#: Tokens decoded before the first token of an answer: how it is written depends on them.
CONTEXT = 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of tokens that come one by one, exactly as the whole sequence is decoded.

    mlx-lm's own detokenizers leave out a space at the beginning; a text that is continued needs it.

    Args:
        tokenizer: The model's tokenizer.
        before: The tokens before the first one.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int]):
        self._tokenizer = tokenizer
        self._tokens = list(before[-CONTEXT:])
        self._first, self._next = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """The text that became complete with this token; tokens of half a character wait."""
        self._tokens.append(token)
        text = self._waiting()
        if text.endswith(REPLACEMENT):
            return ""
        self._first, self._next = self._next, len(self._tokens)
        return text

    @property
    def is_whole(self) -> bool:
        """Whether the text so far spells all tokens so far."""
        return self._next == len(self._tokens)

    def finish(self) -> str:
        """The text of the tokens that still wait."""
        text = self._waiting()
        self._next = len(self._tokens)
        return text

    def _waiting(self) -> str:
        return self._decode(len(self._tokens))[len(self._decode(self._next)) :]

    def _decode(self, end: int) -> str:
        tokens = self._tokens[self._first : end]
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text


class AnswerText:
    """The text of one answer.

    Args:
        tokenizer: The model's tokenizer.
        request: The request that is answered.
        prompt: The prompt's tokens.
        state: The state of mlx-lm's state machine at the beginning: "normal", or "reasoning".

    Attributes:
        text: All text that was generated, a stop text and its end included.
        content: The text without thoughts and calls, as the client got it.
        ends: Numbers of tokens with the number of characters that they spell exactly.
    """

    def __init__(self, tokenizer: Any, request: Request, prompt: Sequence[int], state: str):
        body = request.body
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._finder = StopFinder(body.stops)
        self._state = make_text_state_machine(tokenizer).make_state(state)
        self._before = state
        self._tools = body.offered_tools if isinstance(body, Chat) else None
        self._several = not isinstance(body, Chat) or body.parallel_tool_calls is not False
        # A template writes a space before an answer, or none; a text is continued as it is.
        self._trims = isinstance(body, Chat) and not body.continue_final_message
        self._is_chat = isinstance(body, Chat)
        self.text = self.content = ""
        self.ends: list[tuple[int, int]] = [(0, 0)]
        self._count = self._sent = self._calls = 0
        self._call = ""
        self._waiting: list[tuple[int, TokenLogprob]] = []
        # What became final and is not returned yet.
        self._piece = Piece()

    @property
    def stops(self) -> bool:
        """Whether a stop text is complete."""
        return self._finder.cut is not None

    @property
    def visible(self) -> int:
        """The number of characters that the client may see."""
        return len(self.text) if self._finder.cut is None else self._finder.cut

    def add(self, token: int, logprob: TokenLogprob | None) -> Piece:
        """Take one token, which is no end token; return what became final."""
        self.text += self._detokenizer.add(token)
        self._count += 1
        if self._detokenizer.is_whole:
            self.ends.append((self._count, len(self.text)))
        if logprob is not None:
            self._waiting.append((len(self.text), logprob))
        self._finder.stops_in(self.text)
        return self._release(self._finder.final(self.text))

    def finish(self, reason: str) -> tuple[Piece, str]:
        """The rest of the answer, and why it ended as its client reads it.

        Args:
            reason: "stop", or "length".
        """
        if reason == "length" and not self.stops:
            self.text += self._detokenizer.finish()
        piece = self._release(self.visible)
        self._state, rest, state = TextStateMachine.flush(self._state)
        self._take(state, rest)
        if self._before == "tool" and self._call:
            self._end_call(closed=False)
        return piece + self._piece, "tool_calls" if self._calls and reason == "stop" else reason

    def _release(self, end: int) -> Piece:
        """Send the text up to a character through the state machine."""
        if end > self._sent and self._is_chat:
            part = self.text[self._sent : end]
            self._state, segments = TextStateMachine.split(self._state, part)
            for state, text in segments:
                self._take(state, text)
        elif end > self._sent:
            self._piece += Piece(self.text[self._sent : end])
        self._sent = max(end, self._sent)
        ready = tuple(one for place, one in self._waiting if place <= self._sent)
        self._waiting = self._waiting[len(ready) :]
        piece, self._piece = self._piece + Piece(logprobs=ready), Piece()
        return piece

    def _take(self, state: str | None, text: str) -> None:
        if self._before == "tool" and state != "tool":
            self._end_call(closed=True)
        self._before = state or ""
        if state == "reasoning":
            self._piece += Piece(reasoning=text)
        elif state == "tool":
            self._call += text
        elif state == "normal":
            self._say(text)

    def _say(self, text: str) -> None:
        if self._trims and text:
            text, self._trims = text.removeprefix(" "), False
        self._piece += Piece(text)
        self.content += text

    def _end_call(self, closed: bool) -> None:
        """A call is complete: it is read, or it is text if it cannot be, or was not offered."""
        call, self._call = self._call, ""
        calls = self._read_call(call)
        if calls is None:
            end = (self._tokenizer.tool_call_end or "") if closed else ""
            self._say(f"{self._tokenizer.tool_call_start or ''}{call}{end}")
            return
        for one in calls if self._several else calls[: max(1 - self._calls, 0)]:
            one["index"] = self._calls
            self._calls += 1
            self._piece += Piece(calls=(one,))

    def _read_call(self, call: str) -> list[dict[str, Any]] | None:
        if not self._tools:
            return None
        try:
            parsed = self._tokenizer.tool_parser(call, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [_as_openai(one) for one in calls]
        except Exception as error:  # parsers of many models, on any text
            logging.warning("A tool call cannot be read: %s: %s", type(error).__name__, error)
            return None


def _as_openai(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {
        "id": call.get("id") or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
