"""Tool calls as grammars, in the format of each family of models.

mlx-lm reads a family's calls with one module of `mlx_lm.tool_parsers`. Here is the same format as a
Lark grammar, so that mlx-lm can read a call that is required. In such a call everything is fixed
except the choice of the function and the values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The text between parts of JSON: a space, or a line's end and indentation. A model that prefers
#: spaces would fill its answer with them if more were allowed.
BETWEEN = r"( |\n {0,24})?"
#: Any text, of several lines too.
ANY_TEXT = "/(?s:.*)/"
#: Added tokens that llguidance takes for special ones, whatever the tokenizer says.
BRACKETED = re.compile(r"<.*>", re.DOTALL)


@dataclass(frozen=True)
class Family:
    """A family's format of tool calls.

    Attributes:
        call: One call, with `{name}`, `{arguments}` and perhaps `{index}`.
        argument: One argument, with `{key}` and `{value}`; None: all of them are one JSON object.
        separator: The text between arguments.
        quote: The text around a string; None means that strings are JSON, like every other value.
        between: The text between calls.
        around: The texts before the first call and after the last.
    """

    call: str
    argument: str | None = None
    separator: str = ""
    quote: str | None = ""
    between: str = "\n"
    around: tuple[str, str] = ("", "")


_GLM = Family(
    "<tool_call>{name}\n{arguments}</tool_call>",
    "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
)
#: Families by the name of mlx-lm's module that reads their calls.
FAMILIES = {
    "json_tools": Family('<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>'),
    "qwen3_coder": Family(
        "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat": Family(
        "<longcat_tool_call>{name}\n{arguments}</longcat_tool_call>",
        "<longcat_arg_key>{key}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n",
    ),
    "mistral": Family("[TOOL_CALLS]{name}[ARGS]{arguments}", between=""),
    "kimi_k2": Family(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        between="",
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "pythonic": Family(
        "<|tool_call_start|>[{name}({arguments})]<|tool_call_end|>", "{key}={value}", ", ", None
    ),
    "gemma4": Family(
        "<|tool_call>call:{name}{{arguments}}<tool_call|>", "{key}:{value}", ",", '<|"|>'
    ),
    "function_gemma": Family(
        "<start_function_call>call:{name}{{arguments}}<end_function_call>",
        "{key}:{value}",
        ",",
        "<escape>",
    ),
}


def json_rule(schema: Any) -> str:
    """The JSON of a schema, as the right side of a Lark rule."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {"whitespace_pattern": BETWEEN}}
    return f"%json {json.dumps(schema)}"


def family_of(tokenizer: Any) -> tuple[str, Family | None]:
    """The name of the module that reads a model's calls, and the family if it is known.

    Args:
        tokenizer: mlx-lm's tokenizer of a model that can call tools.
    """
    name = getattr(tokenizer.tool_parser, "__module__", "").rpartition(".")[2]
    return name, FAMILIES.get(name)


def calls_of(
    family: Family, functions: Sequence[Mapping[str, Any]], most: int, tokenizer: Any
) -> str:
    """The rule `calls`, and the rules that it needs.

    Args:
        family: The calls' format.
        functions: The `function` of each tool that may be called: `name`, and `parameters` as a
            JSON schema.
        most: The most calls.
        tokenizer: The model's tokenizer; to llguidance its special tokens are tokens, not text.
    """
    grammar = _Grammar(family, _special_tokens(tokenizer))
    each = [grammar.call(function) for function in functions]
    first, last = map(grammar.fixed, family.around)
    more = f"({grammar.fixed(family.between)} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"calls: {first} call {more} {last}", f"call: {' | '.join(each)}"]
    return "\n".join([*rules, *grammar.rules, ""])


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that llguidance never matches as text, and their ids.

    Beside special tokens these are others that were added to the vocabulary, in angle brackets:
    `<tool_call>` is one in Qwen's.
    """
    special = set(tokenizer.all_special_tokens)
    added: dict[str, int] = tokenizer.get_added_vocab()
    return {text: i for text, i in added.items() if text in special or BRACKETED.fullmatch(text)}


class _Grammar:
    """The rules of one family's calls, under construction.

    Args:
        family: The calls' format.
        special: Ids of special tokens.
    """

    def __init__(self, family: Family, special: Mapping[str, int]):
        self.family, self.special = family, special
        self.rules: list[str] = []

    def rule(self, body: str) -> str:
        """Add a rule; return its name."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def pieces(self, text: str) -> list[str]:
        """Split a text into special tokens and the text between them."""
        marks = sorted(filter(None, self.special), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        return [piece for piece in pieces if piece]

    def fixed(self, text: str) -> str:
        """A fixed text, whose special tokens are matched as tokens."""
        return " ".join(
            f"<[{self.special[piece]}]>" if piece in self.special else json.dumps(piece)
            for piece in self.pieces(text)
        )

    def filled(self, template: str, **parts: str) -> str:
        """A template with a rule in the place of each `{name}`."""
        pieces = re.split(r"\{(\w+)\}", template)
        return " ".join(
            parts[piece] if i % 2 else self.fixed(piece) for i, piece in enumerate(pieces)
        )

    def call(self, function: Mapping[str, Any]) -> str:
        """The name of the rule of a function's calls."""
        schema = function.get("parameters") or {"type": "object"}
        if self.family.argument is None:
            arguments = self.rule(json_rule(schema))
        else:
            arguments = self.arguments(schema)
        index = "/[0-9]/"
        name = function["name"]
        name = self.fixed(json.dumps(name)[1:-1] if '"{name}"' in self.family.call else name)
        return self.rule(self.filled(self.family.call, name=name, arguments=arguments, index=index))

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """The required arguments in their order, then any of the others in their order."""
        properties = schema.get("properties") or {}
        required = [name for name in properties if name in (schema.get("required") or ())]
        others = [name for name in properties if name not in required]
        between = self.fixed(self.family.separator)
        parts = {name: self.argument(name, properties[name]) for name in properties}
        if required:
            optional = (f"({between} {parts[name]})?" for name in others)
            return " ".join([f" {between} ".join(parts[name] for name in required), *optional])
        ways = [
            " ".join([parts[name], *(f"({between} {parts[after]})?" for after in others[i + 1 :])])
            for i, name in enumerate(others)
        ]
        return f"({' | '.join(ways)})?" if ways else ""

    def argument(self, key: str, schema: Any) -> str:
        """The name of an argument's rule."""
        assert self.family.argument is not None
        before, _, after = self.family.argument.partition("{value}")
        value = " | ".join(self.values(schema, after))
        return self.rule(f"{self.filled(before, key=self.fixed(key))} ({value})")

    def values(self, schema: Any, after: str) -> Iterator[str]:
        """The values that an argument may have, each with the text after it."""
        quote = self.family.quote
        schema = schema if isinstance(schema, Mapping) else {}
        named = schema.get("enum", [schema["const"]] if "const" in schema else None)
        texts = named is not None and all(isinstance(one, str) for one in named)
        is_text = schema.get("type", "string" if texts else None) == "string"
        if quote is None or not is_text:
            yield f"{self.rule(json_rule(schema))} {self.fixed(after)}"
            return
        if named is not None:
            for one in named:
                yield self.fixed(f"{quote}{one}{quote}{after}")
            return
        end, *rest = self.pieces(quote + after)
        if end in self.special:  # no text contains it
            text = self.rule(ANY_TEXT)
            rest = [end, *rest]
        else:
            self.rules.append(f"text_{len(self.rules)}[suffix={json.dumps(end)}]: {ANY_TEXT}")
            text = f"text_{len(self.rules) - 1}"
        yield f"{self.fixed(quote)} {text} {self.fixed(''.join(rest))}"
