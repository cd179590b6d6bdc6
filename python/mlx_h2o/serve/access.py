"""Who may ask: the key, pages of other origins, and the page's own endpoints."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from mlx_h2o.serve.errors import ApiError

#: The prefix of the page's endpoints.
PAGE_ROOT = "/h2o/"
#: Paths that need no key.
FREE = ("/health",)
#: Values of Sec-Fetch-Site for requests from pages of other sites.
OTHER_SITES = ("cross-site", "same-site")


@dataclass(frozen=True)
class AccessRules:
    """Who may send requests, and how large they may be.

    Attributes:
        key: The key that every request needs, or None.
        origins: Web pages that may ask beside our own; "*" is all.
        largest: The most bytes of a request's body.
        patience: Seconds that a body may take to arrive.
    """

    key: str | None = None
    origins: Sequence[str] = ()
    largest: int = 8 << 20
    patience: float = 60.0

    def has_key(self, request: Request) -> bool:
        """Whether a request has the key; the time that takes reveals nothing about the key."""
        assert self.key is not None
        way, _, value = request.headers.get("authorization", "").partition(" ")
        secret = value.strip().encode("latin-1", "replace")
        if way.lower() == "basic":
            try:
                secret = base64.b64decode(secret, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return False
        elif way.lower() != "bearer":
            return False
        return hmac.compare_digest(secret, self.key.encode())

    def is_welcome(self, request: Request, origin: str) -> bool:
        """Whether a page of this origin may ask: our own, or one that the command line names."""
        own = urlsplit(origin).netloc == request.headers.get("host", "")
        return "*" in self.origins or origin in self.origins or own

    def require_page_reader(self, request: Request) -> None:
        """Let through those who may see all clients' conversations.

        With a key, whoever has it. Without one, clients on this machine that address it by a name
        of its own: another name may lead here all the same (DNS rebinding).

        Raises:
            ApiError: It is someone else, or a page of another origin.
        """
        peer = request.client.host if request.client else ""
        host = urlsplit(f"//{request.headers.get('host', '')}")
        if self.key is None and not (is_loopback(peer) and is_loopback(host.hostname or "")):
            port = (request.scope.get("server") or ("", 8080))[1]
            raise ApiError(
                403,
                "Without a key, conversations are shown only on the machine that serves, under "
                "localhost or 127.0.0.1. Start the server with --api-key to see them from "
                f"elsewhere, or: ssh -L {port}:localhost:{port} THAT_MACHINE.",
            )
        origin, site = (request.headers.get(name) for name in ("origin", "sec-fetch-site"))
        elsewhere = site in OTHER_SITES if origin is None else not self.is_welcome(request, origin)
        # A link from elsewhere may open the page, which shows nothing by itself.
        if elsewhere and request.url.path != "/":
            raise ApiError(403, "Pages of other origins are refused.")


class AccessMiddleware:
    """Starlette's middleware that refuses clients without the key, and pages of other origins.

    Args:
        app: The application behind it.
        rules: The rules.
    """

    def __init__(self, app: Callable[..., Any], rules: AccessRules):
        self._app, self._rules = app, rules

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI call."""
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        close = {"Connection": "close"}  # the body was not read
        origin = request.headers.get("origin")
        if request.method == "POST" and origin and not self._rules.is_welcome(request, origin):
            why = "Pages of other origins are not served; see --allowed-origins."
            return error_response(ApiError(403, why, headers=close))
        path = request.url.path
        if self._rules.key is None or path in FREE or self._rules.has_key(request):
            return None
        # A browser asks its user for a name, which may be anything, and for the key.
        own_page = path == "/" or path.startswith(PAGE_ROOT)
        way = 'Basic realm="mlx-h2o", charset="UTF-8"' if own_page else "Bearer"
        why = "This server needs its key: Authorization: Bearer KEY."
        headers = {"WWW-Authenticate": way, **close}
        return error_response(ApiError(401, why, code="invalid_api_key", headers=headers))


def error_response(error: ApiError) -> Response:
    """An error as an HTTP answer."""
    headers = {"Content-Type": "application/json", **error.headers}
    return Response(error.body(), error.status, headers)


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
