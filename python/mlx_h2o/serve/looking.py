"""What idle conversations are told of: their text, what every layer still holds of it, their pins.

Everything here that touches caches runs on the thread that generates, between two steps.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_h2o.conversations import bounded_entries, pin, unpin
from mlx_h2o.inspection import DECODE_CONTEXT, bounded_layers, token_texts
from mlx_h2o.pinning import PinAnswer
from mlx_h2o.pins import Span, checked_spans, joined
from mlx_h2o.remembered import remembered
from mlx_h2o.serve.conversations import Idle, shrink
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.sessions import token_count, tokens_of

#: Tokens whose texts are found between two steps: few enough that no step waits long.
TEXTS_AT_A_TIME = 512
#: What may be done to pins.
CHANGES = ("pin", "unpin")


class Unknown(LookupError):
    """No idle conversation has this name."""


def overview(generator: BoundedGenerator) -> dict[str, Any]:
    """All idle conversations, the one used last first, and the bytes of everything."""
    accountant, conversations = generator.accountant, generator.conversations

    def look() -> dict[str, Any]:
        told = sorted(conversations.told(), key=lambda idle: -idle.used)
        return {
            "model": str(generator.cli_args.model),
            "bytes": {
                "bound": accountant.bound,
                "running": generator.running_bytes if accountant.running else 0,
                "reserved": accountant.reserved,
                "idle": conversations.nbytes,
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


def conversation(generator: BoundedGenerator, name: str) -> dict[str, Any]:
    """One conversation's tokens, and how many heads of each layer hold each of them.

    Raises:
        Unknown: It is no idle one.
    """

    def look() -> tuple[dict[str, Any], list[int]]:
        idle = find(generator, name)
        tokens, layers = tokens_of(idle.key), bounded_layers(idle.cache)
        told = {
            "policy": layers[0][1].policy.name if layers else None,
            "evicted": sum(entry.evicted for _, entry in layers) / max(len(layers), 1),
            "pins": _pins(idle.cache),
            "layers": _told(idle.cache, len(tokens)),
        }
        return _outline(idle) | told | {"id": name}, tokens

    told, tokens = generator.between_steps(look)
    told["texts"] = _texts(generator, tokens)
    return dict(told)


def find(generator: BoundedGenerator, name: str) -> Idle:
    """The idle conversation whose answer has this name.

    Raises:
        Unknown: There is none.
    """
    idle = generator.conversations.named(name)
    if idle is None:
        raise Unknown(
            "There is no idle conversation of this name: it is being answered, has gone on under "
            "the name of a later answer, or made room for others."
        )
    return idle


def _told(cache: Sequence[Any], T: int) -> list[dict[str, Any]]:
    return [
        {"layer": layer.layer, "heads": layer.heads, "held": layer.held.tolist()}
        for layer in remembered(cache, T)
    ]


def _pins(cache: Sequence[Any]) -> list[Span]:
    """What is pinned in some layer: one that has lost a token has no pin of it."""
    return list(joined(span for _, entry in bounded_layers(cache) for span in entry.pins))


def _texts(generator: BoundedGenerator, tokens: Sequence[int]) -> list[str]:
    """Each token's text, few at a time: tokenizers are for one thread."""
    tokenizer, texts = generator.provider.tokenizer, list[str]()
    for first in range(0, len(tokens), TEXTS_AT_A_TIME):
        before = max(0, first - DECODE_CONTEXT)
        part = tokens[before : first + TEXTS_AT_A_TIME]
        found = generator.between_steps(partial(token_texts, tokenizer, part))
        texts += found[first - before :]
    return texts


def at_half(generator: BoundedGenerator, name: str) -> dict[str, Any]:
    """What a conversation would hold if it had to shrink now, as idle ones do.

    Raises:
        Unknown: It is no idle one.
        ValueError: It cannot shrink so far.
    """

    def look() -> dict[str, Any]:
        idle = find(generator, name)
        cache = copy.deepcopy(idle.cache)
        shrink(cache)
        mx.eval([entry.state for entry in cache])
        layers = _told(cache, token_count(idle.key))
        return {"bytes": sum(entry.nbytes for entry in cache), "layers": layers}

    told: dict[str, Any] = generator.between_steps(look)
    return told


def change_pins(generator: BoundedGenerator, name: str, body: Any) -> dict[str, Any]:
    """Pin tokens of an idle conversation, or let go of some.

    Args:
        generator: Of the server.
        name: Of the conversation's answer.
        body: The request's: {"pin": spans} or {"unpin": spans}, or {"unpin": "all"}.

    Raises:
        Unknown: It is no idle one.
        ValueError: The body asks for something else, or there is nothing or no room to pin.
    """
    what = _asked(body)

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
            answer = PinAnswer.of_all(layer.pinned_settings(spans)[1] for layer in layers)
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
    """Which of CHANGES a body asks for."""
    if not isinstance(body, Mapping) or len(body) != 1 or next(iter(body)) not in CHANGES:
        raise ValueError(
            'The body must be {"pin": [[first, one past the last], ...]} or the same of "unpin".'
        )
    if not body[what := str(next(iter(body)))]:
        raise ValueError(f"{what} names no tokens.")
    return what
