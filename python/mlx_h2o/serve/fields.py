"""The fields of a request's body: their names, their ranges, and those refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.policies import policy_names
from mlx_h2o.serve.asked_pins import AskedPins

#: The field of a request's own cache settings.
EXTRA = "mlx_h2o"
#: Settings of `make_prompt_cache` that it may hold; any others are fields of the policy.
OWN = (
    "max_size max_bytes context policy remainder bits k_bits v_bits group_size recent_bits undo "
    "positions"
).split()
#: Settings that name files or hold arrays are the server's alone.
SERVERS_OWN = ("budgets", "frames", "spill")
SIZES = ("max_size", "max_bytes")
#: The request's pins, which are no setting of its caches: they are found in its prompt.
PINS = "pins"
#: The most stop texts, and the most characters of one.
MOST_STOPS, LONGEST_STOP = 16, 1024
#: The most answers to one request.
MOST_ANSWERS = 4
#: The most tokens whose logits a request may move, and the most tools that it may offer.
MOST_BIASES, MOST_TOOLS = 1024, 256
#: Logits are divided by the temperature: below this the likeliest token has all of the mass in
#: float32 anyway, and much below it the quotient overflows.
COLDEST = 1e-3
#: The least repetition penalty: logits are divided by it, too.
LEAST_REPETITION = 1e-2
MOST_LOGPROBS = 20
MOST_TOKENS = 10_000_000
#: The most tokens over which a penalty looks back.
MOST_CONTEXT = 1_000_000
#: mlx-lm's seeds have 64 bits; OpenAI's may be negative.
SEEDS = 1 << 64


@dataclass(frozen=True)
class Number:
    """A field that holds a number.

    Attributes:
        least: The smallest value allowed.
        most: The largest value allowed.
        usual: The value for a request that gives none.
        whole: Whether fractions are refused.
    """

    least: float
    most: float
    usual: float | None
    whole: bool = False

    def of(self, name: str, value: Any) -> Any:
        """A request's value, checked.

        Raises:
            ValueError: The value is no number, or out of range.
        """
        kinds = int if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{name} must be a {'whole ' if self.whole else ''}number.")
        if math.isnan(value) or not self.least <= value <= self.most:
            raise ValueError(
                f"{name} must be from {_told(self.least)} to {_told(self.most)}; got {_cut(value)}."
            )
        return value


def _told(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


def _cut(value: Any) -> str:
    """A value in a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


#: Sampling numbers. Where the usual value is None, the command line's value is used.
NUMBERS = {
    "max_tokens": Number(1, MOST_TOKENS, None, whole=True),
    "max_completion_tokens": Number(1, MOST_TOKENS, None, whole=True),
    "temperature": Number(0, 100, None),
    "top_p": Number(0, 1, None),
    "top_k": Number(0, MOST_TOKENS, None, whole=True),
    "min_p": Number(0, 1, None),
    "repetition_penalty": Number(0, 100, 0.0),
    "presence_penalty": Number(-100, 100, 0.0),
    "frequency_penalty": Number(-100, 100, 0.0),
    "repetition_context_size": Number(0, MOST_CONTEXT, 20, whole=True),
    "presence_context_size": Number(0, MOST_CONTEXT, 20, whole=True),
    "frequency_context_size": Number(0, MOST_CONTEXT, 20, whole=True),
    "xtc_probability": Number(0, 1, 0.0),
    "xtc_threshold": Number(0, 0.5, 0.1),
    "top_logprobs": Number(-1, MOST_LOGPROBS, -1, whole=True),
    "seed": Number(-(SEEDS // 2), SEEDS - 1, None, whole=True),
    "n": Number(1, MOST_ANSWERS, 1, whole=True),
}
BIAS = Number(-100, 100, None)
#: Other fields that mlx-lm's generation, or this server, supports.
DONE = frozenset(
    "messages prompt model stream stream_options logit_bias logprobs stop tools tool_choice "
    "role_mapping chat_template_kwargs response_format parallel_tool_calls reasoning_effort".split()
)
#: Fields that do not affect the answer.
WITHOUT_EFFECT = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key".split()
)
#: Fields that are accepted only with the values that describe what is done anyway.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "num_draft_tokens": (0,),
    "draft_model": ("default_model",),
    "modalities": (["text"],),
}
#: Fields that would change the answer, so that they are refused rather than ignored.
REFUSED = frozenset(
    "adapters kv_bits kv_group_size quantized_kv_start functions function_call audio".split()
)
ROLES = frozenset("system developer user assistant tool function".split())
#: The role that needs no content if it calls a tool.
CALLER = "assistant"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


# -- the known fields -----------------------------------------------------------------------------


def check_body(body: Any, names: tuple[str, ...], strict: bool = False) -> list[str]:
    """The unknown fields of a body, which are ignored.

    Args:
        body: The request's body.
        names: The names by which requests may call the served model.
        strict: Whether unknown fields are refused.

    Raises:
        ValueError: The request is not supported by the server.
    """
    if not isinstance(body, dict):
        raise ValueError("The body must be a JSON object.")
    ignored = list[str]()
    for name, value in body.items():
        if value is None or name in NUMBERS or name in DONE or name in WITHOUT_EFFECT:
            continue
        if name == EXTRA:
            continue
        if name in ONLY:
            if value not in ONLY[name]:
                only = json.dumps(ONLY[name][0])
                raise ValueError(f"{name}={_cut(value)} is not served: only {only} is.")
        elif name in REFUSED or strict:
            known = "adapters are" if name == "adapters" else f"{_cut(name)[1:-1]} is"
            raise ValueError(
                f"{known} not served: this server does nothing with it, so the request is refused. "
                f"A cache's settings go into {EXTRA!r}, as {{{EXTRA!r}: {{'max_size': 512}}}}."
            )
        else:
            ignored.append(name)
    model = body.get("model")
    if model is not None and model not in names:
        raise ValueError(f"This server serves {names[-1]!r} alone; got model={_cut(model)}.")
    return ignored


# -- numbers and flags ----------------------------------------------------------------------------


def numbers_of(body: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every field of NUMBERS.

    Args:
        body: The request's body.
        usual: The command line's values.

    Raises:
        ValueError: A value is no number, or out of range.
    """
    found = dict[str, Any]()
    for name, number in NUMBERS.items():
        value = body.get(name)
        found[name] = usual.get(name, number.usual) if value is None else number.of(name, value)
    if body.get("max_completion_tokens") is not None:
        found["max_tokens"] = found["max_completion_tokens"]
    if found["temperature"] < COLDEST:
        found["temperature"] = 0.0
    if 0 < found["repetition_penalty"] < LEAST_REPETITION:
        raise ValueError(f"repetition_penalty must be 0, or at least {LEAST_REPETITION}.")
    if found["seed"] is not None:
        found["seed"] %= SEEDS
    return found


def flag_of(body: Mapping[str, Any], name: str, usual: bool) -> bool:
    """A field that is true or false.

    Args:
        body: The request's body.
        name: The field's name.
        usual: The value if the field is missing.

    Raises:
        ValueError: The value is something else.
    """
    value = body.get(name)
    if value is None:
        return usual
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false.")
    return value


def biases_of(body: Mapping[str, Any]) -> dict[int, float] | None:
    """logit_bias by token.

    Raises:
        ValueError: The value is invalid.
    """
    asked = body.get("logit_bias")
    if asked is None:
        return None
    if not isinstance(asked, dict):
        raise ValueError("logit_bias must be an object of numbers by tokens.")
    if len(asked) > MOST_BIASES:
        raise ValueError(f"logit_bias names {len(asked)} tokens; {MOST_BIASES} are taken at most.")
    for token in asked:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise ValueError(
                f"logit_bias names a token {_cut(token)}; tokens are numbers from 0 on."
            )
    return {int(token): float(BIAS.of("logit_bias", value)) for token, value in asked.items()}


def stops_of(body: Mapping[str, Any]) -> list[str]:
    """Texts at which the answer ends.

    Raises:
        ValueError: The value is no text and no list of texts, or too long.
    """
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not (isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)):
        raise ValueError("stop must be a text, or a list of texts.")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"stop has {len(stops)} texts; {MOST_STOPS} are taken at most.")
    if any(len(stop) > LONGEST_STOP for stop in stops):
        raise ValueError(f"A text of stop may have {LONGEST_STOP} characters at most.")
    return stops


def usage_wanted(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its usage.

    Raises:
        ValueError: stream_options is something else.
    """
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise ValueError("stream_options must be {'include_usage': true or false}.")
    return bool(options.get("include_usage", False))


def template_arguments_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The chat template's arguments, with the reasoning effort for templates that use it.

    Raises:
        ValueError: The value is no object, or there is no such effort.
    """
    given = body.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise ValueError("chat_template_kwargs must be an object.")
    # These are mlx-lm's own arguments, or determine the prompt.
    for name in ("tools", "tokenize", "add_generation_prompt", "messages", "conversation",
                 "chat_template", "return_dict", "return_tensors"):  # fmt: skip
        if given and name in given:
            raise ValueError(f"chat_template_kwargs.{name} is set by the server.")
    effort = body.get("reasoning_effort")
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise ValueError(f"reasoning_effort must be one of {', '.join(EFFORTS)}.")
    return {"reasoning_effort": effort} | (given or {})


# -- messages -------------------------------------------------------------------------------------


def check_messages(body: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid messages, or images that the server would have to fetch."""
    messages, mapping = body.get("messages"), body.get("role_mapping")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages must be a list of objects with role and content.")
    if not messages:
        raise ValueError("messages is empty.")
    if mapping is not None and not (
        isinstance(mapping, dict) and all(isinstance(text, str) for text in mapping.values())
    ):
        raise ValueError("role_mapping must be an object of texts by roles.")
    roles = ROLES | (mapping or {}).keys()
    for i, message in enumerate(messages):
        where, role = f"messages[{i}]", message.get("role")
        if not isinstance(role, str):
            raise ValueError(f"{where} needs a role.")
        if role not in roles:
            raise ValueError(f"{where} has role {_cut(role)}; known: {', '.join(sorted(roles))}.")
        calls = message.get("tool_calls")
        if calls is not None:
            _check_calls(f"{where}.tool_calls", calls)
        content = message.get("content")
        if content is None and not (role == CALLER and calls):
            raise ValueError(f"{where} has no content.")
        _check_content(f"{where}.content", content)


def _check_content(where: str, content: Any) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise ValueError(f"{where} must be a text, or a list of parts with a type.")
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ValueError(f"{place} must be an object with a type.")
        url = part.get("image_url", part.get("image"))
        url = url.get("url") if isinstance(url, dict) else url
        if url is not None and not str(url).startswith("data:"):
            raise ValueError("Images must be data URLs: this server fetches nothing.")
        if part["type"] == "text":
            if not isinstance(part.get("text"), str):
                raise ValueError(f"{place} must have a text.")
        elif url is None:
            raise ValueError(f"{place} has the type {_cut(part['type'])}, not text or image_url.")


def _check_calls(where: str, calls: Any) -> None:
    """Tool calls that the model made earlier; their arguments are JSON in a text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"{where} must be a list of objects.")
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}[{i}].function must be an object with a name.")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            try:
                json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}[{i}].function.arguments is no JSON: {error}") from error
        elif not isinstance(arguments, dict | str | None):
            raise ValueError(f"{where}[{i}].function.arguments must be JSON in a text.")


def check_prompt(body: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid prompt."""
    if not isinstance(body.get("prompt"), str):
        raise ValueError("prompt must be one text.")


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a request offers.

    Raises:
        ValueError: The value is no list of tools.
    """
    tools = body.get("tools") or None
    if tools is None:
        return None
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise ValueError(f"tools must be a list of at most {MOST_TOOLS} objects.")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise ValueError(f"tools[{i}] must be {{'type': 'function', 'function': {{...}}}}.")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"tools[{i}].function needs a name.")
        if not isinstance(function.get("parameters"), dict | None):
            raise ValueError(f"tools[{i}].function.parameters must be a JSON schema.")
    return tools


def tool_choice_of(body: Mapping[str, Any], tools: list[dict[str, Any]] | None) -> Any:
    """ "auto", "none", "required", or {"function": {"name": ...}} of one of the tools.

    Raises:
        ValueError: It is something else.
    """
    asked = body.get("tool_choice")
    if asked in (None, "auto", "none"):
        return asked or "auto"
    if tools is None:
        raise ValueError("tool_choice needs tools.")
    if asked == "required":
        return asked
    function = asked.get("function") if isinstance(asked, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in [tool["function"]["name"] for tool in tools]:
        raise ValueError(
            "tool_choice must be auto, none, required, or {'type': 'function', 'function': "
            "{'name': ...}} of one of the tools."
        )
    return asked


def response_format_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The format required of an answer; None means any.

    Raises:
        ValueError: There is no such format.
    """
    asked = body.get("response_format")
    if asked is None:
        return None
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind == "text":
        return None
    if kind == "json_schema":
        named = asked.get("json_schema")
        if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
            raise ValueError("response_format.json_schema must be {'schema': {...}}.")
    elif kind != "json_object":
        raise ValueError("response_format.type must be text, json_object or json_schema.")
    return dict(asked)


# -- caches and pins ------------------------------------------------------------------------------


def settings_of(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request's cache, as `ModelSettings.of` takes them.

    Args:
        body: The request's body.
        defaults: The server's settings.

    Raises:
        ValueError: A field is no setting, or not a setting of requests.
    """
    own = body.get(EXTRA)
    if own is None:
        return dict(defaults)
    if not isinstance(own, dict):
        raise ValueError(f"{EXTRA} must be an object of settings, as {{'max_size': 512}}.")
    for name in own:
        if name in SERVERS_OWN:
            raise ValueError(f"{EXTRA}.{name} can be set only when the server is started.")
    policy = own.get("policy", defaults.get("policy"))
    if policy is not None and policy not in policy_names():
        known = ", ".join(policy_names())
        raise ValueError(f"There is no policy {policy!r}; there are {known}.")
    base = dict(defaults)
    if any(own.get(size) is not None for size in SIZES):
        base = {name: value for name, value in base.items() if name not in SIZES}
    if "policy" in own:  # its fields replace the default policy's
        base = {name: value for name, value in base.items() if name in (*OWN, *SERVERS_OWN)}
    wanted = base | {name: value for name, value in own.items() if name != PINS}
    ModelSettings.of(**wanted)
    return wanted


def pins_of(body: Mapping[str, Any], usual: AskedPins) -> AskedPins:
    """The pins of a request.

    Args:
        body: The request's body, already checked by `settings_of`.
        usual: The pins for a request that gives none.

    Raises:
        ValueError: The value is no pins.
    """
    asked = (body.get(EXTRA) or {}).get(PINS)
    return usual if asked is None else AskedPins.of(asked)


def label_of(settings: Mapping[str, Any]) -> str:
    """Settings as text: equal settings give equal text, wherever their files of rows lie."""
    told = {name: value for name, value in settings.items() if name != "spill"}
    return json.dumps(told, sort_keys=True, default=str)


# -- checks that depend on the model --------------------------------------------------------------


def check_for_model(
    numbers: Mapping[str, Any], biases: Mapping[int, float] | None, model: Any, tokenizer: Any
) -> None:
    """Raise ValueError for sampling options that this model does not support.

    mlx-lm would detect them in the middle of a step of all requests.

    Args:
        numbers: The sampling numbers.
        biases: Biases of logits, by token.
        model: The served model.
        tokenizer: The model's tokenizer.
    """
    words = getattr(getattr(model, "args", None), "vocab_size", None) or tokenizer.vocab_size
    top_k = numbers["top_k"]
    if top_k >= words:
        raise ValueError(f"top_k must be below the model's {words} tokens; got {top_k}.")
    if numbers["top_logprobs"] > words:
        raise ValueError(f"top_logprobs must not exceed the model's {words} tokens.")
    for token in biases or {}:
        if token >= words:
            raise ValueError(f"logit_bias names a token {token}; there are {words}, from 0 on.")
