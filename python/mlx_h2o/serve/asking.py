"""A request for completions: from its body to what mlx-lm's generation takes."""

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

#: Of the command line, as mlx-lm names them, by the fields that they stand in for.
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
        chat: Whether it is a chat, or a text to go on with.
        prompt: That text; empty for a chat.
        messages: Of the chat; empty for a text.
        tools: That the model may call, or None.
        tool_choice: "auto", "none", "required", or one of them.
        several: Whether an answer may have several calls of tools.
        response_format: That the answer must have, or None.
        role_mapping: Of models without a chat template.
        stream: Whether the answer comes in pieces.
        usage: Whether a stream ends with its usage.
        logprobs: Whether those of the tokens are told.
        numbers: By the fields of `fields.NUMBERS`.
        biases: Of logits, by tokens.
        stops: Texts at which an answer ends.
        template: Arguments of the chat template.
        settings: Of the caches, as `ModelSettings.of` takes them.
        pins: What of the prompt is never to be evicted.
        ignored: Fields that nothing is done with.
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
        """How many are wanted."""
        return int(self.numbers["n"])

    def request(self) -> Any:
        """What mlx-lm tokenizes, which changes the messages as it does."""
        kind: Any = "chat" if self.chat else "text"
        messages = copy.deepcopy(self.messages)
        made: Any = CompletionRequest(kind, self.prompt, messages, self.tools, self.role_mapping)
        made.stops = list(self.stops)
        return made

    def arguments(self, model: str, place: int, form: Form | None) -> Any:
        """How mlx-lm generates an answer.

        Args:
            model: As the server calls it: requests for different ones do not share a batch.
            place: Of the answer among those of this request.
            form: That it must have, or None.
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
    """A request by its body.

    Args:
        body: As JSON gave it.
        chat: Whether it came to the chats' endpoint.
        names: By which the served model may be called.
        usual: The command line, as mlx-lm parsed it.
        defaults: Settings of caches where it says nothing of them.
        pins: What is pinned where it says nothing of that.
        strict: Whether fields that are not known are refused.

    Raises:
        ValueError: It asks for what is not done; the message names the field.
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
