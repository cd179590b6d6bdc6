"""The pins of a request, or of the server for all requests: tokens never to be evicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_h2o.chat.pin_rules import PromptText, of_roles, of_texts
from mlx_h2o.slots.pins import Span, among_first, checked_spans, joined

#: The field among a request's settings.
FIELD = "mlx_h2o.pins"
KINDS = ("roles", "texts", "spans")
#: The most rules of each kind in one request.
MAX_RULES = 64


def template_role(role: str) -> str:
    """A message's role as templates name it: they know developers by the earlier name."""
    return "system" if role == "developer" else role


@dataclass(frozen=True)
class PinRequest:
    """Pins in words, to be looked for in a prompt.

    Attributes:
        roles: Roles of messages: everything that they say.
        texts: Texts as they stand in the prompt, every occurrence.
        spans: Spans of the prompt's tokens, first and one past the last.
        required: Whether a rule that matches nothing is an error; the server's pins for all
            requests may match nothing.
    """

    roles: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    required: bool = True

    @classmethod
    def of(cls, value: Any) -> PinRequest:
        """A request's pins: an object of lists by KINDS, or a list of spans.

        Raises:
            ValueError: The value is something else; the message names the field.
        """
        if isinstance(value, list):
            value = {"spans": value}
        if not isinstance(value, dict) or not set(value) <= set(KINDS):
            raise ValueError(
                f"{FIELD} must be an object with lists of {', '.join(KINDS)}, as "
                "{'roles': ['system']}, or a list of spans of tokens, as [[0, 40]]."
            )
        words = dict[str, tuple[str, ...]]()
        for kind in KINDS[:-1]:
            texts = value.get(kind, [])
            if not isinstance(texts, list) or not all(isinstance(x, str) and x for x in texts):
                raise ValueError(f"{FIELD}.{kind} must be a list of texts.")
            words[kind] = tuple(texts)
        for kind in KINDS:
            if isinstance(value.get(kind), list) and len(value[kind]) > MAX_RULES:
                count = len(value[kind])
                raise ValueError(f"{FIELD}.{kind} has {count}; at most {MAX_RULES} are allowed.")
        spans = checked_spans(f"{FIELD}.spans", value.get("spans", []))
        return cls(tuple(map(template_role, words["roles"])), words["texts"], spans)

    def in_prompt(
        self, tokenizer: Any, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Span, ...]:
        """The positions to pin in a prompt.

        Args:
            tokenizer: The tokenizer that made the tokens.
            tokens: The prompt's tokens.
            messages: The prompt's messages; empty if it is not a chat.

        Raises:
            ValueError: A required rule matches nothing.
        """
        spans = self.spans if self.required else among_first(self.spans, len(tokens))
        for first, end in spans:
            if end > len(tokens):
                raise ValueError(
                    f"{FIELD}.spans has ({first}, {end}), and the prompt has {len(tokens)} tokens."
                )
        if not (self.roles or self.texts):
            return spans
        prompt = PromptText.of(tokenizer, tokens)
        texts = [message for message in messages if isinstance(message.get("content"), str)]
        matches = [
            *of_roles(self.roles, texts, prompt.text, self.required),
            *of_texts(self.texts, prompt.text, self.required),
        ]
        return joined((*spans, *prompt.positions(matches)))


NO_PINS = PinRequest()
