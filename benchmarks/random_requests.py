"""Random requests with every field of `serve/protocol.py`, and what an answer must equal.

An answer must equal that of a server that has just begun, whatever requests came before or run
beside it, and whether the client hung up, sent its question again, or sends back earlier answers.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o.loading.load import SAMPLE_TEXT, model_path
from mlx_h2o.serve.scheduler import Scheduler

#: The embedded model, which has no chat template.
PLAIN = "builtin:recall-4m"
#: Words of the prompts: the first and the number. Two begin alike, and two end alike.
PASSAGES = ((0, 9), (0, 30), (5, 30), (200, 50))
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"word": {"enum": ["key", "door"]}}},
    },
}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
#: Values of each field that a request may have, and how often it has one.
FIELDS: dict[str, tuple[float, list[Any]]] = {
    "stop": (0.3, [" the", ",", "a", " and ", ["e ", "no"], ""]),
    "n": (0.15, [2, 3]),
    "top_p": (0.1, [0, 0.9]),
    "top_k": (0.1, [1, 20]),
    "min_p": (0.1, [0.05]),
    "logit_bias": (0.1, [{"5": 3, "40": -3}]),
    "repetition_penalty": (0.1, [1.2]),
    "repetition_context_size": (0.05, [0, 5]),
    "presence_penalty": (0.1, [0.5]),
    "presence_context_size": (0.05, [5]),
    "frequency_penalty": (0.1, [0.5]),
    "frequency_context_size": (0.05, [5]),
    "logprobs": (0.1, [True]),
    "top_logprobs": (0.1, [-1, 0, 2]),
    "stream": (0.4, [True]),
    "response_format": (
        0.1,
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        ],
    ),
    "reading": (0.3, ["once", "twice", "auto"]),
    "user": (0.05, ["someone"]),
}  # fmt: skip
#: The same for the fields that chats have alone.
CHAT_FIELDS: dict[str, tuple[float, list[Any]]] = {
    "tool_choice": (
        0.3, ["none", "auto", "required", {"type": "function", "function": {"name": "look_up"}}],
    ),
    "parallel_tool_calls": (0.05, [False]),
    "reasoning_effort": (0.05, ["low"]),
    "chat_template_kwargs": (0.05, [{"enable_thinking": False}]),
    "add_generation_prompt": (0.05, [True]),
}  # fmt: skip
#: Settings of a request's cache.
SETTINGS: list[dict[str, Any]] = [
    {"pins": {"spans": [[0, 3]]}},
    {"pins": {"texts": ["the"]}},
    {"policy": "streaming"},
    {"undo": 4},
    {"bits": 8, "group_size": 32},
]

#: A chat template with tools in Qwen's format, by which mlx-lm knows how to read their calls.
TEMPLATE = """\
{%- if tools %}tools: {{ tools | tojson }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
#: Requests of one conversation.
MAX_TURNS = 4
#: Sends a path and a body; returns the status and the whole answer.
Send = Callable[[str, bytes], tuple[int, bytes]]


def with_template(folder: Path) -> Path:
    """A folder with the embedded model in float32 and a chat template that knows of tools."""
    folder.mkdir()
    for file in Path(model_path(PLAIN)).iterdir():
        if file.suffix == ".safetensors":
            # In 16 bits the sums of a batch differ enough from those of one answer to be seen.
            weights = mx.load(str(file))
            assert isinstance(weights, dict)
            weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
            mx.save_safetensors(str(folder / file.name), weights, {"format": "mlx"})
        else:
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def fields_of(draw: random.Random, fields: dict[str, tuple[float, list[Any]]]) -> dict[str, Any]:
    """Some of the fields, each with one of its values."""
    return {
        name: draw.choice(values)
        for name, (share, values) in fields.items()
        if draw.random() < share
    }


def drawn_request(draw: random.Random, templated: str) -> dict[str, Any]:
    """One of few prompts, as a text or a chat, and some of the other fields.

    Args:
        draw: Random numbers.
        templated: The name of the model of `with_template`; the other is `PLAIN`.
    """
    limit = draw.choice(["max_tokens", "max_completion_tokens"])
    body: dict[str, Any] = {limit: draw.choice([1, 6, 17]), "temperature": 0}
    if draw.random() < 0.25:
        body |= {"temperature": 1.0, "seed": draw.randrange(-1, 3)}
    body |= fields_of(draw, FIELDS) | {"model": draw.choice([PLAIN, templated])}
    if draw.random() < 0.3:
        body["mlx_h2o"] = draw.choice([*SETTINGS, {"max_size": 64}])
    words = SAMPLE_TEXT.read_text(encoding="utf-8").split()
    first, count = draw.choice(PASSAGES)
    prompt = " ".join(words[first : first + count])
    if draw.random() < 0.5:
        return body | {"prompt": draw.choice([prompt, [prompt]])}
    body |= fields_of(draw, CHAT_FIELDS)
    if "tool_choice" in body:
        body |= {"tools": [TOOL], "model": templated}
        body.pop("response_format", None)
    role = draw.choice(["system", "developer"])
    system = [{"role": role, "content": "Be brief."}] if draw.random() < 0.4 else []
    # Tools stand before the system message, and would be pinned with it.
    if system and "tools" not in body and draw.random() < 0.1:
        body["mlx_h2o"] = {"pins": {"roles": [role]}}
    parts = [{"type": "text", "text": prompt[:20]}, {"type": "text", "text": prompt[20:]}]
    content = parts if draw.random() < 0.2 else prompt
    return body | {"messages": [*system, {"role": "user", "content": content}]}


def next_request(draw: random.Random, body: dict[str, Any], answer: dict[str, Any]) -> Any:
    """A request that goes on from an answer: with the next turn, or with the same one."""
    if "prompt" in body:
        prompt = body["prompt"] if isinstance(body["prompt"], str) else body["prompt"][0]
        return body | {"prompt": prompt + answer["text"] + draw.choice(["", " and", ", so"])}
    messages, message = list(body["messages"]), answer["message"]
    text = message["content"] or ""
    body = {name: value for name, value in body.items() if name != "continue_final_message"}
    if messages[-1]["role"] == "assistant":
        text = messages.pop()["content"] + text
        message = message | {"content": text}
    messages.append(message)
    if text.strip() and "tool_calls" not in message and draw.random() < 0.4:
        return body | {"messages": messages, "continue_final_message": True}
    for call in message.get("tool_calls") or ():
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "It is open."})
    return body | {"messages": [*messages, {"role": "user", "content": "And then?"}]}


def sender(port: int, patience: float) -> Send:
    """A function that sends requests to a server on this machine.

    Args:
        port: The server's port.
        patience: Seconds to wait for an answer.
    """

    def send(path: str, body: bytes) -> tuple[int, bytes]:
        with closing(HTTPConnection("127.0.0.1", port, timeout=patience)) as connection:
            connection.request("POST", path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()

    return send


def path_of(body: dict[str, Any]) -> str:
    """The endpoint of a request."""
    return "/v1/completions" if "prompt" in body else "/v1/chat/completions"


def answers_to(send: Send, body: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """A request's choices, streamed ones put together, and its tokens that were known.

    Raises:
        RuntimeError: The answer is an error.
    """
    if body.get("stream"):
        body = body | {"stream_options": {"include_usage": True}}
    status, data = send(path_of(body), json.dumps(body).encode())
    if status != 200:
        raise RuntimeError(f"{status}: {data[:300]!r}")
    if not body.get("stream"):
        whole = json.loads(data)
        choices, usage = whole["choices"], whole["usage"]
    else:
        choices, usage = _together(data, "messages" in body)
    return choices, usage["prompt_tokens_details"]["cached_tokens"]


def _together(data: bytes, chat: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices and the usage of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    for line in data.splitlines():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise RuntimeError(f"in a stream: {event['error']}")
        usage = event.get("usage") or usage
        for piece in event["choices"]:
            empty = {"message": {"role": "assistant", "content": ""}} if chat else {"text": ""}
            choice = choices.setdefault(piece["index"], {"logprobs": None} | empty)
            choice["finish_reason"] = piece["finish_reason"]
            if piece.get("logprobs"):
                choice["logprobs"] = choice["logprobs"] or {"content": []}
                choice["logprobs"]["content"] += piece["logprobs"]["content"]
            delta = piece.get("delta") or {}
            if chat:
                choice["message"]["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    call = {name: value for name, value in call.items() if name != "index"}
                    choice["message"].setdefault("tool_calls", []).append(call)
            else:
                choice["text"] += piece["text"]
    return [choices[index] for index in sorted(choices)], usage


def essence(choices: list[dict[str, Any]]) -> list[Any]:
    """What two answers to the same request have in common: all but names and last bits."""
    parts: list[Any] = []
    for choice in choices:
        message = choice.get("message") or {}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        tokens = [one["token"] for one in (choice["logprobs"] or {}).get("content", ())]
        text = choice["text"] if "text" in choice else message["content"] or ""
        parts.append((text, calls, tokens, choice["finish_reason"]))
    return parts


@dataclass
class Expected:
    """The answer to the last of some requests.

    Attributes:
        answers: Its essence.
        known: The tokens of each request's prompt that were known.
    """

    answers: list[Any]
    known: list[int]


class Reference:
    """The answers of a server that has just begun, each conversation computed once.

    Args:
        send: Sends a request to a server in this process that gets no other requests.
        scheduler: The server's scheduler.
    """

    def __init__(self, send: Send, scheduler: Scheduler):
        self._send, self._scheduler = send, scheduler
        self._expected: dict[str, Expected] = {}
        self._lock = threading.Lock()

    def _forget(self) -> None:
        """Let the server forget every conversation, as if it had just begun."""
        while self._scheduler.ledger.running:
            time.sleep(0.01)
        self._scheduler.call(self._scheduler.conversations.clear).result()

    def of(self, turns: list[dict[str, Any]]) -> Expected:
        """The answer to the last of these requests, if no others were sent before."""
        key = json.dumps(turns, sort_keys=True)
        with self._lock:
            if key not in self._expected:
                self._forget()
                answers = [answers_to(self._send, body) for body in turns]
                self._expected[key] = Expected(
                    essence(answers[-1][0]), [count for _, count in answers]
                )
            return self._expected[key]


class Asker:
    """A client that asks at random, goes on from its answers, and compares each.

    Where tokens were evicted, the answers are equal if both went on from as many tokens: which were
    evicted depends on where earlier requests stopped reading. So does the rounding of packed rows,
    where the first prompt must go on from as many tokens, too.

    Args:
        draw: Random numbers.
        templated: The name of the model of `with_template`.
        reference: The right answers.
        evicts: Whether the server evicts tokens where a request does not say otherwise.
        settings: Settings of each request's cache that are not drawn.

    Attributes:
        compared: The number of answers that were compared.
    """

    def __init__(
        self,
        draw: random.Random,
        templated: str,
        reference: Reference,
        evicts: bool = False,
        settings: dict[str, Any] | None = None,
    ):
        self._draw, self._templated, self._reference = draw, templated, reference
        self._evicts, self._settings = evicts, settings
        self._turns: list[dict[str, Any]] = []
        self._answer: dict[str, Any] = {}
        self._known: list[int] = []
        self.compared = 0

    def ask(self, send: Send) -> str | None:
        """Send a request; how its answer differs from the right one, or None."""
        turns, self._turns = self._turns, []
        if not 0 < len(turns) < MAX_TURNS or self._draw.random() < 0.6:
            turns, self._known = [self.request()], []
        else:
            turns = [*turns, next_request(self._draw, turns[-1], self._answer)]
        choices, known = answers_to(send, turns[-1])
        self._turns, self._answer, self._known = turns, choices[0], [*self._known, known]
        expected = self._reference.of(turns)
        own = turns[0].get("mlx_h2o") or {}
        evicts = self._evicts or own.get("max_size") != (self._settings or {}).get("max_size")
        if evicts and self._known[1:] != expected.known[1:]:
            return None
        if "bits" in own and self._known != expected.known:
            return None
        self.compared += 1
        if essence(choices) == expected.answers:
            return None
        return f"{essence(choices)} instead of {expected.answers} to {json.dumps(turns)}"

    def request(self) -> dict[str, Any]:
        """The first request of a conversation."""
        body = drawn_request(self._draw, self._templated)
        if self._settings:
            body["mlx_h2o"] = self._settings | body.get("mlx_h2o", {})
        return body
