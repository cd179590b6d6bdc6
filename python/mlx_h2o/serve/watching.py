"""The page's endpoints, for clients on the server's own machine."""

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

#: The prefix of the endpoints' paths.
ROOT = "/h2o/"
#: Values of Sec-Fetch-Site for requests from pages of other sites.
ELSEWHERE = ("cross-site", "same-site")
#: Statuses that are no failure while an answer is watched: its prompt is still read, or it was
#: stopped just now.
NOTHING_YET = (HTTPStatus.NOT_FOUND, HTTPStatus.SERVICE_UNAVAILABLE)

Told = dict[str, Any]


class NotHere(Exception):
    """A request that is refused.

    Args:
        status: The answer's HTTP status.
        why: The message for the client.
    """

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether this name, or this address, always means the machine itself."""
    host = host.removeprefix("[").removesuffix("]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def require_here(peer: str, host: str) -> None:
    """Let through clients on this machine that address it by a name of its own.

    All clients' conversations are shown, and there is no password. A name that is not this
    machine's own may lead here all the same (DNS rebinding), so the name is checked too.

    Args:
        peer: The client's address.
        host: The name by which it addresses the server, with its port.

    Raises:
        NotHere: The client is on another machine, or uses another name.
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
        origin: The origin of the page that asks, if a browser sends one.
        site: The relation of that page to the server, if a browser sends it (Sec-Fetch-Site).
        welcome: Whether a page of some origin may ask.

    Raises:
        NotHere: A browser says that the page comes from elsewhere.
    """
    if site in ELSEWHERE if origin is None else not welcome(origin):
        raise NotHere(HTTPStatus.FORBIDDEN, "Pages of other origins are refused.")


def got(generator: BoundedGenerator, path: str) -> Told | None:
    """The result of GET for an endpoint; None for an answer about which nothing is known yet.

    Args:
        generator: The server's generator.
        path: The requested path, with its query.

    Raises:
        NotHere: There is no such endpoint, or it cannot answer.
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
    """The result of POST to an endpoint; arguments and errors as in `got`."""
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
    """The result of `look`; its errors become HTTP statuses."""
    try:
        return look()
    except looking.Unknown as error:
        raise NotHere(HTTPStatus.NOT_FOUND, str(error)) from error
    except ValueError as error:
        raise NotHere(HTTPStatus.BAD_REQUEST, str(error)) from error
    except Busy as error:
        raise NotHere(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
