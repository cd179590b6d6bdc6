"""The bound of KV memory: requests reserve their bytes, idle conversations share the rest."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from mlx_h2o.serve.ticket import Ticket

#: Finished requests from which the waiting time for a place is estimated.
REMEMBERED = 16


@dataclass(frozen=True)
class Bytes:
    """The bytes held at one moment.

    Attributes:
        bound: The bound for everything, or None.
        running: Bytes of caches that requests use.
        idle: Bytes of conversations and prefixes that no request uses.
        reserved: The most bytes that running requests may take.
        peak: The largest sum of running and idle so far.
    """

    bound: int | None
    running: int
    idle: int
    reserved: int
    peak: int


class Accountant:
    """Bytes of all conversations, prefixes and batches, and the requests that wait for some.

    A request runs only once all bytes that its cache may ever take are reserved, so nothing that
    happens while it runs can exceed the bound. Measured bytes are noted here too, running and idle
    caches in one call, and everyone who shows bytes reads them here: a cache that leaves a batch
        and
    becomes a conversation is in one of the two sums, never in both.

    Args:
        bound: Bytes for everything; None means no bound.
        queue: The most requests that may wait.
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
        """The number of requests that are not admitted yet."""
        return len(self._waiting)

    def enter(self, ticket: Ticket) -> bool:
        """Let a request wait, with all of its tickets; False if the queue is full."""
        with self._lock:
            together = ticket.together
            if len(self._waiting) + len(together) > self.queue and not self._free_for(ticket):
                return False
            self._waiting.update(together)
            return True

    def leave(self, ticket: Ticket) -> None:
        """Remove a request from the queue, whatever became of it."""
        with self._lock:
            self._waiting.discard(ticket)

    @property
    def retry_after(self) -> int:
        """Estimated seconds until a place is free."""
        seconds = list(self._seconds) or [1.0]
        return max(1, round(sum(seconds) / len(seconds)))

    # -- running ----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """The number of running requests."""
        return len(self._running)

    @property
    def reserved(self) -> int:
        """The most bytes that running requests may take."""
        return sum(self._running.values())

    @property
    def left_for_idle(self) -> int | None:
        """The most bytes that idle conversations may hold now; None means no bound."""
        return None if self.bound is None else self.bound - self.reserved

    def weighed(self, running: int, idle: int) -> None:
        """Note the bytes of all caches, measured between two steps.

        Args:
            running: Bytes of the caches that requests use.
            idle: Bytes of all other caches.
        """
        with self._lock:
            self._running_bytes, self._idle_bytes = running, idle
            self._peak = max(self._peak, running + idle)

    def bytes(self) -> Bytes:
        """The bytes held, by the last measurement."""
        with self._lock:
            reserved = sum(self._running.values())
            return Bytes(self.bound, self._running_bytes, self._idle_bytes, reserved, self._peak)

    def _free_for(self, ticket: Ticket) -> bool:
        return not self._waiting and self.can_admit(ticket)

    def can_admit(self, ticket: Ticket) -> bool:
        """Whether a request can run beside the running ones, once idle conversations have made
        room.

        The tickets of one request are admitted together.
        """
        if self.bound is None or ticket in self._running:
            return True
        return self.reserved + sum(one.need for one in ticket.together) <= self.bound

    def admit(self, ticket: Ticket) -> None:
        """Reserve the bytes of a ticket, and of all tickets of the same request.

        Idle conversations must make room before the request runs.
        """
        with self._lock:
            self._waiting.discard(ticket)
            if ticket not in self._running:
                self._running |= {one: one.need for one in ticket.together}

    def release(self, ticket: Ticket, seconds: float | None = None) -> None:
        """Free a request's bytes after its last token, or its failure; repeating it changes
        nothing.

        Args:
            ticket: The request's ticket.
            seconds: Seconds since its admission, if it was completed.
        """
        with self._lock:
            self._waiting.discard(ticket)
            if self._running.pop(ticket, None) is not None and seconds is not None:
                self._seconds.append(seconds)
            if not self._running:
                self._running_bytes = 0
