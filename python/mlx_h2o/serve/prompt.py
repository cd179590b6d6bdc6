"""A request's prompt as text and tokens, and the texts with which a next turn may begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import convert_chat

from mlx_h2o.serve.answer import AnswerText
from mlx_h2o.serve.protocol import Body, Chat

#: A character that no template and no client uses: it marks a place in a rendered chat.
MARK = "\ue0f3"
#: Tokens at a prompt's end within which a template may open a thought.
TAIL = 11

Messages = list[dict[str, Any]]


@dataclass(eq=False)
class Prompt:
    """A prompt.

    Attributes:
        text: The prompt's text, as the client or the chat template wrote it.
        tokens: The prompt's tokens, as they are read.
        messages: The chat's messages; empty if it is no chat.
        render: Renders messages as a prompt's text.
        tokenizer: The model's tokenizer.
        state: The state of the answer at its beginning: "normal", or "reasoning".
        system: The number of first tokens that only the system prompt decides; 0 if none.
        tail: The number of tokens before the thought that the template has opened at the end.
        continues: Whether the answer goes on with the last message.
        spelling: The text of an earlier conversation that the prompt begins with, and the number
            of the tokens that it takes from it; None if it begins with none.
    """

    text: str
    tokens: list[int]
    messages: Messages
    render: Callable[[Messages], str]
    tokenizer: Any
    state: str = "normal"
    system: int = 0
    tail: int = 0
    continues: bool = False
    spelling: tuple[str, int] | None = None

    @classmethod
    def of(cls, tokenizer: Any, body: Body) -> Prompt:
        """The prompt of a request.

        Raises:
            ValueError: It is empty, or the chat template refuses its messages.
        """
        if not isinstance(body, Chat):
            tokens = list(tokenizer.encode(body.prompt)) if body.prompt else []
            prompt = cls(body.prompt, tokens, [], lambda _: "", tokenizer)
        else:
            prompt = cls._of_chat(tokenizer, body)
            prompt.continues = bool(body.continue_final_message)
        if not prompt.tokens:
            raise ValueError("The prompt is empty.")
        prompt.tail = prompt.tail or len(prompt.tokens)
        return prompt

    @classmethod
    def _of_chat(cls, tokenizer: Any, body: Chat) -> Prompt:
        messages = [message.for_template() for message in body.messages]
        tools, arguments = body.offered_tools, body.template_arguments()

        def render(messages: Messages, opens: bool = True) -> str:
            return rendered(tokenizer, messages, tools, arguments, opens)

        try:
            text = (
                _unfinished(messages, render) if body.continue_final_message else render(messages)
            )
        except Exception as error:  # a template may raise any error for what it does not support
            raise ValueError(f"The chat template refuses these messages: {error}") from error
        if not tokenizer.has_chat_template:
            return cls(text, list(tokenizer.encode(text)), messages, render, tokenizer)
        tokens = list(tokenizer.encode(text, add_special_tokens=False))
        prompt = cls(text, tokens, messages, render, tokenizer)
        prompt._look_for_thoughts()
        prompt._look_for_system(render)
        return prompt

    def _look_for_thoughts(self) -> None:
        """Set the state at the end, and where the next turn's prompt no longer has the thought."""
        tokenizer, tokens = self.tokenizer, self.tokens
        if tokenizer.has_thinking:
            start, end = tokenizer.rfind_think_start(tokens), tokenizer.rfind_think_end(tokens)
            self.state = "reasoning" if start > end else "normal"
            self.tail = start if start >= len(tokens) - TAIL else 0
        self.state = tokenizer.response_initial_state or self.state

    def _look_for_system(self, render: Callable[..., str]) -> None:
        """Set the number of tokens that the system prompt decides, which chats may share."""
        count = next((i for i, m in enumerate(self.messages) if m["role"] != "system"), 0)
        if not count:
            return
        try:
            other = [*self.messages[:count], {"role": "user", "content": MARK}]
            text = common_text(render(other, False), self.text)
        except Exception:  # as above; the prompt itself is fine
            return
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        # The last token may be another one before other text.
        self.system = max(_common(tokens, self.tokens) - 1, 0)

    # -- the tokens of an earlier conversation ----------------------------------------------------

    def spelled_from(self, count: int, earlier: Sequence[int]) -> list[int] | None:
        """The prompt's tokens, of which the first are a conversation's own.

        Args:
            count: The characters of the prompt that the conversation spells.
            earlier: The conversation's tokens.

        Returns:
            None if no token of the prompt's own begins there: with another token before it the
            rest would be read in another way than by itself.
        """
        inner = getattr(self.tokenizer, "_tokenizer", self.tokenizer)
        rest = self.text[count:]
        if not rest:
            return [*earlier]
        try:
            whole = inner(self.text, add_special_tokens=False, return_offsets_mapping=True)
            ids, starts = whole["input_ids"], [start for start, _ in whole["offset_mapping"]]
        except (NotImplementedError, TypeError, ValueError, KeyError):
            # A tokenizer that does not report the places of tokens.
            return [*earlier, *self.tokenizer.encode(rest, add_special_tokens=False)]
        if count not in starts:
            return None
        return [*earlier, *ids[starts.index(count) :]]

    def answered(self, content: str) -> Messages:
        """The chat's messages with an answer, or with the last message and how it goes on."""
        if not self.continues:
            return [*self.messages, {"role": "assistant", "content": content}]
        last = self.messages[-1]
        return [*self.messages[:-1], last | {"content": last["content"] + content}]

    def continuations(self, answer: AnswerText, ends: bool) -> list[tuple[str, int]]:
        """Beginnings of prompts that go on from this turn, with the tokens that spell them.

        A text is here only if it is exactly what so many tokens spell, except for the spaces that a
        chat template writes around an answer, or strips from it.

        Args:
            answer: The answer's text.
            ends: Whether an end token follows the text's tokens.

        Returns:
            Texts, with the number of the answer's tokens; an end token counts.
        """
        count, characters = max(one for one in answer.ends if one[1] <= answer.visible)
        shown = answer.text[: answer.visible]
        if not self.messages:
            return [(self.text + shown[:characters], count)]
        rendering = self._next_turn(answer.content)
        if rendering is None:
            return []
        whole, first = rendering
        # Clients get an answer without the space before it, which may be one of several.
        parts = (shown, shown.removeprefix(" "), shown.lstrip(), shown.rstrip(), shown.strip())
        part = next((part for part in parts if whole.startswith(part, first)), None)
        if part is None:
            return []
        if characters < len(shown):
            return [(whole[: first + characters], count)] if part == shown else []
        end = first + len(part)
        texts = [(whole[:end], count)]
        if ends and count == answer.ends[-1][0]:
            end += len(whole[end:]) - len(whole[end:].lstrip())
            mark = next(
                (m for t in self.tokenizer.eos_token_ids if (m := self.tokenizer.decode([t]))
                 and whole.startswith(m, end)), None,
            )  # fmt: skip
            texts += [(whole[: end + len(mark)], count + 1)] if mark else []
        return texts

    def _next_turn(self, content: str) -> tuple[str, int] | None:
        """The next turn's prompt, and where the answer begins there.

        None if the prompt of that turn does not begin with this one: its template leaves out some
        of it, such as an opened thought.
        """

        def with_answer(content: str) -> str:
            return self.render([*self.answered(content), {"role": "user", "content": MARK}])

        try:
            whole = with_answer(content)
            first = len(common_text(whole, with_answer(MARK + content)))
        except Exception:  # a template may raise any error for what it does not support
            return None
        return (whole, first) if whole[:first].rstrip() == self.text.rstrip() else None


def rendered(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    arguments: Mapping[str, Any],
    opens: bool = True,
) -> str:
    """Messages as a prompt's text.

    Args:
        tokenizer: The model's tokenizer.
        messages: The messages, as templates take them.
        tools: The tools that are offered.
        arguments: More arguments of the template.
        opens: Whether an answer begins at the end.
    """
    if not tokenizer.has_chat_template:
        return str(convert_chat(messages))
    return str(
        tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=opens, **arguments
        )
    )


def _unfinished(messages: Messages, render: Callable[..., str]) -> str:
    """The text up to the end of the last message's content, which the answer goes on from."""
    last = messages[-1] | {"content": messages[-1]["content"] + MARK}
    text, mark, _ = render([*messages[:-1], last], False).partition(MARK)
    if not mark:
        raise ValueError("it leaves out the message that is to be continued")
    return text


def common_text(a: str, b: str) -> str:
    """The text with which both begin."""
    return a[: _common(a, b)]


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of equal items at the beginning of two sequences."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
