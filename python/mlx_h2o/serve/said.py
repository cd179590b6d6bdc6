"""A conversation's messages, recovered from the text that its caches were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.server import convert_chat

Message = dict[str, str]
Render = Callable[[list[Message]], str]

# Placeholders for messages in a rendering, which shows the template's text around them. They are
# from a private area of Unicode: no template has them.
TOLD, ASKED, ANSWERED = "\ue000", "\ue001", "\ue002"
#: The most characters before a chat template's text: a token that begins every text.
MOST_BEFORE = 40


def render_with(tokenizer: Any) -> Render:
    """The function by which the server renders messages as a prompt's text."""
    if not tokenizer.has_chat_template:
        return convert_chat
    return lambda messages: str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    )


def messages_of(render: Render, text: str) -> list[Message] | None:
    """The messages of a conversation; None if its text was not rendered from messages.

    Args:
        render: The server's rendering; a template that raises gives no messages.
        text: The whole text that was read and said, marks of the template included.
    """
    user, answer = _message("user", ASKED), _message("assistant", ANSWERED)
    try:
        turns = render([user, answer, user])
        begin, rest = turns.split(ASKED, 1)
        to_answer, rest = rest.split(ANSWERED, 1)
        to_ask = rest.split(ASKED, 1)[0]
    except Exception:  # templates raise errors of many kinds
        return None
    to_answer, begin = to_answer.rstrip(), begin.rstrip()
    messages: list[Message] = []
    at = text.find(begin) if begin.strip() else 0
    at = at if 0 <= at <= MOST_BEFORE else MOST_BEFORE + 1
    # A template's default system prompt is no message: it begins the text either way.
    if (told := _system(render, text)) is not None and told[0] < at:
        messages.append(told[1])
        rest = told[2]
    elif at <= MOST_BEFORE:
        rest = text[at + len(begin) :]
    else:
        return None
    if not (to_answer.strip() and to_ask.strip()):
        return None
    while rest:
        asked, found, rest = rest.partition(to_answer)
        messages.append(_message("user", asked.strip()))
        if not found:
            break
        said, _, rest = rest.partition(to_ask.rstrip())
        messages.append(_message("assistant", _without_end(said, to_ask).strip()))
    return messages if messages and messages[-1]["role"] == "assistant" else None


def _system(render: Render, text: str) -> tuple[int, Message, str] | None:
    """Where the template's text before a system prompt begins; the prompt; the text after it."""
    try:
        told = render([_message("system", TOLD), _message("user", ASKED)])
        head, rest = told.split(TOLD, 1)
        behind = rest.split(ASKED, 1)[0].rstrip()
    except Exception:  # as above
        return None
    at = text.find(head)
    if not (0 <= at <= MOST_BEFORE and behind.strip()):
        return None
    content, found, rest = text[at + len(head) :].partition(behind)
    return (at, _message("system", content), rest) if found else None


def _without_end(said: str, to_ask: str) -> str:
    """An answer without its end mark, which begins the template's text after an answer."""
    for length in range(len(to_ask), 0, -1):
        if said.endswith(to_ask[:length]) and to_ask[:length].strip():
            return said[:-length]
    return said


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
