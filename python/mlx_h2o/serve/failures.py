"""What becomes of requests when something breaks: who is told, and what /health says."""

from __future__ import annotations

from queue import Queue
from typing import Any

from mlx_lm.server import GenerationContext


class StepFailed(Exception):
    """The step of a request's batch raised; its caches are in no known state."""

    def __init__(self, error: BaseException):
        super().__init__(f"Generating broke off: {type(error).__name__}: {error}")


class Unanswered(Exception):
    """Why a request gets no answer at all.

    Attributes:
        status: Of the answer.
    """

    def __init__(self, error: Exception, healthy: bool):
        super().__init__(str(error))
        self.status = 500 if isinstance(error, StepFailed) else 400 if healthy else 503


class Answers:
    """A request's queue, as mlx-lm's generation loop fills it.

    Args:
        queue: That the request's handler reads.
    """

    def __init__(self, queue: Queue[Any]):
        self._queue = queue
        self._context: GenerationContext | None = None

    def put(self, answer: Any) -> None:
        """The next answer: first the context, then tokens, None at the end; or an exception."""
        if isinstance(answer, GenerationContext):
            self._context = answer
        self._queue.put(answer)

    def fail(self, error: StepFailed) -> None:
        """Tell the handler, and have the loop remove the request."""
        if self._context is not None:
            self._context.stop()
        self._queue.put(error)


class Health:
    """What is known of the generation thread.

    Attributes:
        failures: Steps that raised.
        last: What the last of them said; empty: none did.
        works: Whether the last step came to its end.
    """

    def __init__(self) -> None:
        self.failures, self.last, self.works = 0, "", True

    def failed(self, error: BaseException) -> None:
        """A step raised."""
        self.failures += 1
        self.last, self.works = f"{type(error).__name__}: {error}", False

    def worked(self) -> None:
        """A step came to its end."""
        self.works = True

    def told(self, loaded: bool, alive: bool) -> dict[str, Any]:
        """What /health says.

        Args:
            loaded: Whether the model is there, or cannot be loaded.
            alive: Whether the generation thread runs.
        """
        status = "ok" if self.works else "failing"
        if not alive:
            status = "unavailable"
        elif not loaded:
            status = "loading"
        return {"status": status, "failures": self.failures, "last_failure": self.last or None}
