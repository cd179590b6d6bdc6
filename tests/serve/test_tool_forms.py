"""Calls that are required are written as each family writes them, and as mlx-lm reads them."""

import copy
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llguidance")
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AddedToken

from mlx_h2o.serve.grammar import grammar_of
from mlx_h2o.serve.protocol import Chat
from mlx_h2o.serve.tools import FAMILIES, calls_of

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
STOP = {"name": "stop"}
ARGUMENTS = {"city": "St. Ives", "days": 2, "unit": "C"}
#: A call with all arguments, as the families' chat templates write it.
WRITTEN = {
    "json_tools": '<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "St. Ives", "days": 2, "unit": "C"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nSt. Ives\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>St. Ives</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>C</arg_value>\n</tool_call>",
    "longcat": "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
    "<longcat_arg_value>St. Ives</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n"
    "<longcat_arg_value>2</longcat_arg_value>\n<longcat_arg_key>unit</longcat_arg_key>\n"
    "<longcat_arg_value>C</longcat_arg_value>\n</longcat_tool_call>",
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "St. Ives", "days": 2, "unit": "C"}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "St. Ives", "days": 2, "unit": "C"}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "pythonic": '<|tool_call_start|>[get_weather(city="St. Ives", days=2, unit="C")]'
    "<|tool_call_end|>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>St. Ives<|"|>,days:2,unit:<|"|>C<|"|>}'
    "<tool_call|>",
    "function_gemma": "<start_function_call>call:get_weather{city:<escape>St. Ives<escape>,days:2,"
    "unit:<escape>C<escape>}<end_function_call>",
}
WRITTEN["laguna"] = WRITTEN["glm47"]
TAGS = {
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
        "<|tool_call_end|>", "<|tool_calls_section_end|>",
    ],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
    "pythonic": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "json_tools": ["<tool_call>", "</tool_call>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>"],
    "glm47": [
        "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    ],
    "longcat": ["<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>"],
    "function_gemma": ["<start_function_call>", "<end_function_call>", "<escape>"],
}  # fmt: skip
TAGS["laguna"] = TAGS["glm47"]


class Writer:
    """A tokenizer and a grammar of calls.

    Args:
        embedded: Model and tokenizer.
        family: Whose calls.
        most: Calls that there may be.
        tags: Whether the family's tags are tokens: None, "special", or only "added" to the
            vocabulary, as `<tool_call>` is in Qwen's.
    """

    def __init__(self, embedded: Any, family: str, most: int = 1, tags: str | None = None):
        self.tokenizer = copy.deepcopy(embedded[1]._tokenizer)
        if tags is not None:
            special = tags == "special"
            added = [AddedToken(tag, special=special, normalized=False) for tag in TAGS[family]]
            self.tokenizer.add_tokens(added, special_tokens=special)
            if special:
                self.tokenizer.add_special_tokens({"additional_special_tokens": TAGS[family]})
        tokenizer = from_tokenizer(self.tokenizer)
        rules = calls_of(FAMILIES[family], [WEATHER, STOP], most, self.tokenizer)
        grammar = LLMatcher.grammar_from_lark(f"start: calls\n{rules}")
        self.matcher = LLMatcher(tokenizer, grammar)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def may_write(self, text: str) -> bool:
        """Whether the grammar allows a whole text, and an end after it."""
        self.matcher.reset()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        taken = self.matcher.try_consume_tokens(tokens)
        return taken == len(tokens) and self.matcher.is_accepting()


def read(family: str, text: str) -> Any:
    """What mlx-lm's parser reads between the tags that its server takes away."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{family}")
    inner = text.partition(module.tool_call_start)[2]
    if module.tool_call_end:
        inner = inner.rpartition(module.tool_call_end)[0]
    return module.parse_tool_call(inner, [{"function": WEATHER}])


def first_of(calls: Any) -> dict[str, Any]:
    return calls[0] if isinstance(calls, list) else calls


def test_all_families_are_written_here():
    assert FAMILIES.keys() == WRITTEN.keys()


@pytest.mark.parametrize("tags", [None, "special", "added"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_as_the_family_writes_it_may_be_written_and_is_read(embedded, family, tags):
    text = WRITTEN[family]
    call = first_of(read(family, text))
    assert (call["name"], call["arguments"]) == ("get_weather", ARGUMENTS)
    assert Writer(embedded, family, tags=tags).may_write(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_no_tool_takes_cannot_be_written(embedded, family):
    writer, right = Writer(embedded, family), WRITTEN[family]
    assert not writer.may_write(right.replace("get_weather", "get_whether"))  # no such tool
    assert not writer.may_write(right.replace("city", "town"))  # no such argument
    assert not writer.may_write(right.replace("2", "two"))
    assert not writer.may_write(right.replace("2", '"2"'))


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_calls_as_are_allowed(embedded, family):
    begin, end = FAMILIES[family].around
    one = WRITTEN[family].removeprefix(begin).removesuffix(end)
    two = begin + one + FAMILIES[family].between + one + end
    assert Writer(embedded, family, most=2).may_write(two)
    assert not Writer(embedded, family, most=1).may_write(two)


def test_arguments_that_are_not_required_may_be_missing(embedded):
    writer = Writer(embedded, "pythonic")
    for arguments in ('city="x"', 'city="x", unit="F"', 'city="x", days=1'):
        assert writer.may_write(f"<|tool_call_start|>[get_weather({arguments})]<|tool_call_end|>")
    for arguments in ("", "days=1", 'days=1, city="x"', 'city="x", unit="K"'):
        call = f"<|tool_call_start|>[get_weather({arguments})]<|tool_call_end|>"
        assert not writer.may_write(call)
    assert writer.may_write("<|tool_call_start|>[stop()]<|tool_call_end|>")


def test_only_the_tool_that_was_asked_for(embedded):
    tools = [{"function": WEATHER}, {"function": STOP}]
    module = importlib.import_module("mlx_lm.tool_parsers.pythonic")
    tokenizer = SimpleNamespace(
        tool_parser=module.parse_tool_call, all_special_tokens=[], get_added_vocab=dict
    )
    body = Chat.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": tools,
            "tool_choice": {"function": {"name": "stop"}},
        }
    )
    grammar = grammar_of(body, tokenizer)
    assert grammar is not None
    assert "get_weather" not in grammar
