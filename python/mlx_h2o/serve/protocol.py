"""The requests that clients may send: every field, its type and its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.compression.reading import Readings
from mlx_h2o.serve.errors import ApiError
from mlx_h2o.serve.pins import template_role

#: The field of a request's own cache settings.
EXTRA = "mlx_h2o"
#: Settings that name files or hold arrays are the server's alone.
SERVER_FIELDS = ("budgets", "frames", "spill")
SIZES = ("max_size", "max_bytes")
MAX_TOKENS = 10_000_000
#: The most tokens over which a penalty looks back.
MAX_CONTEXT = 1_000_000
MAX_STOPS, MAX_STOP_LENGTH = 16, 1024
MAX_ANSWERS, MAX_LOGPROBS, MAX_BIASES, MAX_TOOLS = 4, 20, 1024, 256
#: Logits are divided by the temperature: below this the likeliest token has all of the mass in
#: float32 anyway, and much below it the quotient overflows.
MIN_TEMPERATURE = 1e-3
#: The least repetition penalty: logits are divided by it, too.
MIN_REPETITION = 1e-2
#: Seeds have 64 bits; OpenAI's may be negative.
SEEDS = 1 << 64
#: Fields that would change the answer and are not supported, so that they are refused.
REFUSED = frozenset(
    "adapters kv_bits kv_group_size quantized_kv_start functions function_call audio "
    "xtc_probability xtc_threshold".split()
)
#: Fields that are accepted only with the values that describe what is done anyway.
FIXED: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "num_draft_tokens": 0,
    "draft_model": "default_model",
    "modalities": ["text"],
}
#: Arguments of a chat template that the server sets itself.
TEMPLATE_FIELDS = frozenset(
    "tools tokenize add_generation_prompt continue_final_message messages conversation "
    "chat_template return_dict return_tensors".split()
)
#: The longest list of a validation's problems in a message.
MAX_PROBLEMS = 3


class Part(BaseModel):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Function(BaseModel):
    """A call's function: its name, and its arguments as JSON in a text."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = None

    @field_validator("arguments")
    @classmethod
    def _is_json(cls, value: Any) -> Any:
        if isinstance(value, str) and value:
            try:
                json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"it is no JSON: {error}") from error
        return value


class Call(BaseModel):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="allow")
    function: Function


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("it has no content")
        if isinstance(self.content, list):
            if not self.content:
                raise ValueError("its content is an empty list")
            for i, part in enumerate(self.content):
                if part.type != "text":
                    raise ValueError(
                        f"content[{i}] has the type {part.type!r}, and only text is served: this "
                        "server fetches nothing, and its models see no images (mlx_vlm.server sees "
                        "them; mlx_h2o.install bounds it: docs/guide/chat.md)"
                    )
                if part.text is None:
                    raise ValueError(f"content[{i}] must have a text")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template takes it: its content is one text."""
        message = dict(self.model_extra or {}) | {"role": template_role(self.role)}
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text or "" for part in content)
        message["content"] = content or ""
        if self.tool_calls:
            message["tool_calls"] = [_for_template(call) for call in self.tool_calls]
        thoughts = message.get("reasoning") or message.get("reasoning_content")
        if thoughts:
            message["reasoning_content"] = thoughts
        return message


def _for_template(call: Call) -> dict[str, Any]:
    """A call whose arguments are an object, which templates render as JSON."""
    plain = call.model_dump()
    arguments = plain["function"]["arguments"]
    if isinstance(arguments, str):
        plain["function"]["arguments"] = json.loads(arguments) if arguments else {}
    return plain


class ToolFunction(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: ToolFunction


class NamedFunction(BaseModel):
    """A function by its name."""

    name: str


class NamedTool(BaseModel):
    """A tool by its name."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Schema(BaseModel):
    """A JSON schema by its name."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """The format required of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema must be {'schema': {...}}")
        return self


class StreamOptions(BaseModel):
    """What a stream says beside the answer."""

    include_usage: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
ZeroToOne = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-100, le=100)]
Lookback = Annotated[int, Field(ge=0, le=MAX_CONTEXT)]
Count = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]


class Generation(BaseModel):
    """The fields that chats and texts share; None stands for the server's own value."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: ZeroToOne | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    min_p: ZeroToOne | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    repetition_context_size: Lookback | None = None
    presence_penalty: Penalty | None = None
    presence_context_size: Lookback | None = None
    frequency_penalty: Penalty | None = None
    frequency_context_size: Lookback | None = None
    seed: Annotated[int, Field(ge=-(SEEDS // 2), lt=SEEDS)] | None = None
    logit_bias: dict[str, Penalty] | None = None
    top_logprobs: Annotated[int, Field(ge=-1, le=MAX_LOGPROBS)] | None = None
    stop: Stop | Literal[""] | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    response_format: ResponseFormat | None = None
    mlx_h2o: dict[str, Any] | None = None
    reading: Readings | None = None
    # Accepted without effect.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    #: Whether the request is a chat.
    chat: ClassVar[bool]

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        for name, value in body.items():
            if value is None:
                continue
            if name in REFUSED:
                raise ValueError(
                    f"{name} is not served. A cache's settings go into {EXTRA!r}, as "
                    f"{{{EXTRA!r}: {{'max_size': 512}}}}"
                )
            if name in FIXED and value != FIXED[name]:
                raise ValueError(f"{name} may only be {json.dumps(FIXED[name])}")
        return body

    @field_validator("logit_bias")
    @classmethod
    def _tokens(cls, biases: Any) -> Any:
        if biases is not None and len(biases) > MAX_BIASES:
            raise ValueError(f"it names {len(biases)} tokens; at most {MAX_BIASES} are allowed")
        for token in biases or {}:
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise ValueError(f"{token[:20]!r} is no token: tokens are numbers from 0 on")
        return biases

    @field_validator("repetition_penalty")
    @classmethod
    def _divisor(cls, penalty: Any) -> Any:
        if penalty is not None and 0 < penalty < MIN_REPETITION:
            raise ValueError(f"it must be 0, or at least {MIN_REPETITION}")
        return penalty

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _some(cls, count: Any) -> Any:
        if count == 0:
            raise ValueError("it must be at least 1, or -1: as many as the model gives")
        return count

    @property
    def stops(self) -> list[str]:
        """The texts at which an answer ends."""
        return [self.stop] if isinstance(self.stop, str) and self.stop else list(self.stop or ())

    @property
    def likely(self) -> int:
        """The number of likely tokens reported for each token."""
        return max(self.top_logprobs or 0, 0)

    @property
    def ignored(self) -> list[str]:
        """The names of fields that have no effect."""
        extra = self.model_extra or {}
        return [name for name, value in extra.items() if value is not None and name not in FIXED]

    def own_settings(self) -> dict[str, Any] | None:
        """The settings of the request's cache, without its pins; None if it gives none."""
        if self.mlx_h2o is None:
            return None
        return {name: value for name, value in self.mlx_h2o.items() if name != "pins"}


class Completion(Generation):
    """A text to complete."""

    prompt: str
    logprobs: bool | Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat: ClassVar[bool] = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_text(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str):
            raise ValueError("it must be one text")
        return prompt

    @property
    def likely(self) -> int:
        """As in `Generation`; here OpenAI's `logprobs` is that number."""
        own = self.logprobs if self.logprobs is not None and self.logprobs is not True else 0
        return max(int(own), super().likely)

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens' log-probabilities are reported."""
        return self.likely > 0 or (self.logprobs is not None and self.logprobs is not False)


class Chat(Generation):
    """A chat to continue."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat: ClassVar[bool] = True

    @model_validator(mode="after")
    def _choice(self) -> Self:
        choice = self.tool_choice
        names = [tool.function.name for tool in self.tools or ()]
        if choice == "required" and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise ValueError("tool_choice must be one of the tools")
        for name in self.chat_template_kwargs or {}:
            if name in TEMPLATE_FIELDS:
                raise ValueError(f"chat_template_kwargs.{name} is set by the server")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise ValueError("continue_final_message needs a last message of the assistant")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens' log-probabilities are reported."""
        return self.likely > 0 or bool(self.logprobs)

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, as a template takes them; None without any."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def template_arguments(self) -> dict[str, Any]:
        """The chat template's arguments."""
        effort = {"reasoning_effort": self.reasoning_effort} if self.reasoning_effort else {}
        return effort | (self.chat_template_kwargs or {})


Body = Chat | Completion


def body_of(kind: type[Chat] | type[Completion], body: bytes) -> Body:
    """The request that a body holds.

    Raises:
        ApiError: It is no such request; the message names the field.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise ApiError(400, *_problems(error)) from error


def _problems(error: ValidationError) -> tuple[str, str | None]:
    """A message for the client, and the first field that is wrong."""
    messages: dict[str, str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        where = _place(problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            text = "it is not known"
        value = problem["input"]
        if where and problem["type"] not in ("missing", "value_error"):
            shown = json.dumps(value, default=str)
            text += f"; got {shown if len(shown) <= 60 else shown[:57] + '...'}"
        messages.setdefault(where, text)
    lines = [f"{where}: {text}" if where else text for where, text in messages.items()]
    first = next((where for where in messages if where), None)
    return "; ".join(lines[:MAX_PROBLEMS])[:380] + ".", first


def _place(location: tuple[int | str, ...]) -> str:
    """A field's place as JavaScript writes it, without pydantic's names of a union's members."""
    place = ""
    for i, part in enumerate(location):
        if isinstance(part, int):
            place += f"[{part}]"
        elif i == 0 or (part.isidentifier() and part.islower() and part not in ("str", "list")):
            place += f".{part}" if place else part
    return place


# -- the settings of a request's cache ------------------------------------------------------------


def cache_settings(own: Mapping[str, Any] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request's cache, as `ModelSettings.of` takes them.

    Args:
        own: The request's settings, or None.
        defaults: The server's settings.

    Raises:
        ValueError: A field is no setting, or not a setting of requests.
    """
    if own is None:
        return dict(defaults)
    for name in own:
        if name in SERVER_FIELDS:
            raise ValueError(f"{EXTRA}.{name} can be set only when the server is started.")
    base = dict(defaults)
    if any(own.get(size) is not None for size in SIZES):
        base = {name: value for name, value in base.items() if name not in SIZES}
    settings = base | dict(own)
    try:
        ModelSettings.of(**settings)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{EXTRA} has an invalid value: {error}") from error
    return settings


def label_of(settings: Mapping[str, Any]) -> str:
    """Settings as text: equal settings give equal text, wherever their files of rows lie."""
    own = {name: value for name, value in settings.items() if name != "spill"}
    return json.dumps(own, sort_keys=True, default=str)
