"""A conversation with a model in bounded memory, which reads only the new tokens of each turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_h2o._progress import Progress, no_progress
from mlx_h2o.caches.conversation import bounded_entries, new_turn, past_training, pin, unpin
from mlx_h2o.caches.describe import describe
from mlx_h2o.caches.files import load_prompt_cache, save_prompt_cache
from mlx_h2o.caches.peak import PeakMemory
from mlx_h2o.chat.pin_rules import PinRules, spans_for
from mlx_h2o.chat.retention import token_texts, tokens_by_layer
from mlx_h2o.compression.reading import Readings, read_and_generate
from mlx_h2o.layer.pins_and_turns import PinAnswer, checked_carry
from mlx_h2o.loading.fingerprint import fingerprint, model_metadata, require_model
from mlx_h2o.slots.pins import Span

#: Name of the metadata entry that lists the tokens read.
TOKENS = "mlx-h2o dialogue"
#: Stands for a token of the chat template in the text of a conversation.
MARK = "\0"
#: A role that the template names, its other tokens, and words with the white space before them.
PIECES = re.compile(r"\0\s*\0?(?P<role>[a-z]+)(?:\n|\0\s*)|\0\s*|(?P<word>\s*[^\s\0]+|\s+)")


class Dialogue:
    """The tokens of a conversation, and the caches that hold them.

    The memory goes on from the very tokens that were said, however their text would be tokenized:
    of each turn it reads the user's text and the few tokens of the chat template around it.

    Args:
        model: An mlx-lm model.
        tokenizer: Its tokenizer; without a chat template texts are read as they are.
        make_cache: Makes the caches of a new conversation.
        system: The system prompt, if any.
        rules: The rules that pin parts of each turn as it comes; roles and texts must be in the
            first turn that has them.
        carry: How much of the past counts in each new turn (`layer/pins_and_turns.py`).
        reading: How long turns are read (`compression/reading.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        make_cache: Callable[[], list[Any]],
        system: str | None = None,
        rules: PinRules | None = None,
        carry: float | str = 1.0,
        reading: Readings = "once",
    ):
        if system is not None and not tokenizer.has_chat_template:
            raise ValueError("This model has no chat template, and so no system prompt.")
        self._model, self._tokenizer, self._make_cache = model, tokenizer, make_cache
        self._system, self._rules, self._carry = system, rules or PinRules(), carry
        self._reading: Readings = reading
        self.clear()

    def clear(self) -> None:
        """Forget everything said."""
        self.cache = self._make_cache()
        #: The tokens that the caches have read, by position.
        self.tokens: list[int] = []
        # Tokens that the model said, and that the caches have not read.
        self._pending: list[int] = []
        # The most bytes while the last turn was read.
        self._peak: int | None = None

    # -- turns ------------------------------------------------------------------------------------

    def reply(
        self, text: str, max_tokens: int, progress: Progress = no_progress, **options: Any
    ) -> Generator[Any, None, None]:
        """Read the user's text; yield the reply as mlx-lm's `stream_generate` does.

        Args:
            text: The user's text.
            max_tokens: The most tokens of the reply.
            progress: Called with the tokens read so far, and all of them.
            options: Other options of `stream_generate`.
        """
        begun = bool(self.tokens)
        messages = self._messages(text)
        new = [*self._pending, *self._new_tokens(text)]
        if begun:
            new_turn(self.cache, self._carry)
        self._pin_by_rules(new, messages)
        answer: list[int] = []
        reading = PeakMemory(describe(self.cache).nbytes)
        try:
            how = self.cache, self._reading, progress
            responses, _ = read_and_generate(
                self._model, self._tokenizer, new, *how, max_tokens=max_tokens, **options
            )
            for response in responses:
                if not answer:
                    self._peak = reading.most
                answer.append(response.token)
                yield response
        finally:
            # The caller may stop in between; the caches know how far they are.
            whole = [*self.tokens, *new, *answer]
            read = bounded_entries(self.cache)[0].offset
            self.tokens, self._pending = whole[:read], whole[read:]

    def _messages(self, text: str) -> list[dict[str, str]]:
        """The messages of a turn, as the chat template takes them."""
        first = [{"role": "system", "content": self._system}] if self._system else []
        return [*(first if not self.tokens else []), {"role": "user", "content": text}]

    def _new_tokens(self, text: str) -> list[int]:
        """The tokens of a turn that the caches do not hold yet."""
        tokenizer = self._tokenizer
        if not tokenizer.has_chat_template:
            tokens: list[int] = tokenizer.encode(text, add_special_tokens=not self.tokens)
            return tokens
        if not self.tokens:
            return _rendered(tokenizer, self._messages(text))
        # The template's tokens after a reply, whatever the reply is: where two conversations with
        # different replies agree again.
        question = {"role": "user", "content": "?"}
        turn = {"role": "user", "content": text}
        both = [
            _rendered(tokenizer, [question, {"role": "assistant", "content": word}, turn])
            for word in ("yes", "no")
        ]
        same = 0
        while same < min(map(len, both)) and both[0][-1 - same] == both[1][-1 - same]:
            same += 1
        following = both[0][len(both[0]) - same :]
        # The model ended its reply with the token by which the template goes on, and a document in
        # the template with more of them.
        ends = [*self.tokens, *self._pending]
        lengths = range(len(following), 0, -1)
        overlap = next((n for n in lengths if ends[-n:] == following[:n]), 0)
        return following[overlap:]

    def begin_turn(self, carry: float | str) -> None:
        """Set how much of the past counts from here on: a number from 0 to 1, also as text, or
        "reset".

        Raises:
            ValueError: `carry` is invalid.
        """
        new_turn(self.cache, checked_carry(carry))

    # -- pins -------------------------------------------------------------------------------------

    def _pin_by_rules(self, new: Sequence[int], messages: Sequence[Mapping[str, str]]) -> None:
        """Pin the parts of a turn's tokens that the rules match."""
        rules = self._rules
        if self.tokens:  # Roles and texts are required only once.
            rules = PinRules(patterns=rules.patterns, predicate=rules.predicate)
        if rules:
            self._pin(spans_for(rules, self._tokenizer, new, messages, len(self.tokens)))

    def pin(self, text: str) -> PinAnswer:
        """Pin a text of the conversation so far, wherever it occurs.

        Raises:
            ValueError: The text was not said, or there is no room.
        """
        return self._pin(spans_for(PinRules(texts=(text,)), self._tokenizer, self.tokens))

    def _pin(self, spans: Sequence[Span]) -> PinAnswer:
        return pin(self.cache, spans) if spans else PinAnswer()

    def unpin(self) -> None:
        """Unpin all pinned tokens; they are evicted like any others."""
        unpin(self.cache)

    @property
    def pinned_texts(self) -> list[str]:
        """The pinned texts, in order; pins on tokens still to come have no text."""
        pins = bounded_entries(self.cache)[0].pins
        return [self._tokenizer.decode(self.tokens[first:end]) for first, end in pins]

    # -- contents ---------------------------------------------------------------------------------

    def retention(self) -> list[tuple[str, float]]:
        """Each token's text, and the share of all KV heads that hold it."""
        layers = tokens_by_layer(self.cache, len(self.tokens))
        heads = sum(layer.heads for layer in layers)
        holding = sum((layer.holders for layer in layers), np.zeros(len(self.tokens)))
        shares = (holding / max(heads, 1)).tolist()
        return list(zip(token_texts(self._tokenizer, self.tokens), shares, strict=True))

    def words(self) -> list[tuple[str, float]]:
        """The words of the conversation, each with the share of all KV heads that hold its tokens.

        Of the chat template only each turn's role is left, on a line of its own.
        """
        special = special_ids(self._tokenizer)
        text, shares = "", list[float]()
        for token, (part, share) in zip(self.tokens, self.retention(), strict=True):
            part = MARK if token in special else part.replace(MARK, "")
            text += part
            shares += [share] * len(part)
        words: list[tuple[str, float]] = []
        for match in PIECES.finditer(text):
            if role := match["role"]:
                words.append((f"{chr(10) if words else ''}{role}: ", 1.0))
            elif word := match["word"]:
                of = shares[match.start() : match.end()]
                words.append((word, sum(of) / len(of)))
        return words

    @property
    def memory(self) -> str:
        """The line of `describe` about the memory."""
        return describe(self.cache, self._peak).memory

    def status(self) -> dict[str, int]:
        """Tokens, evictions and pinned tokens."""
        layers = bounded_entries(self.cache)
        return {
            "tokens": len(self.tokens),
            "evicted": sum(layer.evicted for layer in layers) // len(layers),
            "pinned": sum(end - first for first, end in layers[0].pins),
        }

    def past_training(self) -> str | None:
        """What to say where the conversation is longer than what the model was trained for."""
        return past_training(self._model, self.cache)

    # -- files ------------------------------------------------------------------------------------

    @cached_property
    def _fingerprint(self) -> str:
        """The digest of model and tokenizer."""
        return fingerprint(self._model, self._tokenizer)

    def save(self, path: str | Path, model: str) -> None:
        """Write the conversation's memory.

        Raises:
            ValueError: Nothing was said yet, or a cache cannot be saved.
            OSError: The file cannot be written.
        """
        if not self.tokens:
            raise ValueError("There is nothing to save yet.")
        mx.eval([entry.state for entry in self.cache])
        about = model_metadata(model, self._fingerprint)
        save_prompt_cache(path, self.cache, about | conversation(self.tokens, self._pending))

    def load(self, path: str | Path, model: str) -> None:
        """Continue a conversation that `save` wrote, instead of this one.

        Raises:
            ValueError: The file is damaged, or another model's; this conversation is unchanged.
        """
        cache, metadata = load_prompt_cache(path, return_metadata=True)
        assert isinstance(metadata, dict)
        if TOKENS not in metadata:
            raise ValueError(f"{path} holds no conversation of mlx_h2o chat.")
        require_model(metadata, self._fingerprint, model, path)
        try:
            state = json.loads(metadata[TOKENS])
            tokens, pending = [[int(t) for t in state[name]] for name in ("tokens", "pending")]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {error!r}.") from error
        if len(tokens) != bounded_entries(list(cache))[0].offset or len(cache) != len(self.cache):
            raise ValueError(f"{path} is damaged: its tokens are not those that it holds.")
        self.cache, self.tokens, self._pending = list(cache), tokens, pending


def conversation(tokens: Sequence[int], pending: Sequence[int] = ()) -> dict[str, str]:
    """The metadata by which a file of caches is a conversation, in Python and in Swift.

    Args:
        tokens: What the caches have read, by position.
        pending: What was said after that, and not read.
    """
    return {TOKENS: json.dumps({"tokens": list(tokens), "pending": list(pending)})}


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that are not text: those of the chat template, and the end tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if token.special}
    return special | set(getattr(tokenizer, "all_special_ids", ()))


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A conversation in the chat template, up to the point where the model is to speak."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens
