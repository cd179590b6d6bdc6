"""What to pin, said in words: roles of a chat, texts, patterns, a predicate; found in a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mlx_h2o.inspection import token_texts
from mlx_h2o.pins import Span, joined

#: Words by which a text says what another one is to mean.
DEFINITIONS = r"\bmeans\b|\bshall mean\b|\b(?:is|are) defined as\b"

# Where a sentence ends: after its full stop and what closes it, or where a line does.
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+|\n+")


@dataclass(frozen=True)
class PinRules:
    """What of a prompt is never to be evicted.

    Attributes:
        roles: Of messages, such as "system": all that they say.
        texts: As they stand in the prompt, every time.
        patterns: Regular expressions: the whole sentences that they match in.
        predicate: Says of a sentence whether it is pinned.

    Raises:
        ValueError: A pattern is no regular expression.
    """

    roles: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    predicate: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"The pattern {pattern!r} is no regular expression: {error}."
                ) from error

    def __bool__(self) -> bool:
        return bool(self.roles or self.texts or self.patterns or self.predicate)


def spans_for(
    rules: PinRules,
    tokenizer: Any,
    tokens: Sequence[int],
    messages: Sequence[Mapping[str, str]] = (),
    first: int = 0,
) -> tuple[Span, ...]:
    """The positions of what the rules name in a prompt.

    Args:
        rules: What to pin.
        tokenizer: That made the tokens.
        tokens: Of the prompt, chat template and all.
        messages: That the template was given, for roles: "role" and "content" of each.
        first: The position of the first token (a later turn's is the caches' offset).

    Returns:
        Spans of positions, for `mlx_h2o.pin` or `make_prompt_cache(pins=...)`.

    Raises:
        ValueError: A text or a role's message is not in the prompt.
    """
    texts = token_texts(tokenizer, tokens)
    text, ends = "".join(texts), list(accumulate(map(len, texts)))
    found = [
        *_of_roles(rules.roles, messages, text),
        *_of_texts(rules.texts, text),
        *_of_sentences(rules, text),
    ]
    spans = []
    for start, stop in found:
        inside = [
            i
            for i, end in enumerate(ends)
            # A token that begins a character has no text of its own: the next one has it.
            if (end > start or (not texts[i] and end == start)) and end - len(texts[i]) < stop
        ]
        if inside:
            spans.append((first + inside[0], first + inside[-1] + 1))
    return joined(spans)


def _of_roles(
    roles: Sequence[str], messages: Sequence[Mapping[str, str]], text: str
) -> Iterator[Span]:
    """Where the messages of some roles stand; with a first message all that comes before it."""
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
    for role in roles:
        if all(message["role"] != role for message in messages):
            raise ValueError(f"The prompt has no {role} message to pin.")


def _of_texts(texts: Sequence[str], text: str) -> Iterator[Span]:
    for wanted in texts:
        places = [match.span() for match in re.finditer(re.escape(wanted), text)] if wanted else []
        if not places:
            raise ValueError(f"The prompt does not say {wanted!r}, so that cannot be pinned.")
        yield from places


def _of_sentences(rules: PinRules, text: str) -> Iterator[Span]:
    """Sentences that a pattern matches in, or that the predicate is true of."""
    sentences = sentences_of(text)
    for pattern in rules.patterns:
        for match in re.finditer(pattern, text):
            around = [s for s in sentences if s[0] < max(match.end(), 1) and s[1] > match.start()]
            if around:
                yield around[0][0], around[-1][1]
    if rules.predicate is not None:
        yield from (s for s in sentences if rules.predicate(text[slice(*s)]))


def sentences_of(text: str) -> list[Span]:
    """Where the sentences of a text stand, without the white space between them."""
    ends = list(_END_OF_SENTENCE.finditer(text))
    starts = [0, *(end.end() for end in ends)]
    # Without the white space, and with what closes a sentence after its full stop.
    stops = [*(end.start() + len(end.group().rstrip()) for end in ends), len(text)]
    return [span for span in zip(starts, stops, strict=True) if text[slice(*span)].strip()]
