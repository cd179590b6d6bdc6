"""What the page shows: conversations, which tokens each layer still has, and their pins.

A view looks at the scheduler on the thread that generates, between two steps of the model. Long
texts are decoded in small parts, each between two steps.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_h2o.caches.conversation import bounded_entries, pin, unpin
from mlx_h2o.chat.retention import (
    DECODE_CONTEXT,
    LayerMemory,
    bounded_layers,
    token_texts,
    tokens_by_layer,
)
from mlx_h2o.layer.pins_and_turns import PinAnswer
from mlx_h2o.serve.conversations import Conversation, shrink
from mlx_h2o.serve.keys import tokens_of
from mlx_h2o.serve.model import ServedModel
from mlx_h2o.serve.ranks import processes, require_alone
from mlx_h2o.serve.scheduler import Scheduler
from mlx_h2o.slots.pins import Span, checked_spans, joined

#: Tokens whose texts are decoded between two steps: few enough that no step waits long.
TEXTS_AT_A_TIME = 512
#: The changes that can be made to pins.
CHANGES = ("pin", "unpin")

#: Calls a function on the thread that generates, between two steps.
Between = Callable[[Callable[[], Any]], Awaitable[Any]]
View = Callable[[Scheduler, Between], Awaitable[Any]]


def view(method: str, path: str, start: str | None, body: Any) -> View:
    """The view, or the change, for a path below the page's root.

    Args:
        method: GET, or POST for a change.
        path: The path.
        start: The number of first tokens whose texts are not wanted, as text.
        body: The request's JSON.

    Raises:
        LookupError: There is no such view.
        ValueError: `start` is no number.
    """
    start = start or "0"
    if not (start.isascii() and start.isdecimal() and len(start) < 10):
        raise ValueError(f"from must be a whole number below 10^9; got {start[:60]!r}.")
    match [method, *path.split("/")]:
        case ["GET", "conversations"]:
            return lambda scheduler, between: between(partial(overview, scheduler))
        case ["GET", "conversations", name] if name:
            return lambda scheduler, between: conversation(scheduler, between, name, int(start))
        case ["GET", "conversations", name, "half"]:
            return lambda scheduler, between: between(partial(at_half, scheduler, name))
        case ["POST", "conversations", name, "pins"]:
            return lambda scheduler, between: between(partial(change_pins, scheduler, name, body))
    raise LookupError("There is nothing here.")


def overview(scheduler: Scheduler) -> dict[str, Any]:
    """The idle conversations of loaded models, the last used first, and the bytes of everything."""
    ledger, served = scheduler.ledger, scheduler.models.with_fingerprint
    current = ledger.current
    return {
        "models": scheduler.settings.models,
        "processes": processes(),
        "bytes": {
            "bound": ledger.bound,
            "running": current.running,
            "reserved": ledger.reserved,
            "idle": current.idle,
        },
        "requests": {"running": ledger.running, "waiting": scheduler.waiting},
        "conversations": [
            _outline(entry, model)
            for entry in scheduler.conversations.listed()
            if (model := served(entry.place.mark.model)) is not None
        ],
    }


def _outline(entry: Conversation, served: ServedModel) -> dict[str, Any]:
    last = entry.turns[-1]
    return {
        "model": served.name,
        "id": last.name,
        "title": last.title,
        "tokens": entry.count,
        "bytes": entry.nbytes,
        "shrunk": entry.shrunk,
    }


async def conversation(scheduler: Scheduler, between: Between, name: str, start: int) -> Any:
    """One conversation's tokens, and for each layer how many heads hold each of them.

    The conversation is idle, or in the middle of an answer.

    Args:
        scheduler: The server's scheduler.
        between: Calls a function between two steps.
        name: The name of its answer.
        start: The number of first tokens whose texts are not wanted.

    Raises:
        LookupError: There is no conversation of this name.
    """
    state, seconds = await between(partial(_timed, partial(_state, scheduler, name)))
    outline, tokenizer, layers, tokens = state
    outline["layers"] = _as_json(layers)
    outline["texts"] = texts = list[str]()
    for first in range(start, len(tokens), TEXTS_AT_A_TIME):
        before = max(0, first - DECODE_CONTEXT)
        decode = partial(token_texts, tokenizer, tokens[before : first + TEXTS_AT_A_TIME])
        more, took = await between(partial(_timed, decode))
        texts += more[first - before :]
        seconds += took
    return outline | {"seconds": seconds}


def _state(
    scheduler: Scheduler, name: str
) -> tuple[dict[str, Any], Any, list[LayerMemory], list[int]]:
    """A conversation's outline, its tokenizer, what its layers hold, and its tokens."""
    # If several processes share the model, computing the newest step may need all of them.
    running = scheduler.running(name) if processes() == 1 else None
    if running is not None:
        one, cache = running
        tokens, served = list(one.tokens), one.served
        outline: dict[str, Any] = {
            "model": served.name,
            "title": one.request.title,
            "tokens": len(tokens),
            "bytes": sum(entry.nbytes for _, entry in bounded_layers(cache)),
            "shrunk": False,
        }
    else:
        entry = _named(scheduler, name)
        served, cache, tokens = _served(scheduler, entry), entry.cache, tokens_of(entry.place.key)
        outline = _outline(entry, served)
        outline["messages"] = list(entry.turns[-1].messages) or None
    layers = bounded_layers(cache)
    outline |= {
        "id": name,
        "running": running is not None,
        "policy": layers[0][1].policy.name if layers else None,
        "processes": processes(),
        "evicted": sum(one.evicted for _, one in layers) / max(len(layers), 1),
        "pins": _pins(cache),
    }
    return outline, served.tokenizer, tokens_by_layer(cache, len(tokens)), tokens


def _timed(do: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `do`, and the seconds that it took on the thread that generates."""
    begun = time.perf_counter()
    return do(), time.perf_counter() - begun


def _named(scheduler: Scheduler, name: str) -> Conversation:
    entry = scheduler.conversations.named(name)
    if entry is None:
        raise LookupError(
            "There is no idle conversation of this name: it is being answered, has gone on under "
            "the name of a later answer, or made room for others."
        )
    return entry


def _served(scheduler: Scheduler, entry: Conversation) -> ServedModel:
    """A conversation's model."""
    served = scheduler.models.with_fingerprint(entry.place.mark.model)
    if served is None:
        raise LookupError("The model of this conversation has made room for another.")
    return served


def _as_json(layers: Sequence[LayerMemory]) -> list[dict[str, Any]]:
    return [
        {"layer": layer.layer, "heads": layer.heads, "holders": layer.holders.tolist()}
        for layer in layers
    ]


def _pins(cache: Sequence[Any]) -> list[Span]:
    """The spans pinned in some layer: a layer that has lost a token has no pin of it."""
    return list(joined(span for _, entry in bounded_layers(cache) for span in entry.pins))


def at_half(scheduler: Scheduler, name: str) -> dict[str, Any]:
    """The tokens that a conversation would hold if it had to shrink now, as idle ones do.

    Raises:
        LookupError: It is not an idle conversation.
        ValueError: It cannot shrink so far.
    """
    entry = _named(scheduler, name)
    if any(one.policy.unit == "layer" for _, one in bounded_layers(entry.cache)):
        require_alone('with unit="layer" all of them choose the lost tokens together.')
    cache = copy.deepcopy(entry.cache)
    shrink(cache)
    mx.eval([one.state for one in cache])
    layers = _as_json(tokens_by_layer(cache, entry.count))
    return {"bytes": sum(one.nbytes for one in cache), "layers": layers}


def change_pins(scheduler: Scheduler, name: str, body: Any) -> dict[str, Any]:
    """Pin or unpin tokens of an idle conversation.

    Args:
        scheduler: The server's scheduler.
        name: The name of the conversation's answer.
        body: The request's body: {"pin": spans} or {"unpin": spans}, or {"unpin": "all"}.

    Raises:
        LookupError: It is not an idle conversation.
        ValueError: The body is invalid, or there is nothing or no room to pin.
    """
    what = _change_in(body)
    require_alone("pins are a request's (its field mlx_h2o.pins), or the server's (--pin-role).")
    entry = _named(scheduler, name)
    everything = what == "unpin" and body[what] == "all"
    spans = None if everything else checked_spans(what, body[what])
    if spans and spans[-1][1] > entry.count:
        last = spans[-1][1] - 1
        raise ValueError(f"{what} names position {last}; there are {entry.count} tokens.")
    answer = PinAnswer()
    if what == "pin":
        assert spans is not None
        layers = bounded_entries(entry.cache)
        answer = PinAnswer.of_all(layer.pins_beside(spans)[1] for layer in layers)
        if not (answer.pinned or answer.partly):
            raise ValueError("No head holds these tokens any more, so they cannot be pinned.")
        scheduler.conversations.change(entry, lambda cache: pin(cache, spans))
    else:
        scheduler.conversations.change(entry, lambda cache: unpin(cache, spans))
    return {"pins": _pins(entry.cache), "partly": list(answer.partly), "gone": list(answer.gone)}


def _change_in(body: Any) -> str:
    """The one of CHANGES that a body names."""
    if not isinstance(body, Mapping) or len(body) != 1 or next(iter(body)) not in CHANGES:
        raise ValueError(
            'The body must be {"pin": [[first, one past the last], ...]} or the same of "unpin".'
        )
    if not body[what := str(next(iter(body)))]:
        raise ValueError(f"{what} names no tokens.")
    return what
