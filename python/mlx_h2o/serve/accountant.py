"""The bound of KV memory: requests reserve their bytes, idle conversations share the rest."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from mlx_h2o.serve.ticket import Ticket

#: Finished requests by which the time until a place is free is estimated.
REMEMBERED = 16


@dataclass(frozen=True)
class Bytes:
    """What is held at one moment.

    Attributes:
        bound: For everything, or None.
        running: Of caches that requests use.
        idle: Of conversations and prefixes that none uses.
        reserved: That running requests may take at most.
        peak: Most of running and idle together so far.
    """

    bound: int | None
    running: int
    idle: int
    reserved: int
    peak: int


class Accountant:
    """Bytes of all conversations, prefixes and batches, and who waits for some.

    A request runs only once all that its cache may ever take is reserved, so nothing that happens
    while it runs can exceed the bound. What is measured is told here too, running and idle caches
    in one call, and everyone who shows bytes reads them here: a cache that leaves a batch and
    becomes a conversation is in one of the two sums, never in both.

    Args:
        bound: Bytes for everything, or None: no bound.
        queue: Requests that may wait.
    """

    def __init__(self, bound: int | None, queue: int):
        self.bound, self.queue = bound, queue
        self._lock = threading.Lock()
        self._running: dict[Ticket, int] = {}
        self._waiting: set[Ticket] = set()
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._running_bytes = self._idle_bytes = self._peak = 0

    # -- waiting ----------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that were not admitted yet."""
        return len(self._waiting)

    def enter(self, ticket: Ticket) -> bool:
        """Let a request wait, with all of its tickets; False where the queue is full."""
        with self._lock:
            together = ticket.together
            if len(self._waiting) + len(together) > self.queue and not self._free_for(ticket):
                return False
            self._waiting.update(together)
            return True

    def leave(self, ticket: Ticket) -> None:
        """A request waits no longer, whatever became of it."""
        with self._lock:
            self._waiting.discard(ticket)

    @property
    def retry_after(self) -> int:
        """Seconds after which a place may be free."""
        seconds = list(self._seconds) or [1.0]
        return max(1, round(sum(seconds) / len(seconds)))

    # -- running ----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def reserved(self) -> int:
        """Bytes that running requests may take at most."""
        return sum(self._running.values())

    @property
    def left_for_idle(self) -> int | None:
        """Bytes that idle conversations may hold now; None: no bound."""
        return None if self.bound is None else self.bound - self.reserved

    def weighed(self, running: int, idle: int) -> None:
        """What all caches hold, measured between two steps.

        Args:
            running: Bytes of those that requests use.
            idle: Of all others.
        """
        with self._lock:
            self._running_bytes, self._idle_bytes = running, idle
            self._peak = max(self._peak, running + idle)

    def bytes(self) -> Bytes:
        """What is held, by the last measurement."""
        with self._lock:
            reserved = sum(self._running.values())
            return Bytes(self.bound, self._running_bytes, self._idle_bytes, reserved, self._peak)

    def _free_for(self, ticket: Ticket) -> bool:
        return not self._waiting and self.can_admit(ticket)

    def can_admit(self, ticket: Ticket) -> bool:
        """Whether a request can run beside those that do, once idle conversations made room.

        Those that were asked for together are let in together.
        """
        if self.bound is None or ticket in self._running:
            return True
        return self.reserved + sum(one.need for one in ticket.together) <= self.bound

    def admit(self, ticket: Ticket) -> None:
        """Reserve a request's bytes, and those of the ones that were asked for together with it.

        Idle conversations must make room before they run.
        """
        with self._lock:
            self._waiting.discard(ticket)
            if ticket not in self._running:
                self._running |= {one: one.need for one in ticket.together}

    def release(self, ticket: Ticket, seconds: float | None = None) -> None:
        """A request's last token is out, or it failed; doing it twice changes nothing.

        Args:
            ticket: Its.
            seconds: How long it took from its admission, if it came to its end.
        """
        with self._lock:
            self._waiting.discard(ticket)
            if self._running.pop(ticket, None) is not None and seconds is not None:
                self._seconds.append(seconds)
            if not self._running:
                self._running_bytes = 0
