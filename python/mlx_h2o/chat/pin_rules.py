"""Pin rules: roles of a chat, texts, patterns or a predicate, and the spans that they match."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mlx_h2o.chat.retention import token_texts
from mlx_h2o.slots.pins import Span, checked_spans, joined

#: Phrases by which a text defines a term.
DEFINITIONS = r"\bmeans\b|\bshall mean\b|\b(?:is|are) defined as\b"

# The end of a sentence: after its full stop and closing quotes or brackets, or at a line's end.
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n+")


@dataclass(frozen=True)
class PinRules:
    """The parts of a prompt that are never to be evicted.

    Attributes:
        roles: Roles of messages, such as "system": everything that they say.
        texts: Texts as they stand in the prompt, every occurrence.
        patterns: Regular expressions: the whole sentences in which they match.
        predicate: Returns whether a sentence is pinned.
        spans: Spans of the prompt's tokens, first and one past the last.

    Raises:
        ValueError: A pattern is no regular expression, or a span is invalid.
    """

    roles: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    predicate: Callable[[str], bool] | None = None
    spans: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"The pattern {pattern!r} is no regular expression: {error}."
                ) from error
        object.__setattr__(self, "spans", checked_spans("spans", self.spans))

    def __bool__(self) -> bool:
        return bool(self.roles or self.texts or self.patterns or self.predicate or self.spans)


def spans_for(
    rules: PinRules,
    tokenizer: Any,
    tokens: Sequence[int],
    messages: Sequence[Mapping[str, str]] = (),
    first: int = 0,
) -> tuple[Span, ...]:
    """The positions of the parts of a prompt that the rules name.

    Args:
        rules: The rules.
        tokenizer: The tokenizer that made the tokens.
        tokens: The prompt's tokens, chat template and all.
        messages: The template's messages, for roles: "role" and "content" of each.
        first: The position of the first token (in a later turn, the caches' offset).

    Returns:
        Spans of positions, for `mlx_h2o.pin` or `make_prompt_cache(pins=...)`.

    Raises:
        ValueError: A text, a role's message or a span is not in the prompt.
    """
    for start, end in rules.spans:
        if end > len(tokens):
            raise ValueError(
                f"The span {start}:{end} cannot be pinned: the prompt has {len(tokens)} tokens."
            )
    prompt = PromptText.of(tokenizer, tokens)
    matches = (match.span() for p in rules.patterns for match in re.finditer(p, prompt.text))
    spans = [
        *of_roles(rules.roles, messages, prompt.text),
        *of_texts(rules.texts, prompt.text),
        *whole_sentences(prompt.text, matches),
    ]
    if rules.predicate is not None:
        spans += (s for s in sentences_of(prompt.text) if rules.predicate(prompt.text[slice(*s)]))
    of_rules = ((first + start, first + end) for start, end in rules.spans)
    return joined((*of_rules, *prompt.positions(spans, first)))


@dataclass(frozen=True)
class PromptText:
    """A prompt's text, and the part of it that each token stands for.

    Attributes:
        text: The whole text.
        starts: The start of each token's part in the text.
        ends: The end of each token's part.
    """

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, tokenizer: Any, tokens: Sequence[int]) -> PromptText:
        """The text of some tokens."""
        texts = token_texts(tokenizer, tokens)
        ends = list(accumulate(map(len, texts)))
        return cls("".join(texts), [0, *ends[:-1]], ends)

    def positions(self, parts: Iterable[Span], first: int = 0) -> tuple[Span, ...]:
        """The positions of the tokens that stand for some parts of the text.

        Args:
            parts: The parts' begins and ends in the text.
            first: The position of the first token.
        """
        spans = []
        for start, stop in joined(span for span in parts if span[0] < span[1]):
            begin = bisect_right(self.ends, start)
            # A token that begins a character has no text of its own: the next one has it.
            while begin and self.starts[begin - 1] == self.ends[begin - 1] == start:
                begin -= 1
            end = bisect_left(self.starts, stop)
            if begin < end:
                spans.append((first + begin, first + end))
        return joined(spans)


def of_roles(
    roles: Sequence[str],
    messages: Sequence[Mapping[str, str]],
    text: str,
    required: bool = True,
) -> Iterator[Span]:
    """The spans of the messages of some roles; with the first message all the text before it.

    Args:
        roles: Roles of messages.
        messages: All messages in the text, in order.
        text: The prompt's text.
        required: Whether a role without a message is an error.

    Raises:
        ValueError: A message is not in the text as it was written, or a required role has none.
    """
    after = 0
    for i, message in enumerate(messages):
        content = message["content"].strip()
        start = text.find(content, after)
        if start < 0:
            if message["role"] in roles:
                raise ValueError(
                    f"The {message['role']} message is not in the prompt as it was written, so it "
                    "cannot be pinned by its role: pin its text."
                )
            continue
        after = start + len(content)
        if message["role"] in roles:
            yield (start if i else 0, after)
    for role in roles if required else ():
        if all(message["role"] != role for message in messages):
            raise ValueError(f"The prompt has no {role} message to pin.")


def of_texts(texts: Sequence[str], text: str, required: bool = True) -> Iterator[Span]:
    """The spans of some texts in another, every occurrence.

    Args:
        texts: The texts to look for.
        text: The text to search.
        required: Whether a missing text is an error.

    Raises:
        ValueError: A required text is missing.
    """
    for part in texts:
        places = [match.span() for match in re.finditer(re.escape(part), text)] if part else []
        if not places and required:
            raise ValueError(f"The prompt does not contain {part!r}, so it cannot be pinned.")
        yield from places


def whole_sentences(text: str, matches: Iterable[Span]) -> Iterator[Span]:
    """The whole sentences around matches, from the first to the last sentence of each match."""
    sentences = sentences_of(text)
    starts, stops = [start for start, _ in sentences], [stop for _, stop in sentences]
    for start, stop in matches:
        first, end = bisect_right(stops, start), bisect_left(starts, max(stop, 1))
        if first < end:
            yield starts[first], stops[end - 1]


def sentences_of(text: str) -> list[Span]:
    """The spans of a text's sentences, without the white space between them."""
    ends = list(_END_OF_SENTENCE.finditer(text))
    starts = [0, *(end.end() for end in ends)]
    # A stop lies before the white space, and after the characters that close a sentence.
    stops = [*(end.start() + len(end.group().rstrip()) for end in ends), len(text)]
    return [span for span in zip(starts, stops, strict=True) if text[slice(*span)].strip()]
