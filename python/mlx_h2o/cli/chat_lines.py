"""A person's messages: edited lines with a history on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial


def line_reader(prompt: str) -> Callable[[], str]:
    """A function that reads one message; pasted lines are one message.

    It raises EOFError at an end of file, KeyboardInterrupt at Ctrl-C.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return partial(input, prompt)
    from prompt_toolkit import PromptSession

    read: Callable[[], str] = PromptSession(prompt).prompt
    return read
