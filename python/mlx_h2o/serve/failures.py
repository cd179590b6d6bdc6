"""Failures: how requests learn of a failed step, and what /health reports."""

from __future__ import annotations

from queue import Queue
from typing import Any

from mlx_lm.server import GenerationContext


class StepFailed(Exception):
    """The step of a request's batch raised; its caches are in an unknown state."""

    def __init__(self, error: BaseException):
        super().__init__(f"Generating broke off: {type(error).__name__}: {error}")


class Unanswered(Exception):
    """The reason why a request gets no answer at all.

    Attributes:
        status: The answer's HTTP status.
    """

    def __init__(self, error: Exception, healthy: bool):
        super().__init__(str(error))
        self.status = 500 if isinstance(error, StepFailed) else 400 if healthy else 503


class Answers:
    """A request's queue, as mlx-lm's generation loop fills it.

    Args:
        queue: The queue that the request's handler reads.
    """

    def __init__(self, queue: Queue[Any]):
        self._queue = queue
        self._context: GenerationContext | None = None

    def put(self, answer: Any) -> None:
        """Put the next item: first the context, then tokens, None at the end; or an exception."""
        if isinstance(answer, GenerationContext):
            self._context = answer
        self._queue.put(answer)

    def fail(self, error: StepFailed) -> None:
        """Tell the handler, and make the loop remove the request."""
        if self._context is not None:
            self._context.stop()
        self._queue.put(error)


class Health:
    """The state of the generation thread.

    Attributes:
        failures: The number of steps that raised.
        last: The last error's message; empty if there was none.
        works: Whether the last step was completed.
    """

    def __init__(self) -> None:
        self.failures, self.last, self.works = 0, "", True

    def failed(self, error: BaseException) -> None:
        """Note that a step raised."""
        self.failures += 1
        self.last, self.works = f"{type(error).__name__}: {error}", False

    def worked(self) -> None:
        """Note that a step was completed."""
        self.works = True

    def told(self, loaded: bool, alive: bool) -> dict[str, Any]:
        """The body of /health.

        Args:
            loaded: Whether loading the model has ended, well or not.
            alive: Whether the generation thread runs.
        """
        status = "ok" if self.works else "failing"
        if not alive:
            status = "unavailable"
        elif not loaded:
            status = "loading"
        return {"status": status, "failures": self.failures, "last_failure": self.last or None}
