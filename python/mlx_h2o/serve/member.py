"""One sequence of a batch: its state at the beginning, and how it is computed again.

A step that raises leaves the caches of all its sequences in an unknown state: some layers have
    taken
the new token in and others have not, evicted tokens cannot be brought back, and since MLX is lazy
an error may come to light a step after its cause. So these caches are not repaired. A sequence is
computed again by itself, from the caches that it was given, in the very chunks and single steps
of the first time; the tokens that it generated are not sampled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.sample_utils import greedy_sampler

from mlx_h2o.serve.ticket import Ticket


class Own:
    """A member's sampler or logits processor, whose errors end only this member.

    Other members share the step in which it is called, so it must return something: a processor
    the logits unchanged, a sampler the likeliest token. No client sees either.

    Args:
        call: mlx-lm's sampler or processor.
        instead: Takes the same arguments, and returns the substitute.
        failed: Called with the error.
    """

    def __init__(
        self,
        call: Callable[..., mx.array],
        instead: Callable[..., mx.array],
        failed: Callable[[Exception], None],
    ):
        self._call, self._instead, self._failed = call, instead, failed

    def __call__(self, *args: Any) -> mx.array:
        try:
            return self._call(*args)
        except Exception as error:
            self._failed(error)
            return self._instead(*args)


def own_sampler(sampler: Any, failed: Callable[[Exception], None]) -> Any:
    """A member's sampler in `Own`; mlx-lm's greedy one, which batches share, stays as it is."""
    if sampler is None or sampler is greedy_sampler:
        return sampler
    return Own(sampler, greedy_sampler, failed)


def own_processors(processors: Any, failed: Callable[[Exception], None]) -> list[Any]:
    """A member's logits processors, each in `Own`."""
    return [Own(call, lambda tokens, logits: logits, failed) for call in processors or ()]


class Retelling:
    """A sampler that returns known tokens first, and then calls the member's own sampler.

    Args:
        tokens: The tokens that were sampled already.
        member: The member whose tokens they are.
    """

    def __init__(self, tokens: Sequence[int], member: Member):
        self._left, self._sampler = list(reversed(tokens)), member.sampler
        self.processors: Any = tuple(self._later(call) for call in member.processors)

    def __call__(self, logprobs: mx.array) -> mx.array:
        if self._left:
            return mx.array([self._left.pop()], mx.uint32)
        sampled: mx.array = (self._sampler or greedy_sampler)(logprobs)
        return sampled

    def _later(self, call: Any) -> Any:
        # Processors may count their calls, and have seen the known tokens.
        return lambda tokens, logits: logits if self._left else call(tokens, logits)


@dataclass(eq=False)
class Member:
    """A sequence of a batch.

    Attributes:
        ticket: The ticket of its request.
        base: The caches that it was given, which its batch copied; None if they were released
            because their bytes were needed.
        known: The number of tokens that `base` holds.
        segments: Its prompt in the pieces in which it is read; the last has one token.
        sampler: The sampler of its tokens; None means the batch's.
        processors: The processors of its logits.
        stop: Its stop sequences.
        most: The most tokens that it generates.
        read: Tokens of its prompt that were read.
        said: Tokens that it generated and reported.
    """

    ticket: Ticket
    base: list[Any] | None
    known: list[int]
    segments: list[list[int]]
    sampler: Any
    processors: Any
    stop: Any
    most: int
    read: int = 0
    said: list[int] = field(default_factory=list)

    def says(self, token: int) -> None:
        """It generated and reported a token."""
        self.said.append(token)

    @property
    def length(self) -> int:
        """The number of tokens of its prompt."""
        return sum(map(len, self.segments))

    @property
    def generates(self) -> bool:
        """Whether its prompt was read to the end."""
        return self.read >= self.length

    def ends_segment(self, read: int) -> bool:
        """Whether a segment ends after `read` tokens of its prompt."""
        ends, end = set(), 0
        for segment in self.segments:
            ends.add(end := end + len(segment))
        return read in ends


class Reading:
    """A member's prompt, read again alone in the chunks in which its batch read it.

    Args:
        uid: The member's number.
        member: The member, whose `base` still exists.
        like: A batch of prompts of the same model.
        upcoming: The tokens that it will generate, as far as they are known.

    Attributes:
        batch: A batch of this member alone.
        left: The segments still to come, in the form of mlx-lm's generator.
        read: Tokens that were read.
    """

    def __init__(
        self, uid: int, member: Member, like: PromptProcessingBatch, upcoming: Sequence[int] = ()
    ):
        assert member.base is not None
        retelling = Retelling(upcoming, member)
        self.batch = type(like)(
            model=like.model,
            uids=[uid],
            caches=[member.base],
            tokens=[list(member.known)],
            prefill_step_size=like.prefill_step_size,
            samplers=[retelling],
            fallback_sampler=like.fallback_sampler,
            logits_processors=[retelling.processors],
            stop_sequences=[member.stop],
            max_tokens=[member.most],
        )
        self.left, self.read = [list(segment) for segment in member.segments], 0
        self._member = member

    @property
    def is_over(self) -> bool:
        """Whether only the last token is left, with which generation begins."""
        return len(self.left) == 1 and len(self.left[0]) == 1

    def read_chunk(self) -> None:
        """Read one chunk, as large as the batch's in one step."""
        count = min(len(self.left[0]), self.batch.prefill_step_size)
        chunk, self.left[0] = self.left[0][:count], self.left[0][count:]
        if not self.left[0]:
            self.left.pop(0)
        self.read += count
        self.batch.prompt([chunk])

    def read_until(self, count: int) -> None:
        """Read on until `count` tokens are read."""
        while self.read < count and not self.is_over:
            self.read_chunk()

    def settled(self) -> PromptProcessingBatch:
        """The batch, whose member uses its own sampler again."""
        self.batch.samplers = [self._member.sampler]
        self.batch.logits_processors = [self._member.processors]
        return self.batch

    def generating(self) -> Any:
        """The generating batch, after the prompt's last token was taken in."""
        return self.batch.generate([self.left[0]])


def generate_again(uid: int, member: Member, like: Any, pending: int | None) -> tuple[Any, Any]:
    """Recompute a generating member up to its last state, and take one more step.

    Args:
        uid: The member's number.
        member: The member.
        like: A batch of prompts of the same model.
        pending: The token that it had sampled but not reported, if it is known.

    Returns:
        Its batch, and the step's responses.

    Raises:
        Exception: The step raised it again.
    """
    upcoming = member.said + ([] if pending is None else [pending])
    reading = Reading(uid, member, like, upcoming)
    reading.read_until(member.length - 1)
    batch = reading.generating()
    for _ in member.said:
        batch.next()
    batch.samplers, batch.logits_processors = [member.sampler], [member.processors]
    return batch, batch.next()
