"""Messages come back out of a conversation's text, whatever the template puts around them."""

import jinja2
import pytest
from mlx_lm.server import convert_chat

from mlx_h2o.serve.said import messages_of

CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
STRICT = "{% if messages[0].role == 'system' %}{{ no_system() }}{% endif %}" + LLAMA3


def by(template):
    return lambda messages: jinja2.Template(template).render(messages=messages)


def said(*contents, system=None):
    roles = [("user", "assistant")[i % 2] for i in range(len(contents))]
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
    return ([{"role": "system", "content": system}] if system else []) + turns


@pytest.mark.parametrize(
    ("render", "end"),
    [(by(CHATML), "<|im_end|>"), (by(CHATML), ""), (by(LLAMA3), "<|eot_id|>"), (convert_chat, "")],
)
@pytest.mark.parametrize("system", [None, "Be short.\nAnd kind."])
def test_messages_come_back(render, end, system):
    wanted = said("Who?", "Ada\nHill.", "When: 4711?", "In spring.", system=system)
    text = render(wanted[:-1]) + f" {wanted[-1]['content']}{end}"
    assert messages_of(render, text) == wanted
    assert messages_of(render, f"<s>{text}") == wanted


def test_a_text_that_is_no_chat_has_no_messages():
    assert messages_of(by(CHATML), "It was a cold day.") is None
    assert messages_of(convert_chat, "It was a cold day.") is None
    assert messages_of(by(STRICT), by(CHATML)(said("Who?"))) is None
    assert messages_of(by("{{ messages[0].content }}"), "Anne") is None
    assert messages_of(by(CHATML), by(CHATML)(said("Who?")).split("?")[0]) is None
