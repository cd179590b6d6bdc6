"""The page at `GET /`: one file, which loads nothing and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache

from mlx_h2o.loading.load import PACKAGE

PAGE = PACKAGE / "data" / "serve.html"


@dataclass(frozen=True)
class Page:
    """A page with its headers.

    Attributes:
        body: The page's text.
        headers: The HTTP headers for the browser.
    """

    body: bytes
    headers: dict[str, str]


@cache
def page() -> Page:
    """The page, with a policy that allows only its own script and style."""
    text = PAGE.read_text(encoding="utf-8")
    script, style = (_digest(_inside(text, name)) for name in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text.encode(), headers)


def _inside(text: str, name: str) -> str:
    """The content of the page's one element of this name."""
    contents = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    assert len(contents) == 1, name
    return str(contents[0])


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
