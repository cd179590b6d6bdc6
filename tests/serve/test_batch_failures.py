"""A batch of the server survives one member's failure: the others give what they give alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import GenerationBatch, generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.serve.batches import AccountedBatch
from mlx_h2o.serve.conversations import pieces_of
from mlx_h2o.serve.ticket import Ticket
from tiny_models import prefill, prompt_tokens, tiny_model

CHUNK, COUNT = 16, 14
#: Tokens of the first member's first segment, which is read for itself.
SEGMENT = 7
#: Of each member: tokens that its cache holds already, tokens of its prompt, its cache's settings.
MEMBERS: list[tuple[int, int, dict[str, Any]]] = [
    (0, 50, {"max_size": 24}),
    (70, 21, {"max_size": 32, "policy": "h2o"}),
    (0, 9, {"max_size": 24, "remainder": False}),
    (30, 40, {"max_size": 40, "bits": 8, "group_size": 32}),
]


@dataclass
class Owner:
    """Who is told, as the server's generator is."""

    idle: Collection[int] | None = None
    tickets: list[Ticket] = field(default_factory=list)
    failures: list[tuple[list[Ticket], Exception]] = field(default_factory=list)
    ended_well: list[Ticket] = field(default_factory=list)

    def batched(self, batch: AccountedBatch) -> None: ...

    def stepped(self, seconds: float, prompted: int, generated: int) -> None: ...

    def weighed(self, nbytes: int, slots: float) -> None: ...

    def snapped(self, cache: list[Any]) -> None: ...

    def begun(self) -> Ticket:
        self.tickets.append(Ticket("", {}, 0))
        return self.tickets[-1]

    def ended(self, ticket: Ticket, cache: list[Any] | None) -> None:
        if cache is not None:
            self.ended_well.append(ticket)

    def failed(self, tickets: Sequence[Ticket], error: Exception) -> None:
        self.failures.append((list(tickets), error))

    def idle_pieces(self) -> Collection[int] | None:
        return self.idle


class Trouble(Exception):
    """What a test has a member raise."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("llama", hidden_size=128)  # heads of 32, which can be packed


def begun(model: nn.Module, which: int) -> tuple[list[Any], list[int], list[int]]:
    """A member's caches, the tokens that these hold, and its prompt."""
    held, length, settings = MEMBERS[which]
    cache = mlx_h2o.make_prompt_cache(model, **settings)
    known = prompt_tokens(held, 70 + which)
    prefill(model, cache, known, CHUNK)
    return cache, known, prompt_tokens(length, which)


def processors_of(which: int) -> list[Any]:
    """Of every other member, one that looks at the tokens before."""
    processors: list[Any] = make_logits_processors(None, 1.3, 20) if which % 2 else []
    return processors


#: What each member gives alone, computed once.
EXPECTED: dict[int, list[int]] = {}


def alone(model: nn.Module, which: int) -> list[int]:
    if which not in EXPECTED:
        EXPECTED[which] = computed_alone(model, which)
    return EXPECTED[which]


def computed_alone(model: nn.Module, which: int) -> list[int]:
    cache, _, prompt = begun(model, which)
    first, rest = (prompt[:SEGMENT], prompt[SEGMENT:]) if which == 0 else ([], prompt)
    prefill(model, cache, first, CHUNK)
    steps = generate_step(
        mx.array(rest),
        model,
        max_tokens=COUNT,
        prompt_cache=cache,
        prefill_step_size=CHUNK,
        logits_processors=processors_of(which),
    )
    return [int(token) for token, _ in steps]


@dataclass
class Batch:
    """A batch of some of MEMBERS, and what each is told."""

    model: nn.Module
    owner: Owner = field(default_factory=Owner)
    members: dict[int, int] = field(default_factory=dict)  # which of MEMBERS, by uid
    told: dict[int, list[int]] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = AccountedBatch(
            self.model, owner=self.owner, prefill_step_size=CHUNK, prefill_batch_size=4
        )

    def insert(self, which: int, cache: list[Any] | None = None, **own: Any) -> int:
        made, known, prompt = begun(self.model, which)
        own = {"logits_processors": [processors_of(which)], "samplers": [make_sampler(0.0)]} | own
        (uid,) = self.generator.insert_segments(
            [[prompt[:SEGMENT], prompt[SEGMENT:]]] if which == 0 else [[prompt]],
            max_tokens=[COUNT],
            caches=[cache or made],
            all_tokens=[known],
            **own,
        )
        self.members[uid], self.told[uid] = which, []
        return uid

    def step(self) -> None:
        prompted, generated = self.generator.next()
        for response in prompted:
            if response.progress == (0, 0):
                self.lost.append(response.uid)
        for response in generated:
            self.told[response.uid].append(response.token)

    def run(self, at: dict[int, Callable[[], Any]] | None = None) -> None:
        """All steps; before those of these numbers something is done."""
        for number in range(200):
            if at and number in at:
                at[number]()
            elif len(self.owner.ended_well) + len(self.lost) == len(self.members):
                break
            self.step()
        self.generator.close()

    def require_all_but(self, failed: Sequence[int]) -> None:
        """These were told an error, and all others what each gives alone."""
        assert sorted(self.lost) == sorted(failed)
        told = [ticket for tickets, _ in self.owner.failures for ticket in tickets]
        assert told == [self.owner.tickets[uid] for uid in failed]
        for uid, which in self.members.items():
            expected = alone(self.model, which)
            if uid in failed:
                assert self.told[uid] == expected[: len(self.told[uid])]
                assert len(self.told[uid]) < COUNT
            else:
                assert self.told[uid] == expected, which


def at_call(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but raising at one of its calls and ever after."""
    calls = 0

    def raising(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise Trouble(f"call {number}")
        return call(*args)

    return raising


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("call", [1, 2, 9])
@pytest.mark.parametrize("what", ["sampler", "processor"])
def test_a_sampler_or_processor_that_raises_ends_its_own_sequence(model, what, call, size):
    if what == "sampler":
        own = {"samplers": [at_call(call, make_sampler(0.0))]}
    else:
        own = {"logits_processors": [[at_call(call, lambda tokens, logits: logits)]]}
    batch = Batch(model)
    failing = (call + size) % size
    for which in range(size):
        batch.insert(which, **(own if which == failing else {}))
    if what == "processor" and processors_of(failing):
        pytest.skip("this member has a processor of its own")
    batch.run()
    batch.require_all_but([failing])
    assert isinstance(batch.owner.failures[0][1], Trouble)
    assert len(batch.told[failing]) == max(call - 2, 0)


class Breaking:
    """A cache's `attend` that raises from some position on, in the second layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._own, self._patch = H2OKVCache.attend, monkeypatch

    def __call__(self, cache: list[Any], position: int) -> list[Any]:
        """The caches, the second of which raises once it holds so many tokens."""
        cache[1].label = f"breaks at {position}"
        own = self._own

        def attend(one: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
            if one.label == f"breaks at {position}" and one.offset > position:
                raise Trouble(f"at {position}")
            return own(one, q, *args, **kwargs)

        self._patch.setattr(H2OKVCache, "attend", attend)
        # Steps of several sequences at once ask no single cache.
        self._patch.setattr("mlx_h2o.caches.batch.decode_together", lambda *_: None)
        return cache


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> Breaking:
    return Breaking(monkeypatch)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("after", [-30, -2, 0, 6])
def test_a_cache_that_raises_ends_its_own_sequence(model, breaking, after, size):
    """While its prompt is read beside others' (negative), and while all generate."""
    batch = Batch(model)
    failing = size % 2  # a new one, or one that goes on
    for which in range(size):
        cache, known, prompt = begun(model, which)
        if which == failing:
            cache = breaking(cache, len(known) + len(prompt) + after)
        batch.insert(which, cache)
    batch.run()
    batch.require_all_but([failing])
    assert "at" in str(batch.owner.failures[0][1])


def test_a_prompt_that_fails_beside_those_that_generate(model, breaking):
    """And one that is read beside it goes on."""
    batch = Batch(model)
    first = batch.insert(0)
    second: list[int] = []

    def join() -> None:
        cache, known, _ = begun(model, 1)
        second.append(batch.insert(1, breaking(cache, len(known) + 17)))
        batch.insert(3)

    batch.run({8: join})
    assert first == 0
    batch.require_all_but(second)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_step_that_fails_late_and_for_no_one_alone_loses_nothing(model, monkeypatch, steps):
    """MLX is lazy: the error comes when everything was touched. Each is computed again."""
    own, failed = GenerationBatch._step, []

    def step(batch: Any) -> Any:
        out = own(batch)
        if len(batch.uids) > 1 and max(batch._num_tokens) == steps and not failed:
            failed.append(True)
            raise Trouble("at eval")
        return out

    monkeypatch.setattr(GenerationBatch, "_step", step)
    batch = Batch(model)
    for which in range(4):
        batch.insert(which)
    batch.run()
    assert failed
    batch.require_all_but([])
    assert [tickets for tickets, _ in batch.owner.failures] == [[]]  # counted, and nobody told


def test_samplers_are_not_asked_again_for_tokens_that_are_known(model, monkeypatch):
    """Otherwise a random one would say something else than was told."""
    own, failed, calls = GenerationBatch._step, [], [0, 0]

    def step(batch: Any) -> Any:
        out = own(batch)
        if len(batch.uids) > 1 and max(batch._num_tokens) == 5 and not failed:
            failed.append(True)
            raise Trouble("at eval")
        return out

    def counted(which: int) -> Callable[..., Any]:
        def sampler(logprobs: mx.array) -> mx.array:
            calls[which] += 1
            return mx.array([(37 * calls[which] + which) % 100], mx.uint32)

        return sampler

    monkeypatch.setattr(GenerationBatch, "_step", step)
    batch = Batch(model)
    for which in (0, 2):
        batch.insert(which, samplers=[counted(which // 2)])
    batch.run()
    assert failed
    # Each was asked once for each token, and once in the step that failed, which nobody was told.
    for which, told in zip((0, 1), batch.told.values(), strict=True):
        answers = [(37 * n + which) % 100 for n in range(1, COUNT + 2)]
        skipped = next(i for i, (a, b) in enumerate(zip(told, answers, strict=False)) if a != b)
        assert 1 < skipped < COUNT - 1
        assert told == answers[:skipped] + answers[skipped + 1 :]


def test_what_was_given_is_let_go_of_where_its_bytes_are_needed(model, monkeypatch):
    """Then a continued sequence cannot come again, and a new one still can."""
    held: set[int] = set()
    batch = Batch(model, Owner(idle=held))
    new, continued, shared = batch.insert(0), batch.insert(1), None
    cache, _, _ = begun(model, 3)
    idle = copy.deepcopy(cache)
    held |= set(pieces_of(idle))
    shared = batch.insert(3, cache)
    bases = {uid: member.base for uid, member in batch.generator._members.items()}
    assert bases[new] is not None
    assert bases[shared] is not None
    assert bases[continued] is None
    own, failed = GenerationBatch._step, []

    def step(of: Any) -> Any:
        out = own(of)
        if len(of.uids) == 3 and not failed:
            failed.append(True)
            raise Trouble("at eval")
        return out

    monkeypatch.setattr(GenerationBatch, "_step", step)
    batch.run()
    batch.require_all_but([continued])
