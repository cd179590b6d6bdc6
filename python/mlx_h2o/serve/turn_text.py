"""A turn as text: its prompt, its answer, and the beginning of the next turn's prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.server import Response, TextStateMachine, convert_chat

from mlx_h2o.serve.stop_texts import StopFinder, ends_of

#: A character that no template and no client uses: it marks an answer's place in a chat.
MARK = "\ue0f3"

Messages = list[dict[str, Any]]


@dataclass(eq=False)
class TurnText:
    """A request's text, and its conversation's text once it is answered.

    Attributes:
        text: The prompt's text.
        tokens: The prompt's tokens, as they are read.
        messages: The chat's messages; empty if it is no chat.
        render: Renders messages as a prompt's text.
        tokenizer: The model's tokenizer.
        stops: Texts that end the answer.
    """

    text: str
    tokens: list[int]
    messages: Messages
    render: Callable[[Messages], str]
    tokenizer: Any
    stops: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        request: Any,
        args: Any,
        template_args: dict[str, Any],
        tokens: list[int],
    ) -> TurnText:
        """The text of a request, after mlx-lm has tokenized it.

        Args:
            tokenizer: The model's tokenizer.
            request: mlx-lm's request.
            args: mlx-lm's arguments of the generation.
            template_args: The chat template's arguments from the command line.
            tokens: The prompt's tokens.
        """

        def render(messages: Messages) -> str:
            if not tokenizer.has_chat_template:
                return str(convert_chat(messages, request.role_mapping))
            given = template_args | (args.chat_template_kwargs or {})
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=request.tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **given,
                )
            )

        chat = request.request_type == "chat"
        messages = list(request.messages) if chat else []
        text = render(messages) if chat else request.prompt
        return cls(text, tokens, messages, render, tokenizer, tuple(args.stop_words))

    def goes_on_from(self, characters: int, said: Sequence[int]) -> list[int]:
        """The prompt's tokens; its beginning, a known conversation, keeps the tokens of that.

        Args:
            characters: The characters of the prompt that the conversation covers.
            said: The conversation's tokens.
        """
        return [*said, *self._after(characters)]

    def _after(self, characters: int) -> list[int]:
        """The tokens of the text after `characters` characters.

        They are the whole prompt's tokens if one begins there, since some tokenizers begin every
        text with a space.
        """
        inner = getattr(self.tokenizer, "_tokenizer", self.tokenizer)
        try:
            whole = inner(self.text, add_special_tokens=False, return_offsets_mapping=True)
            ids, starts = whole["input_ids"], [start for start, _ in whole["offset_mapping"]]
            if characters in starts and list(self.tokens[-len(ids) :]) == list(ids):
                return list(ids[starts.index(characters) :])
        except (NotImplementedError, TypeError, ValueError, KeyError):
            pass  # a tokenizer that does not report the places of tokens
        rest = self.text[characters:]
        return list(self.tokenizer.encode(rest, add_special_tokens=False)) if rest else []

    def beyond(self, tokens: Sequence[int]) -> int:
        """The number of last tokens that produce no text for the client.

        Args:
            tokens: The tokens of the prompt and the answer.
        """
        answer = tokens[len(self.tokens) :]
        text, ends = ends_of(self.tokenizer, answer)
        if self.stops:
            finder = StopFinder(self.stops)
            if finder.found(text):
                return len(answer) - ends.before(finder.sure(text))
        # In a chat the template writes it too; in the middle of a text to complete there is none.
        ended = bool(answer) and answer[-1] in self.tokenizer.eos_token_ids
        return int(ended and not self.messages)

    def told(self, tokens: Sequence[int], cut: bool = False) -> str:
        """The part of the answer's text that the client is sent.

        Args:
            tokens: The tokens of the prompt and the answer.
            cut: Whether the answer ended before it had its most tokens.
        """
        text = ends_of(self.tokenizer, tokens[len(self.tokens) :], cut)[0]
        if self.stops:
            finder = StopFinder(self.stops)
            if finder.found(text):
                return text[: finder.sure(text)]
        return text

    def continued(
        self, tokens: Sequence[int], content: str, cut: bool = False
    ) -> tuple[list[str], bool]:
        """The beginnings of texts that continue this turn.

        Args:
            tokens: The tokens of the prompt and the answer, as caches hold them.
            content: The answer as its client got it, without thoughts and tool calls.
            cut: Whether it ended before it had its most tokens.

        Returns:
            Beginnings of texts that these tokens stand for, and whether the prompt of a client that
            sends back its answer begins with one of them.
        """
        said = self.told(tokens, cut)
        answer = [t for t in tokens[len(self.tokens) :] if t not in self.tokenizer.eos_token_ids]
        texts = [self.text + said]
        # mlx-lm removes an answer's first space; a client may put it back.
        whole = str(self.tokenizer.decode(answer)) if answer else ""
        if whole.lstrip().startswith(said.lstrip()):
            spaces = whole[: len(whole) - len(whole.lstrip())]
            texts.append(self.text + spaces + said.lstrip())
        if not self.messages:
            return list(dict.fromkeys(texts)), True
        rendered = self._rendered(tokens, said, content)
        texts += [rendered] if rendered is not None else []
        return list(dict.fromkeys(texts)), rendered is not None

    def _rendered(self, tokens: Sequence[int], said: str, content: str) -> str | None:
        """The beginning of the chat's next prompt; None if its text is not that of the tokens."""

        def with_answer(content: str) -> str:
            more = [{"role": "assistant", "content": content}, {"role": "user", "content": MARK}]
            return self.render([*self.messages, *more])

        try:
            whole = with_answer(content)
            marked = with_answer(MARK + content)
        except Exception:  # a template may raise any error for input that it does not support
            return None
        pairs = enumerate(zip(whole, marked, strict=False))
        before = whole[: next((i for i, (a, b) in pairs if a != b), len(whole))]
        if before.rstrip() != self.text.rstrip():
            return None
        parts = (said, said.lstrip(), said.rstrip(), said.strip())
        part = next((p for p in parts if whole.startswith(p, len(before))), None)
        if part is None:
            return None
        end = len(before) + len(part)
        if tokens[-1] in self.tokenizer.eos_token_ids and len(tokens) > len(self.tokens):
            mark = str(self.tokenizer.decode([tokens[-1]]))
            spaces = len(whole[end:]) - len(whole[end:].lstrip())
            if mark and whole.startswith(mark, end + spaces):
                end += spaces + len(mark)
        return whole[:end]


def respelled(tokenized: Any, now: list[int]) -> Any:
    """mlx-lm's tokenized prompt, with other tokens of the same text.

    Args:
        tokenized: The prompt, its segments, their kinds, and more.
        now: The new tokens.
    """
    prompt, segments, kinds, *more = tokenized
    if now == prompt:
        return tokenized
    return (now, *segments_of(prompt, segments, kinds, now), *more)


def segments_of(
    before: Sequence[int], segments: Sequence[Sequence[int]], kinds: Sequence[str], now: list[int]
) -> tuple[list[list[int]], list[str]]:
    """A prompt's segments after its tokens have changed: those whose borders still exist.

    Args:
        before: The prompt as mlx-lm tokenized it.
        segments: The prompt's parts.
        kinds: The kinds of the parts.
        now: The prompt's new tokens.
    """
    ends, end = list[int](), 0
    for segment in segments[:-1]:
        end += len(segment)
        after = len(now) - (len(before) - end)
        same_end = after > 0 and list(before[end:]) == now[after:]
        same_start = list(before[:end]) == now[:end]
        ends.append(end if same_start else after if same_end else 0)
    borders = [0]
    kept = list[str]()
    for end, kind in zip(ends, kinds, strict=False):
        if borders[-1] < end < len(now):
            borders.append(end)
            kept.append(kind)
    parts = [now[a:b] for a, b in zip(borders, [*borders[1:], len(now)], strict=True)]
    return parts, [*kept, kinds[-1]]


@dataclass(eq=False)
class Content:
    """An answer's text as clients get it: without thoughts, tool calls and their marks.

    Attributes:
        machine: mlx-lm's state machine, which tells them apart.
        initial: The machine's state at the answer's beginning.
    """

    machine: TextStateMachine
    initial: str
    text: str = ""
    _state: Any = field(init=False)

    def __post_init__(self) -> None:
        self._state = self.machine.make_state(self.initial)

    def add(self, response: Response) -> None:
        """Take a response's text."""
        self._state, segments = TextStateMachine.split(self._state, response.text)
        if response.finish_reason is not None:
            self._state, rest, state = TextStateMachine.flush(self._state)
            segments.append((state, rest))
        self.text += "".join(text for state, text in segments if state == "normal")
