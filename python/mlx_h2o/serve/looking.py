"""Reports about conversations: their text, the tokens that each layer still holds, their pins.

Every function here that touches caches runs on the thread that generates, between two steps.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_h2o.caches.conversation import bounded_entries, pin, unpin
from mlx_h2o.chat.kept_tokens import (
    DECODE_CONTEXT,
    LayerMemory,
    bounded_layers,
    remembered,
    token_texts,
)
from mlx_h2o.engine.pins_and_turns import PinAnswer
from mlx_h2o.serve.batches import Answered
from mlx_h2o.serve.conversations import Idle, shrink
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.said import messages_of, render_with
from mlx_h2o.serve.sessions import token_count, tokens_of
from mlx_h2o.serve.sharing import processes, require_alone
from mlx_h2o.storage.pins import Span, checked_spans, joined

#: Tokens whose texts are decoded between two steps: few enough that no step waits long.
TEXTS_AT_A_TIME = 512
#: The changes that can be made to pins.
CHANGES = ("pin", "unpin")


class Unknown(LookupError):
    """No idle conversation has this name."""


def overview(generator: BoundedGenerator) -> dict[str, Any]:
    """All idle conversations, the last used first, and the bytes of everything."""
    accountant, conversations = generator.accountant, generator.conversations

    def look() -> dict[str, Any]:
        told = sorted(conversations.told(), key=lambda idle: -idle.used)
        held = accountant.bytes()
        return {
            "model": str(generator.cli_args.model),
            "processes": processes(),
            "bytes": {
                "bound": held.bound,
                "running": held.running,
                "reserved": held.reserved,
                "idle": held.idle,
            },
            "requests": {"running": accountant.running, "waiting": accountant.waiting},
            "conversations": [_outline(idle) for idle in told],
        }

    all_of_them: dict[str, Any] = generator.between_steps(look)
    return all_of_them


def _outline(idle: Idle) -> dict[str, Any]:
    last = idle.turns[-1]
    return {
        "id": last.name,
        "title": last.title,
        "tokens": token_count(idle.key),
        "bytes": sum(idle.pieces.values()),
        "shrunk": idle.shrunk,
    }


def conversation(generator: BoundedGenerator, name: str, known: int = 0) -> dict[str, Any]:
    """One conversation's tokens, and for each layer how many heads hold each of them.

    The conversation is idle, or in the middle of an answer. Only the necessary part is done between
    two steps.

    Args:
        generator: The server's generator.
        name: The name of its answer.
        known: The number of first tokens whose texts are not requested.

    Raises:
        Unknown: There is no conversation of this name.
    """

    def look() -> tuple[dict[str, Any], list[LayerMemory], list[int]]:
        seen = _being_answered(generator, name)
        if seen is not None:
            outline, cache, tokens = _outline_so_far(seen), seen.caches, seen.tokens
        else:
            idle = find(generator, name)
            outline, cache, tokens = _outline(idle), idle.cache, tokens_of(idle.key)
        layers = bounded_layers(cache)
        told = {
            "id": name,
            "running": seen is not None,
            "policy": layers[0][1].policy.name if layers else None,
            "processes": processes(),
            "evicted": sum(entry.evicted for _, entry in layers) / max(len(layers), 1),
            "pins": _pins(cache),
        }
        return outline | told, remembered(cache, len(tokens)), tokens

    (told, layers, tokens), seconds = generator.between_steps(partial(_timed, look))
    told["layers"] = _told(layers)
    told["texts"], more = _texts(generator, tokens, known)
    if not known and not told["running"]:
        text = "".join(told["texts"])
        render = render_with(generator.provider.tokenizer)
        read_back = partial(_timed, partial(messages_of, render, text))
        told["messages"], took = generator.between_steps(read_back)
        more += took
    told["seconds"] = seconds + more
    return dict(told)


def _timed(do: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `do`, and the seconds that it took on the thread that generates."""
    begun = time.perf_counter()
    return do(), time.perf_counter() - begun


def _being_answered(generator: BoundedGenerator, name: str) -> Answered | None:
    """The conversation that is generating the answer of this name, if it can be read.

    If several processes share the model, the newest step's changes to caches may not be computed
    yet, and computing them may need all processes.
    """
    batch = generator.batch
    return batch.answered(name) if batch is not None and processes() == 1 else None


def _outline_so_far(seen: Answered) -> dict[str, Any]:
    """The same fields as in `_outline`, for a conversation in the middle of an answer."""
    return {
        "title": seen.turn.title,
        "tokens": len(seen.tokens),
        "bytes": sum(entry.nbytes for _, entry in bounded_layers(seen.caches)),
        "shrunk": False,
    }


def find(generator: BoundedGenerator, name: str) -> Idle:
    """The idle conversation whose answer has this name.

    Raises:
        Unknown: There is no such conversation.
    """
    idle = generator.conversations.named(name)
    if idle is None:
        raise Unknown(
            "There is no idle conversation of this name: it is being answered, has gone on under "
            "the name of a later answer, or made room for others."
        )
    return idle


def _told(layers: Sequence[LayerMemory]) -> list[dict[str, Any]]:
    return [
        {"layer": layer.layer, "heads": layer.heads, "held": layer.held.tolist()}
        for layer in layers
    ]


def _pins(cache: Sequence[Any]) -> list[Span]:
    """The spans pinned in some layer: a layer that has lost a token has no pin of it."""
    return list(joined(span for _, entry in bounded_layers(cache) for span in entry.pins))


def _texts(
    generator: BoundedGenerator, tokens: Sequence[int], known: int
) -> tuple[list[str], float]:
    """Each token's text from number `known` on, and the seconds that they took.

    Few texts are decoded at a time: tokenizers are for one thread.
    """
    tokenizer, texts, seconds = generator.provider.tokenizer, list[str](), 0.0
    for first in range(known, len(tokens), TEXTS_AT_A_TIME):
        before = max(0, first - DECODE_CONTEXT)
        part = tokens[before : first + TEXTS_AT_A_TIME]
        find_them = partial(token_texts, tokenizer, part)
        found, took = generator.between_steps(partial(_timed, find_them))
        texts += found[first - before :]
        seconds += took
    return texts, seconds


def at_half(generator: BoundedGenerator, name: str) -> dict[str, Any]:
    """The tokens that a conversation would hold if it had to shrink now, as idle ones do.

    Raises:
        Unknown: It is not an idle conversation.
        ValueError: It cannot shrink so far.
    """

    def look() -> dict[str, Any]:
        idle = find(generator, name)
        if any(entry.policy.unit == "layer" for _, entry in bounded_layers(idle.cache)):
            require_alone('with unit="layer" all of them choose the lost tokens together.')
        cache = copy.deepcopy(idle.cache)
        shrink(cache)
        mx.eval([entry.state for entry in cache])
        layers = _told(remembered(cache, token_count(idle.key)))
        return {"bytes": sum(entry.nbytes for entry in cache), "layers": layers}

    told: dict[str, Any] = generator.between_steps(look)
    return told


def change_pins(generator: BoundedGenerator, name: str, body: Any) -> dict[str, Any]:
    """Pin or unpin tokens of an idle conversation.

    Args:
        generator: The server's generator.
        name: The name of the conversation's answer.
        body: The request's body: {"pin": spans} or {"unpin": spans}, or {"unpin": "all"}.

    Raises:
        Unknown: It is not an idle conversation.
        ValueError: The body is invalid, or there is nothing or no room to pin.
    """
    what = _asked(body)
    require_alone("pins are a request's (its field mlx_h2o.pins), or the server's (--pin).")

    def change() -> dict[str, Any]:
        idle = find(generator, name)
        everything = what == "unpin" and body[what] == "all"
        spans = None if everything else checked_spans(what, body[what])
        T = token_count(idle.key)
        if spans and spans[-1][1] > T:
            raise ValueError(f"{what} names position {spans[-1][1] - 1}; there are {T} tokens.")
        answer = PinAnswer()
        if what == "pin":
            assert spans is not None
            layers = bounded_entries(idle.cache)
            answer = PinAnswer.of_all(layer.pins_beside(spans)[1] for layer in layers)
            if not (answer.pinned or answer.partly):
                raise ValueError("No head holds these tokens any more, so they cannot be pinned.")
            generator.conversations.change(idle, lambda cache: pin(cache, spans))
        else:
            generator.conversations.change(idle, lambda cache: unpin(cache, spans))
        return {
            "pins": _pins(idle.cache),
            "partly": list(answer.partly),
            "gone": list(answer.gone),
        }

    told: dict[str, Any] = generator.between_steps(change)
    return told


def _asked(body: Any) -> str:
    """The one of CHANGES that a body names."""
    if not isinstance(body, Mapping) or len(body) != 1 or next(iter(body)) not in CHANGES:
        raise ValueError(
            'The body must be {"pin": [[first, one past the last], ...]} or the same of "unpin".'
        )
    if not body[what := str(next(iter(body)))]:
        raise ValueError(f"{what} names no tokens.")
    return what
