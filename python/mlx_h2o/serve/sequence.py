"""One answer in the making: its prompt, its caches, and the tokens drawn so far."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.compression.reading import Readings, TwoReadings
from mlx_h2o.serve.answer import AnswerText
from mlx_h2o.serve.keys import Mark, Place, key_of
from mlx_h2o.serve.model import CachePlan, ServedModel
from mlx_h2o.serve.prompt import Prompt
from mlx_h2o.serve.request import Event, Progress, Request, TokenLogprob
from mlx_h2o.serve.sampling import Sampler, finite, likeliest


@dataclass(eq=False)
class Sequence:
    """One answer, from its admission until its end.

    Attributes:
        request: The request that it answers.
        index: The answer's number.
        served: The model.
        prompt: The prompt.
        plan: The plan of its caches.
        mark: Its caches' settings, and the pins that the request asked for.
        empty: Empty caches with its settings and pins.
        sampler: Draws its tokens.
        text: The answer's text.
        limit: The most tokens that it generates.
        reading: How the prompt is read.
        admitted: The time of its admission (`time.monotonic`); 0 while it waits.
        cache: Its caches while it does not share a batch; None before its prompt is read.
        tokens: The tokens that its caches have read.
        prefix: The number of those that earlier requests had read.
        readings: The part of the prompt that is being read twice, or None.
        again: The number of the prompt's tokens that are read a second time.
        twice: The number of those that were.
        generated: The tokens that it generated.
        drawn: The number of tokens drawn; one more than generated, once it runs.
        replay: Tokens that are drawn again as they were, when it is computed again.
        suspect: Whether a step that it took part in raised, and it has not passed that step since.
        error: What its sampler or a processor raised.
        over: Whether it has ended, in whatever way.
    """

    request: Request
    index: int
    served: ServedModel
    prompt: Prompt
    plan: CachePlan
    mark: Mark
    empty: list[Any]
    sampler: Sampler
    text: AnswerText
    limit: int
    reading: Readings = "once"
    admitted: float = 0.0
    cache: list[Any] | None = None
    tokens: list[int] = field(default_factory=list)
    prefix: int = 0
    readings: TwoReadings | None = None
    again: int = 0
    twice: int = 0
    generated: list[int] = field(default_factory=list)
    drawn: int = 0
    replay: list[int] = field(default_factory=list)
    suspect: bool = False
    error: Exception | None = None
    over: bool = False

    @property
    def name(self) -> str:
        """The answer's name."""
        return self.request.answer_name(self.index)

    @property
    def left(self) -> int:
        """The number of the prompt's tokens that are still to be read."""
        return max(len(self.prompt.tokens) - len(self.tokens), 0)

    @property
    def unread(self) -> int:
        """The number of the prompt's tokens that are still to be read, both times."""
        return self.left + (self.readings.count - self.readings.done if self.readings else 0)

    @property
    def progress(self) -> Progress:
        """The prompt's tokens as they are read; those that are read twice count twice."""
        whole = len(self.prompt.tokens) + self.again
        return Progress(whole - self.unread, whole)

    @property
    def place(self) -> Place:
        """The place of its caches as they are now."""
        return Place(self.mark, key_of(self.tokens))

    def deliver(self, event: Event) -> None:
        """Give its client an event."""
        self.request.deliver(self.index, event)

    # -- the prompt -------------------------------------------------------------------------------

    @property
    def stops_at(self) -> list[tuple[int, str]]:
        """Where reading stops to keep a copy of the caches, and what they end with there."""
        last = len(self.prompt.tokens) - 1
        return [(self.prompt.system, "system"), (min(self.prompt.tail, last), "prompt")]

    @property
    def prompt_end(self) -> Place:
        """The place of the copy that is kept at the prompt's end."""
        return Place(self.mark, key_of(self.prompt.tokens[: self.stops_at[-1][0]]))

    def open(self, cache: list[Any], prefix: int) -> None:
        """Begin to read the prompt, of which these caches have read the first tokens."""
        self.cache, self.prefix = cache, prefix
        self.tokens = self.prompt.tokens[:prefix]

    def next_chunk(self, size: int) -> list[int]:
        """The next tokens of the prompt, without its last one, with which generation begins."""
        first = len(self.tokens)
        ends = [stop for stop, _ in self.stops_at if stop > first]
        end = min([first + size, len(self.prompt.tokens) - 1, *ends])
        return self.prompt.tokens[first:end]

    def snapshot(self) -> tuple[list[Any], str] | None:
        """A copy of the caches, and what they end with, if one is kept here."""
        here = [kind for stop, kind in self.stops_at if stop == len(self.tokens) > self.prefix]
        return (copy.deepcopy(self.cache or []), here[-1]) if here else None

    def restart(self) -> None:
        """Compute everything again, up to the token generated last."""
        self.replay, self.generated = self.replay[len(self.generated) :], self.generated
        self.replay = [*self.generated, *self.replay]
        self.generated, self.drawn, self.cache, self.tokens = [], 0, None, []
        self.readings, self.again, self.twice = None, 0, 0
        self.suspect = True

    # -- the answer -------------------------------------------------------------------------------

    @property
    def repeats(self) -> bool:
        """Whether the token generated last was generated before."""
        return len(self.generated) <= len(self.replay)

    @property
    def wants_row(self) -> bool:
        """Whether its client wants log-probabilities."""
        return self.request.body.wants_logprobs

    def draw(self, token: mx.array, logits: mx.array) -> tuple[mx.array, mx.array | None]:
        """Its next token `[1]`, and the log-probabilities `[V]` if its client wants any.

        An error of its own sampler or processors ends only this sequence: another one shares the
        step, so some token is returned.

        Args:
            token: The token that was read, `[1]`.
            logits: The logits of the next token, `[1, V]`.
        """
        number, self.drawn = self.drawn, self.drawn + 1
        try:
            logits = self.sampler.process(token, logits)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            row = logprobs[0] if self.wants_row else None
            if number < len(self.replay):
                return mx.array([self.replay[number]], mx.uint32), row
            return self.sampler.draw(logprobs, number), row
        except Exception as error:
            self.error = error
            return mx.argmax(logits, axis=-1), None

    def logprob(self, token: int, row: mx.array | None) -> TokenLogprob | None:
        """A token with its log-probability, if its client wants it."""
        if row is None:
            return None
        own = finite(float(row[token].item()))  # type: ignore[arg-type]
        tops = likeliest(row, self.request.body.likely)
        return self._described(token, own, [self._described(one, value) for one, value in tops])

    def _described(
        self, token: int, logprob: float, likely: Several[TokenLogprob] = ()
    ) -> TokenLogprob:
        tokenizer = self.prompt.tokenizer
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return TokenLogprob(
            token, text, _token_bytes(tokenizer, token, text), logprob, tuple(likely)
        )

    def seconds(self) -> float:
        """Seconds since its admission."""
        return time.monotonic() - self.admitted


def _token_bytes(tokenizer: Any, token: int, text: str) -> bytes | None:
    """A token's bytes, which may be part of a character; None if they are not known."""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens([token])[0]
    if piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    backend = getattr(getattr(tokenizer, "_tokenizer", tokenizer), "backend_tokenizer", None)
    if "ByteLevel" not in str(getattr(backend, "decoder", "")):
        return None
    codes = {letter: code for code, letter in byte_letters().items()}
    return bytes(codes[letter] for letter in piece if letter in codes)


def byte_letters() -> dict[int, str]:
    """The letters in which byte-level tokenizers write bytes (GPT-2, Radford et al., 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {code: chr(code) for code in plain}
    rest = (code for code in range(256) if code not in letters)
    return letters | {code: chr(256 + i) for i, code in enumerate(rest)}


def evicted(cache: Several[Any]) -> float:
    """The tokens that a list's bounded caches have evicted, mean over layers."""
    counts = [entry.evicted for entry in bounded_members(cache)]
    return sum(counts) / len(counts) if counts else 0.0
