"""The page and the endpoints that it reads, for clients on the machine that serves."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mlx_h2o.serve import looking
from mlx_h2o.serve.bodies import parsed
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.job import Busy

#: What the endpoints' paths begin with.
ROOT = "/h2o/"
#: Said by browsers of requests that come from pages of others.
ELSEWHERE = ("cross-site", "same-site")
#: No failures to who watches an answer: its prompt is still read, or it was stopped just now.
NOTHING_YET = (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE)

Told = dict[str, Any]


class NotHere(Exception):
    """A request that is not answered.

    Args:
        status: Of the answer.
        why: For the client.
    """

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether this name, or this address, is always the machine itself."""
    host = host.removeprefix("[").removesuffix("]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def require_here(peer: str, host: str) -> None:
    """Let through clients on this machine that ask it by a name of its own.

    Conversations of all clients are told, and there is no password. A name that is
    not this machine's own may lead here all the same (DNS rebinding), so it is looked at too.

    Args:
        peer: Address of the client.
        host: By which it calls the server, with its port.

    Raises:
        NotHere: It is another machine, or another name.
    """
    if not (is_loopback(peer) and is_loopback(urlsplit(f"//{host}").hostname or "")):
        raise NotHere(
            HTTPStatus.FORBIDDEN,
            "Conversations are shown on the machine that serves alone, under localhost or "
            "127.0.0.1. From another one: ssh -L 8080:localhost:8080 THAT_MACHINE.",
        )


def require_own_page(origin: str | None, site: str | None, welcome: Callable[[str], bool]) -> None:
    """Let through programs, and the page itself.

    Args:
        origin: Of the page that asks, if a browser says one.
        site: How near that is to the server, if a browser says it (Sec-Fetch-Site).
        welcome: Whether a page of some origin may ask.

    Raises:
        NotHere: A browser says that a page of somewhere else asks.
    """
    if site in ELSEWHERE if origin is None else not welcome(origin):
        raise NotHere(HTTPStatus.FORBIDDEN, "Pages of other origins are refused.")


def got(generator: BoundedGenerator, path: str) -> Told | None:
    """What GET of an endpoint gives; None where an answer is watched of which nothing can be told.

    Args:
        generator: Of the server.
        path: As it was asked for, with its query.

    Raises:
        NotHere: There is no such thing, or it cannot be told.
    """
    asked = urlsplit(path)
    watched = parse_qs(asked.query).get("known")
    known = watched[-1] if watched else "0"
    if not (known.isascii() and known.isdecimal() and len(known) < 10):
        raise NotHere(
            HTTPStatus.BAD_REQUEST, f"known must be a whole number below 10^9; got {known[:60]!r}."
        )
    match asked.path.removeprefix(ROOT).split("/"):
        case ["conversations"]:
            return _answered(lambda: looking.overview(generator))
        case ["conversations", name]:
            try:
                return _answered(lambda: looking.conversation(generator, name, int(known)))
            except NotHere as error:
                if watched and error.status in NOTHING_YET:
                    return None
                raise
        case ["conversations", name, "half"]:
            return _answered(lambda: looking.at_half(generator, name))
        case _:
            raise NotHere(HTTPStatus.NOT_FOUND, "There is nothing here.")


def posted(generator: BoundedGenerator, path: str, body: bytes) -> Told:
    """What POST to an endpoint gives; arguments and errors as in `got`."""
    match urlsplit(path).path.removeprefix(ROOT).split("/"):
        case ["conversations", name, "pins"]:
            try:
                asked = parsed(body)
            except ValueError as error:
                raise NotHere(HTTPStatus.BAD_REQUEST, str(error)) from error
            return _answered(lambda: looking.change_pins(generator, name, asked))
        case _:
            raise NotHere(HTTPStatus.NOT_FOUND, "There is nothing here.")


def _answered(look: Callable[[], Told]) -> Told:
    """What it gives; what it raises as the status that says so."""
    try:
        return look()
    except looking.Unknown as error:
        raise NotHere(HTTPStatus.NOT_FOUND, str(error)) from error
    except ValueError as error:
        raise NotHere(HTTPStatus.BAD_REQUEST, str(error)) from error
    except Busy as error:
        raise NotHere(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
