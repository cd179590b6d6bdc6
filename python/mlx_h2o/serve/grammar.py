"""Answers of a required form: JSON, a schema, a tool call, a regular expression, a grammar.

llguidance (the extra `grammar`) computes which tokens may come next; it reads Hugging Face's fast
tokenizers, needs neither torch nor a GPU, and supports JSON schemas, regular expressions and Lark
grammars. This module turns its mask into a logits processor, which mlx-lm's batches and its
generation of one sequence both take.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_h2o.serve.tool_forms import FAMILIES, calls_of, family_of, json_rule

#: The missing package, and how to install it.
MISSING = (
    "response_format, and tool_choice 'required' or of a name, need llguidance: pip install "
    "'mlx-h2o[grammar]'."
)
#: The most tool calls in one answer, if it may have several.
MOST_CALLS = 8


class NotInstalled(Exception):
    """llguidance is not installed."""


@dataclass(frozen=True)
class Form:
    """The form required of an answer.

    Attributes:
        lark: A grammar in Lark's syntax, as llguidance takes it.
    """

    lark: str


def form_of(
    response_format: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    several: bool,
    tokenizer: Any,
) -> Form | None:
    """The form that a request requires; None if its answer is free.

    Args:
        response_format: The request's field, checked.
        tools: The request's field, checked.
        tool_choice: The request's field: "auto", "none", "required" or a tool by its name.
        several: Whether one answer may call several tools.
        tokenizer: The model's tokenizer.

    Raises:
        ValueError: The model's format of tool calls is not supported.
    """
    answer = _answer_of(response_format)
    forced = tools is not None and tool_choice not in (None, "auto", "none")
    if not forced and (answer is None or not tools or tool_choice == "none"):
        return None if answer is None else Form(f"start: answer\n{answer}")
    assert tools is not None
    reads, family = family_of(tokenizer)
    if family is None:
        raise ValueError(
            "tool_choice 'required' or of a name, and response_format beside tools, are served "
            f"for models whose calls are read by {', '.join(FAMILIES)}; this one's are read by "
            f"{reads}: use tool_choice 'auto', without response_format."
        )
    name = tool_choice["function"]["name"] if isinstance(tool_choice, Mapping) else None
    wanted = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    most = MOST_CALLS if several and name is None else 1
    calls = calls_of(family, wanted, most, tokenizer)
    if forced:
        return Form(f"start: calls\n{calls}")
    return Form(f"start: answer | calls\n{answer}{calls}")


def _answer_of(asked: Mapping[str, Any] | None) -> str | None:
    """The rule `answer` of a response_format; None means anything."""
    kind = asked["type"] if asked else "text"
    assert asked is not None or kind == "text"
    match kind:
        case "json_object":
            return f"answer: {json_rule({'type': 'object'})}\n"
        case "json_schema":
            assert asked is not None
            return f"answer: {json_rule(asked['json_schema']['schema'])}\n"
        case _:
            return None


class Grammars:
    """llguidance's tokenizer for one model, made at first use."""

    def __init__(self) -> None:
        self._made: Any = None
        self._making = threading.Lock()

    def tokenizer(self, tokenizer: Any) -> Any:
        """The model's tokenizer in llguidance's form.

        Raises:
            NotInstalled: llguidance is missing.
            ValueError: llguidance cannot read such a tokenizer.
        """
        with self._making:
            if self._made is None:
                try:
                    from llguidance.hf import from_tokenizer
                except ImportError as error:
                    raise NotInstalled(MISSING) from error
                ends = sorted(tokenizer.eos_token_ids)
                inner = getattr(tokenizer, "_tokenizer", tokenizer)
                self._made = from_tokenizer(inner, eos_token=ends)
            return self._made

    def check(self, form: Form) -> None:
        """Raise ValueError for an invalid form; call `tokenizer` before."""
        from llguidance import LLMatcher

        wrong = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(form.lark), self._made)
        if wrong and not wrong.startswith("WARNING"):
            raise ValueError(f"The form of the answer is invalid: {wrong.strip()}")

    def processor(self, form: Form, tokenizer: Any, reasons: bool) -> Constrained:
        """The logits processor of one request.

        Args:
            form: The form of its answer.
            tokenizer: The model's tokenizer.
            reasons: Whether the prompt has opened the model's reasoning, which has no required
                form.
        """
        from llguidance import LLMatcher

        own = self.tokenizer(tokenizer)
        matcher = LLMatcher(own, LLMatcher.grammar_from_lark(form.lark))
        ends = list(map(int, tokenizer.eos_token_ids))
        until = tuple(tokenizer.think_end_tokens or ()) if reasons else ()
        return Constrained(matcher, ends, until)


class Constrained:
    """A logits processor that lets through only the tokens that a form allows next.

    Args:
        matcher: llguidance's matcher at the form's beginning.
        ends: Tokens that end an answer.
        until: Tokens after which the form begins; if empty, it begins with the answer.
    """

    def __init__(self, matcher: Any, ends: Sequence[int], until: Sequence[int]):
        self._matcher, self._ends, self._until = matcher, list(ends), list(until)
        self._read: int | None = None
        self._free: list[int] = []  # the last tokens before the form begins

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits of shape (1, V) with -inf for tokens that are not allowed.

        Args:
            tokens: Tokens of prompt and answer so far, (T,).
            logits: Logits of the next token.
        """
        if self._read is None:  # all tokens are the prompt's
            self._read = tokens.size
        elif tokens.size < self._read:  # a step is repeated
            self._matcher.rollback(self._read - tokens.size)
        new: Any = tokens[self._read :].tolist()
        for token in new:
            self._take(token)
        self._read = tokens.size
        if self._until:
            return logits
        V = logits.shape[-1]
        allowed = np.zeros(V, bool)
        if not (self._matcher.is_error() or self._matcher.is_stopped()):
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[:V]
            allowed[: len(bits)] = bits.astype(bool)
        if not allowed.any():
            # Complete, or more than llguidance can follow: only this answer ends.
            allowed[self._ends] = True
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _take(self, token: int) -> None:
        if not self._until:
            self._matcher.consume_token(token)
            return
        self._free = [*self._free, token][-len(self._until) :]
        if self._free == self._until:
            self._until = []
