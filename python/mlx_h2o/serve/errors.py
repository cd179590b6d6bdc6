"""Errors as clients read them, in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Mapping

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused, or an answer that broke off.

    Args:
        status: The answer's HTTP status.
        message: The reason, for the client.
        param: The field that it is about, or None.
        code: OpenAI's name of the error; the status if it has none.
        headers: Additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The error as JSON."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": str(self),
            "type": _KINDS.get(self.status, usual),
            "param": self.param,
            "code": self.code or self.status,
        }
        return json.dumps({"error": error}).encode()


class NotLoaded(ValueError):
    """The model cannot be loaded."""
