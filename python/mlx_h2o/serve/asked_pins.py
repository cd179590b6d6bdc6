"""What a request, or the server for all requests, wants never to be evicted."""

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
#: Of one request, each.
MOST_RULES = 64


@dataclass(frozen=True)
class AskedPins:
    """Pins in words, to be looked for in a prompt.

    Attributes:
        roles: Of messages: all that they say.
        texts: As they stand in the prompt, every time.
        patterns: Regular expressions (`patterns.py`): whole sentences that they match in.
        spans: Of the prompt's tokens, first and one past the last.
        required: Whether what is not in the prompt is an error; what the server pins for all
            requests is looked for and need not be there.

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
        """What a request says: an object of lists by KINDS, or a list of spans.

        Raises:
            ValueError: It is something else; the message names the field.
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
        """The positions that are to be pinned in a prompt.

        Args:
            tokenizer: That made the tokens.
            tokens: Of the prompt.
            messages: In it; empty where it is no chat.

        Raises:
            ValueError: What is required is not there, or there is too much to look for.
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
