"""A request for completions: from its body to the arguments of mlx-lm's generation."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    LogitsProcessorArguments,
    ModelDescription,
    SamplingArguments,
)

from mlx_h2o.serve import fields
from mlx_h2o.serve.asked_pins import AskedPins
from mlx_h2o.serve.grammar import Form

#: The command line's options, as mlx-lm names them, by the fields for which they are the default.
USUAL = {
    "max_tokens": "max_tokens",
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
}


@dataclass(frozen=True)
class Asked:
    """A request whose every field was checked.

    Attributes:
        chat: Whether it is a chat instead of a text to complete.
        prompt: The text to complete; empty for a chat.
        messages: The chat's messages; empty for a text.
        tools: The tools that the model may call, or None.
        tool_choice: "auto", "none", "required", or one of the tools.
        several: Whether an answer may have several tool calls.
        response_format: The format required of the answer, or None.
        role_mapping: The role mapping for models without a chat template.
        stream: Whether the answer comes in pieces.
        usage: Whether a stream ends with its usage.
        logprobs: Whether the tokens' log-probabilities are reported.
        numbers: The values of the fields of `fields.NUMBERS`.
        biases: Biases of logits, by token.
        stops: Texts at which an answer ends.
        template: Arguments for the chat template.
        settings: The caches' settings, as `ModelSettings.of` takes them.
        pins: The pins of the prompt.
        ignored: Fields that have no effect.
    """

    chat: bool
    prompt: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: Any
    several: bool
    response_format: dict[str, Any] | None
    role_mapping: dict[str, str] | None
    stream: bool
    usage: bool
    logprobs: bool
    numbers: dict[str, Any]
    biases: dict[int, float] | None
    stops: list[str]
    template: dict[str, Any] | None
    settings: dict[str, Any]
    pins: AskedPins
    ignored: list[str]

    @property
    def answers(self) -> int:
        """The number of answers requested."""
        return int(self.numbers["n"])

    def request(self) -> Any:
        """The request that mlx-lm tokenizes; tokenizing changes its messages."""
        kind: Any = "chat" if self.chat else "text"
        messages = copy.deepcopy(self.messages)
        made: Any = CompletionRequest(kind, self.prompt, messages, self.tools, self.role_mapping)
        made.stops = list(self.stops)
        return made

    def arguments(self, model: str, place: int, form: Form | None) -> Any:
        """The arguments for mlx-lm's generation of an answer.

        Args:
            model: The server's name of the model: requests for different ones do not share a batch.
            place: The answer's number among those of this request.
            form: The form required of the answer, or None.
        """
        n, seed = self.numbers, self.numbers["seed"]
        sampling: Any = {name: n[name] for name in SamplingArguments.__dataclass_fields__}
        logits: Any = {name: n.get(name) for name in LogitsProcessorArguments.__dataclass_fields__}
        none: Any = None
        made: Any = GenerationArguments(
            model=ModelDescription(model=model, draft="default_model", adapter=none),
            sampling=SamplingArguments(**sampling),
            logits=LogitsProcessorArguments(**logits | {"logit_bias": self.biases}),
            stop_words=list(self.stops),
            max_tokens=n["max_tokens"],
            num_draft_tokens=0,
            logprobs=self.logprobs,
            top_logprobs=max(n["top_logprobs"], 0),
            seed=None if seed is None else (seed + place) % fields.SEEDS,
            chat_template_kwargs=self.template,
        )
        made.form = form
        return made


def asked_of(
    body: Any,
    chat: bool,
    names: tuple[str, ...],
    usual: Any,
    defaults: Mapping[str, Any],
    pins: AskedPins,
    strict: bool,
) -> Asked:
    """Check a request's body.

    Args:
        body: The body, parsed from JSON.
        chat: Whether it came to the chats' endpoint.
        names: The names by which requests may call the served model.
        usual: The command line, as mlx-lm parsed it.
        defaults: The caches' settings for a request that gives none.
        pins: The pins for a request that gives none.
        strict: Whether unknown fields are refused.

    Raises:
        ValueError: The request is not supported; the message names the field.
    """
    ignored = fields.check_body(body, names, strict)
    if chat:
        fields.check_messages(body)
    else:
        fields.check_prompt(body)
    tools = fields.tools_of(body) if chat else None
    choice = fields.tool_choice_of(body, tools)
    numbers = fields.numbers_of(body, {name: getattr(usual, of) for name, of in USUAL.items()})
    try:
        settings = fields.settings_of(body, defaults)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{fields.EXTRA} has an invalid value: {error}") from error
    return Asked(
        chat=chat,
        prompt="" if chat else body["prompt"],
        messages=body["messages"] if chat else [],
        tools=None if choice == "none" else tools,
        tool_choice=choice,
        several=fields.flag_of(body, "parallel_tool_calls", True),
        response_format=fields.response_format_of(body),
        role_mapping=body.get("role_mapping"),
        stream=fields.flag_of(body, "stream", False),
        usage=fields.usage_wanted(body),
        logprobs=fields.flag_of(body, "logprobs", False),
        numbers=numbers,
        biases=fields.biases_of(body),
        stops=fields.stops_of(body),
        template=fields.template_arguments_of(body),
        settings=settings,
        pins=fields.pins_of(body, pins),
        ignored=ignored,
    )
