"""What a rival is, and all of them in the board's order."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.board.reading import Read

OURS = "mlx-h2o"
FULL = "full cache"


@dataclass(frozen=True)
class Rival:
    """A cache or a method on the board.

    Attributes:
        name: The rival's name.
        source: A link to its paper or code.
        settings: Its settings in words, and where they come from.
        read: Reads a task through it.
        keeps_all: Whether it keeps every token, so that its bytes are its own.
        prompts_only: Whether it compresses a prompt that is known whole, and then keeps what
            follows: its bytes are equal at the prompt's end, and grow by the continuation.
    """

    name: str
    source: str
    settings: str
    read: Read
    keeps_all: bool = False
    prompts_only: bool = False
