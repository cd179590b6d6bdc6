"""The pins of a request, or of the server for all requests: tokens never to be evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_h2o.chat.pin_rules import PromptText, of_roles, of_texts, whole_sentences
from mlx_h2o.serve.patterns import check_pattern, matches
from mlx_h2o.storage.pins import Span, among_first, checked_spans, joined

#: The field among a request's settings.
FIELD = "mlx_h2o.pins"
KINDS = ("roles", "texts", "patterns", "spans")
#: The most rules of each kind in one request.
MOST_RULES = 64


@dataclass(frozen=True)
class AskedPins:
    """Pins in words, to be found in a prompt.

    Attributes:
        roles: Roles of messages: everything that they say.
        texts: Texts as they stand in the prompt, every occurrence.
        patterns: Regular expressions (`patterns.py`): the whole sentences in which they match.
        spans: Spans of the prompt's tokens, first and one past the last.
        required: Whether a rule that matches nothing is an error; the server's pins for all
            requests may match nothing.

    Raises:
        ValueError: One of them is invalid.
    """

    roles: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    required: bool = True

    def __post_init__(self) -> None:
        for i, pattern in enumerate(self.patterns):
            check_pattern(f"{FIELD}.patterns[{i}]", pattern)

    def __bool__(self) -> bool:
        return bool(self.roles or self.texts or self.patterns or self.spans)

    @classmethod
    def of(cls, asked: Any) -> AskedPins:
        """A request's pins: an object of lists by KINDS, or a list of spans.

        Raises:
            ValueError: The value is something else; the message names the field.
        """
        if isinstance(asked, list):
            asked = {"spans": asked}
        if not isinstance(asked, dict) or not set(asked) <= set(KINDS):
            raise ValueError(
                f"{FIELD} must be an object with lists of {', '.join(KINDS)}, as "
                "{'roles': ['system']}, or a list of spans of tokens, as [[0, 40]]."
            )
        words = dict[str, tuple[str, ...]]()
        for kind in KINDS[:-1]:
            given = asked.get(kind, [])
            if not isinstance(given, list) or not all(isinstance(x, str) and x for x in given):
                raise ValueError(f"{FIELD}.{kind} must be a list of texts.")
            words[kind] = tuple(given)
        for kind in KINDS:
            if isinstance(asked.get(kind), list) and len(asked[kind]) > MOST_RULES:
                count = len(asked[kind])
                raise ValueError(f"{FIELD}.{kind} has {count}; {MOST_RULES} are taken at most.")
        spans = checked_spans(f"{FIELD}.spans", asked.get("spans", []))
        return cls(words["roles"], words["texts"], words["patterns"], spans)

    def in_prompt(
        self, tokenizer: Any, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Span, ...]:
        """The positions to pin in a prompt.

        Args:
            tokenizer: The tokenizer that made the tokens.
            tokens: The prompt's tokens.
            messages: The prompt's messages; empty if it is not a chat.

        Raises:
            ValueError: A required rule matches nothing, or the search takes too long.
        """
        spans = self.spans if self.required else among_first(self.spans, len(tokens))
        for first, end in spans:
            if end > len(tokens):
                raise ValueError(
                    f"{FIELD}.spans has ({first}, {end}), and the prompt has {len(tokens)} tokens."
                )
        if not (self.roles or self.texts or self.patterns):
            return spans
        prompt = PromptText.of(tokenizer, tokens)
        said = [message for message in messages if isinstance(message.get("content"), str)]
        found = [
            *of_roles(self.roles, said, prompt.text, self.required),
            *of_texts(self.texts, prompt.text, self.required),
            *whole_sentences(prompt.text, matches(self.patterns, prompt.text)),
        ]
        return joined((*spans, *prompt.positions(found)))


NO_PINS = AskedPins()
