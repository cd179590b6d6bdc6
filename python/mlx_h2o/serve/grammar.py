"""Answers of a required form: JSON, a schema, a tool call.

llguidance (the extra `grammar`) computes which tokens may come next; it reads Hugging Face's fast
tokenizers, needs neither torch nor a GPU, and supports JSON schemas and Lark grammars. This module
turns its mask into a logits processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_h2o.serve.errors import ApiError
from mlx_h2o.serve.protocol import Body, Chat, NamedTool
from mlx_h2o.serve.tools import FAMILIES, calls_of, family_of, json_rule

#: The missing package, and how to install it.
MISSING = (
    "response_format, and tool_choice 'required' or of a name, need llguidance: pip install "
    "llguidance"
)
#: The most tool calls in one answer, if it may have several.
MAX_CALLS = 8


def grammar_of(body: Body, tokenizer: Any) -> str | None:
    """The Lark grammar of a request's answer; None if its answer is free.

    Raises:
        ValueError: The model's format of tool calls is not supported.
    """
    answer = _answer_rule(body)
    tools = body.offered_tools if isinstance(body, Chat) else None
    if tools is None:
        return None if answer is None else f"start: answer\n{answer}"
    assert isinstance(body, Chat)
    choice = body.tool_choice
    forced = choice == "required" or isinstance(choice, NamedTool)
    if not forced and answer is None:
        return None
    reader, family = family_of(tokenizer)
    if family is None:
        raise ValueError(
            "tool_choice 'required' or of a name, and response_format beside tools, are served "
            f"for models whose calls are read by {', '.join(FAMILIES)}; this one's are read by "
            f"{reader}: use tool_choice 'auto', without response_format."
        )
    name = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    several = body.parallel_tool_calls is not False and name is None
    calls = calls_of(family, functions, MAX_CALLS if several else 1, tokenizer)
    if forced:
        return f"start: calls\n{calls}"
    return f"start: answer | calls\n{answer}{calls}"


def _answer_rule(body: Body) -> str | None:
    """The rule `answer` of a response_format; None means anything."""
    format_ = body.response_format
    if format_ is None or format_.type == "text":
        return None
    schema = format_.json_schema.schema_ if format_.json_schema else {"type": "object"}
    return f"answer: {json_rule(schema)}\n"


class GrammarCompiler:
    """llguidance for one model's tokenizer; for the thread that generates.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._own: Any = None

    def processor(self, grammar: str, reasons: bool) -> GrammarProcessor:
        """The logits processor of one answer.

        Args:
            grammar: The grammar in Lark's syntax.
            reasons: Whether the prompt has opened the model's reasoning, which has no required
                form.

        Raises:
            ApiError: llguidance is missing.
            ValueError: The grammar is invalid, or llguidance cannot read such a tokenizer.
        """
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ApiError(501, MISSING) from error
        if self._own is None:
            inner = getattr(self._tokenizer, "_tokenizer", self._tokenizer)
            self._own = from_tokenizer(inner, eos_token=sorted(self._tokenizer.eos_token_ids))
        lark = LLMatcher.grammar_from_lark(grammar)
        problem = LLMatcher.validate_grammar(lark, self._own)
        if problem and not problem.startswith("WARNING"):
            raise ValueError(f"The form of the answer is invalid: {problem.strip()}")
        ends = list(map(int, self._tokenizer.eos_token_ids))
        until = tuple(self._tokenizer.think_end_tokens or ()) if reasons else ()
        return GrammarProcessor(LLMatcher(self._own, lark), ends, until)


class GrammarProcessor:
    """A logits processor that lets through only the tokens that a grammar allows next.

    Args:
        matcher: llguidance's matcher at the grammar's beginning.
        ends: Tokens that end an answer.
        until: Tokens after which the grammar begins; if empty, it begins with the answer.
    """

    def __init__(self, matcher: Any, ends: Sequence[int], until: Sequence[int]):
        self._matcher, self._ends, self._until = matcher, list(ends), list(until)
        self._read: int | None = None
        self._free: list[int] = []  # the last tokens before the grammar begins

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits of shape (1, V) with -inf for tokens that are not allowed.

        Args:
            tokens: Tokens of prompt and answer so far, (T,).
            logits: Logits of the next token.
        """
        if self._read is None:  # all tokens are the prompt's
            self._read = tokens.size
        elif tokens.size < self._read:  # a sequence is computed again
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
