"""What a request's body may ask for, and what is refused rather than passed over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlx_h2o.policies import policy_names
from mlx_h2o.serve.asked_pins import AskedPins
from mlx_h2o.settings import ModelSettings

#: The field that holds one request's own settings of its cache.
EXTRA = "mlx_h2o"
#: Settings of `make_prompt_cache` that a request may give there; others are fields of its policy.
OWN = (
    "max_size max_bytes context policy remainder bits k_bits v_bits group_size recent_bits undo "
    "positions"
).split()
#: Those that name files or hold arrays are the server's alone.
SERVERS_OWN = ("budgets", "frames")
SIZES = ("max_size", "max_bytes")
#: What a request pins, which is no setting of its caches: it is looked for in its prompt.
PINS = "pins"
#: Texts at which an answer may stop.
MOST_STOPS = 16

#: What mlx-lm's server does.
DONE = frozenset(
    "messages prompt model stream stream_options max_tokens max_completion_tokens temperature "
    "top_p top_k min_p repetition_penalty repetition_context_size presence_penalty "
    "presence_context_size frequency_penalty frequency_context_size xtc_probability "
    "xtc_threshold logit_bias logprobs top_logprobs seed stop tools role_mapping "
    "chat_template_kwargs".split()
)
#: What says nothing about the answer.
WITHOUT_EFFECT = frozenset("user metadata store service_tier safety_identifier".split())
#: What is done only where it asks for what is done anyway.
ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "num_draft_tokens": (0,),
    "draft_model": ("default_model",),
    "modalities": (["text"],),
    "reasoning_effort": (),
}


def check_body(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise ValueError for what a request asks and the server does not do.

    Args:
        body: The request's.
        names: By which the served model may be called.
    """
    for name, value in body.items():
        if value is None or name in DONE or name in WITHOUT_EFFECT or name == EXTRA:
            continue
        if name not in ONLY:
            known = "adapters are" if name == "adapters" else f"{name} is"
            raise ValueError(
                f"{known} not served: this server does nothing with it, so the request is refused. "
                f"A cache's settings go into {EXTRA!r}, as {{{EXTRA!r}: {{'max_size': 512}}}}."
            )
        if value not in ONLY[name]:
            only = f": only {json.dumps(ONLY[name][0])} is" if ONLY[name] else ""
            raise ValueError(f"{name}={json.dumps(value)} is not served{only}.")
    model = body.get("model", names[0])
    if model not in names:
        raise ValueError(f"This server serves {names[-1]!r} alone; got model={model!r}.")
    _check_images(body.get("messages"))


def _check_images(messages: Any) -> None:
    """Raise ValueError for messages that are none, or images that the server would fetch."""
    if messages is None:
        return
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages must be a list of objects with role and content.")
    for message in messages:
        if not isinstance(message.get("role"), str):
            raise ValueError("Each message needs a role.")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                raise ValueError("The parts of a message's content must be objects with a type.")
            url = part.get("image_url", part.get("image"))
            url = url.get("url") if isinstance(url, dict) else url
            if url is not None and not str(url).startswith("data:"):
                raise ValueError("Images must be data URLs: this server fetches nothing.")


def settings_of(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a request's cache, as `ModelSettings.of` takes them.

    Args:
        body: The request's.
        defaults: The server's settings.

    Raises:
        ValueError: It asks for what is no setting, or not a request's to ask.
    """
    own = body.get(EXTRA)
    if own is None:
        return dict(defaults)
    if not isinstance(own, dict):
        raise ValueError(f"{EXTRA} must be an object of settings, as {{'max_size': 512}}.")
    for name in own:
        if name in SERVERS_OWN:
            raise ValueError(f"{EXTRA}.{name} is the server's to say: give it when it is started.")
    policy = own.get("policy", defaults.get("policy"))
    if policy is not None and policy not in policy_names():
        known = ", ".join(policy_names())
        raise ValueError(f"There is no policy {policy!r}; there are {known}.")
    base = dict(defaults)
    if any(own.get(size) is not None for size in SIZES):
        base = {name: value for name, value in base.items() if name not in SIZES}
    if "policy" in own:  # whose fields are its own
        base = {name: value for name, value in base.items() if name in (*OWN, *SERVERS_OWN)}
    wanted = base | {name: value for name, value in own.items() if name != PINS}
    ModelSettings.of(**wanted)
    return wanted


def pins_of(body: Mapping[str, Any], usual: AskedPins) -> AskedPins:
    """What a request pins.

    Args:
        body: The request's, of which `settings_of` thought well.
        usual: What is pinned where it says nothing.

    Raises:
        ValueError: It says what are no pins.
    """
    asked = (body.get(EXTRA) or {}).get(PINS)
    return usual if asked is None else AskedPins.of(asked)


def label_of(settings: Mapping[str, Any]) -> str:
    """Settings as text: the same for the same settings."""
    return json.dumps(dict(settings), sort_keys=True, default=str)


def check_for_model(body: Mapping[str, Any], model: Any, tokenizer: Any) -> None:
    """Raise ValueError for what this model's sampling could not do.

    mlx-lm would find it out in the middle of a step of all requests.
    """
    words = getattr(getattr(model, "args", None), "vocab_size", None) or tokenizer.vocab_size
    top_k = body.get("top_k") or 0
    if top_k >= words:
        raise ValueError(f"top_k must be below the model's {words} tokens; got {top_k}.")
    for token in body.get("logit_bias") or {}:
        if not (str(token).isdecimal() and int(token) < words):
            raise ValueError(f"logit_bias names a token {token!r}; there are {words}, from 0 on.")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not (isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)):
        raise ValueError("stop must be a text, or a list of texts.")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"stop has {len(stops)} texts; {MOST_STOPS} are taken at most.")
    options = body.get("stream_options")
    if options is not None and not (
        isinstance(options, dict) and isinstance(options.get("include_usage"), bool)
    ):
        raise ValueError("stream_options must be {'include_usage': true or false}.")
    if not isinstance(body.get("prompt", ""), str):
        raise ValueError("prompt must be one text.")
