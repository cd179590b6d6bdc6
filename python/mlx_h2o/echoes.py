"""A text for calibration in which much is said twice, as it is in conversations.

Prose hardly ever asks for what was said once, long ago: heads that copy from afar look idle in it
and get few slots, and a fact that is asked for later is gone. So stretches of the text come again
further on, from near and far. Related: DuoAttention (arXiv 2410.10819) finds such heads by passkeys
planted in prose.
"""

from __future__ import annotations

from collections.abc import Sequence

#: In each so many tokens, so many are an echo.
PERIOD, ECHO = 128, 24
# Multiples of this, modulo 1, are spread evenly, however many there are.
GOLDEN = (5**0.5 - 1) / 2


def with_echoes(tokens: Sequence[int], length: int) -> list[int]:
    """As many pages of `length` tokens as the text has, each with stretches of itself said again.

    Args:
        tokens: Of the text; what the echoes take up is left off its end.
        length: Of a page. A text that is shorter makes one page of its own length.
    """
    length = min(length, len(tokens))
    rest = list(tokens)
    pages: list[int] = []
    for _ in range(len(tokens) // max(length, 1)):
        page: list[int] = []
        while len(page) < length:
            prose = min(PERIOD - ECHO, length - len(page))
            page += rest[:prose]
            del rest[:prose]
            page += _echo(page, min(ECHO, length - len(page)))
        pages += page
    return pages


def _echo(page: Sequence[int], count: int) -> list[int]:
    """So many tokens that the page has had, not its newest."""
    echoes = len(page) // PERIOD + 1
    start = int(echoes * GOLDEN % 1 * max(len(page) - 2 * ECHO, 0))
    return list(page[start : start + count])
