"""Idle conversations: nothing wrong is gone on with, and room is made in the order told."""

import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

import mlx_h2o
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.serve.conversations import Conversations, pieces_of
from mlx_h2o.serve.keys import Mark, Place, key_of, token_count, tokens_of
from mlx_h2o.serve.memory import Ledger, most_bytes
from mlx_h2o.serve.protocol import label_of
from mlx_h2o.serve.sessions import Limits, Sessions, Turn
from model_coverage import coverage_model
from tiny_models import kept_positions, prompt_tokens, tiny_model

SIZE = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


TURN = Turn("cmpl-1", "how it began")


def made(model: Any, **settings: Any) -> list[Any]:
    return mlx_h2o.make_prompt_cache(model, **({"max_size": SIZE} | settings))


def read(model: Any, cache: list[Any], tokens: list[int]) -> mx.array:
    logits = model(mx.array([tokens]), cache=cache)[0, -1]
    mx.eval(logits)
    return logits


def having_read(model: Any, tokens: list[int], **settings: Any) -> list[Any]:
    """Caches of a model that has read these tokens."""
    cache = made(model, **settings)
    read(model, cache, tokens)
    return cache


def place(tokens: list[int], label: str = "a", pins: Any = (), model: str = "m") -> Place:
    return Place(Mark(label, tuple(pins), model), key_of(tokens))


class Store(Conversations):
    """Conversations of one model, with as many bytes as a test allows."""

    def __init__(self, model: Any, folder: Any = None, fingerprint: str = "m"):
        self.left: int | None = None
        super().__init__(lambda: self.left)
        self.model, self.fingerprint = model, fingerprint
        if folder is not None:
            self.sessions = Sessions(folder, Limits())
            self.add_model("m", fingerprint)

    def put(self, tokens: list[int], cache: list[Any], kind: str = "turn", **own: Any) -> None:
        assert self.keep(place(tokens, **own), cache, kind, TURN if kind == "turn" else None)

    def fetch(
        self, tokens: list[int], label: str = "a", pins: Any = (), **settings: Any
    ) -> tuple[list[Any], list[int]]:
        empty = made(self.model, **({"pins": pins} if pins else {}), **settings)
        cache, count = self.take(place(tokens, label, pins, self.fingerprint), empty)
        return cache, tokens[count:]

    def prefix_of(self, tokens: list[int], **own: Any) -> int:
        return len(tokens) - len(self.fetch(tokens, **own)[1])

    def room(self, left: int) -> None:
        self.left = left
        self.make_room()
        self.left = None


# -- what is gone on with -------------------------------------------------------------------------


def test_a_cache_serves_its_own_continuation_and_is_not_changed_by_it(model):
    tokens = prompt_tokens(90)
    conversations, alone = Store(model), having_read(model, tokens[:70])
    expected = read(model, alone, tokens[70:])
    conversations.put(tokens[:70], having_read(model, tokens[:70]))
    for _ in range(2):
        taken, rest = conversations.fetch(tokens)
        assert rest == tokens[70:]
        assert mx.array_equal(read(model, taken, rest), expected)


def test_the_longest_is_taken_and_one_token_is_always_left(model):
    tokens, conversations = prompt_tokens(60), Store(model)
    for count in (20, 45, 60):
        conversations.put(tokens[:count], having_read(model, tokens[:count]))
    assert conversations.prefix_of(tokens) == 45
    assert conversations.prefix_of([*tokens, 5]) == 60
    assert conversations.prefix_of(tokens[:46]) == 45
    assert conversations.prefix_of(tokens[:20]) == 0


@pytest.mark.parametrize("undo", [0, 4])
def test_what_differs_is_gone_on_with_only_where_undo_leaves_no_trace(model, undo):
    """The last three tokens were steps; a fourth was not asked to be undone."""
    tokens = prompt_tokens(70)
    conversations, cache = Store(model), having_read(model, tokens[:67], undo=undo)
    for token in tokens[67:]:
        read(model, cache, [token])
    conversations.put(tokens, cache)
    other = [*tokens[:67], 1 + tokens[67] % 100, 3, 4]
    assert conversations.prefix_of(other) == (67 if undo else 0)
    assert conversations.prefix_of(tokens) == (69 if undo else 0)
    assert conversations.prefix_of([*tokens[:66], 1 + tokens[66] % 100, 3]) == 0
    if undo:
        taken, rest = conversations.fetch(other)
        alone = having_read(model, tokens[:67], undo=undo)
        expected = [read(model, alone, [token]) for token in rest]
        given = [read(model, taken, [token]) for token in rest]
        assert all(mx.array_equal(a, b) for a, b in zip(given, expected, strict=True))


def test_caches_of_other_settings_are_not_gone_on_with(model):
    tokens, conversations = prompt_tokens(30), Store(model)
    conversations.put(tokens[:20], having_read(model, tokens[:20]), label="b")
    assert conversations.prefix_of(tokens) == 0
    assert conversations.prefix_of(tokens, label="b") == 20
    assert label_of({"max_size": 3, "undo": 2}) == label_of({"undo": 2, "max_size": 3})


ROOMY = {"max_size": 60, "budgets": "uniform"}


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize(
    ("own", "wanted", "served"),
    [
        ([(2, 9)], [(2, 9)], True),
        ([(2, 9)], [(2, 9), (82, 84)], True),  # what is still to come is pinned when it comes
        ([(2, 9)], [], False),
        ([], [(2, 9)], False),
        ([(2, 9)], [(2, 8)], False),
        ([(2, 9), (85, 88)], [(2, 9), (85, 88)], True),
        ([(2, 9), (85, 88)], [(2, 9)], False),  # which took room already
    ],
)
def test_a_pinned_prefix_serves_prompts_that_pin_the_same_of_it(
    model, tmp_path, files, own, wanted, served
):
    tokens = prompt_tokens(90)
    conversations = Store(model, tmp_path)
    conversations.put(tokens[:80], having_read(model, tokens[:80], pins=own, **ROOMY), pins=own)
    if files:
        conversations = Store(model, tmp_path)
    taken, rest = conversations.fetch(tokens, pins=wanted, **ROOMY)
    assert len(tokens) - len(rest) == (80 if served else 0)
    mlx_h2o.pin(taken, wanted)  # the scheduler pins what is still to come
    read(model, taken, rest)
    assert taken[0].pins == tuple(wanted)
    pinned = {position for span in wanted for position in range(*span)}
    assert all(pinned <= set(head) for entry in taken for head in kept_positions(entry))


# -- room -----------------------------------------------------------------------------------------


def test_many_sessions_share_a_prefix_and_its_bytes(model):
    """A snapshot before the first eviction: copies hold its arrays until they go on."""
    tokens, conversations = prompt_tokens(30), Store(model)
    conversations.put(tokens, having_read(model, tokens), "system")
    once = conversations.nbytes
    copies = [conversations.fetch([*tokens, i])[0] for i in range(5)]
    together: dict[int, int] = {}
    for taken in copies:
        together |= pieces_of(taken)
    assert sum(together.values()) == once
    ends = []
    for i, taken in enumerate(copies):
        for token in prompt_tokens(40, seed=i):
            ends.append(read(model, taken, [token]))
        assert taken[0].evicted > 0
    again = having_read(model, tokens)
    for token in prompt_tokens(40, seed=4):
        expected = read(model, again, [token])
    assert mx.array_equal(ends[-1], expected)
    assert conversations.nbytes == once


def test_snapshots_go_first_then_conversations_shrink_then_the_oldest_go(model):
    conversations = Store(model)
    prompts = [prompt_tokens(80, seed=seed) for seed in range(3)]
    for tokens in prompts:
        for count, kind in ((60, "prompt"), (80, "turn")):
            conversations.put(tokens[:count], having_read(model, tokens[:count]), kind)
    whole = conversations.nbytes
    conversations.room(whole - 1)
    assert (len(conversations), conversations.shrunk) == (5, 0)
    conversations.room(whole // 2)
    assert (len(conversations), conversations.shrunk) == (3, 0)
    conversations.room(conversations.nbytes - 1)
    assert (len(conversations), conversations.shrunk) == (3, 1)
    cache, rest = conversations.fetch([*prompts[0], 7])
    assert len(rest) == 1
    assert cache[0].size() < SIZE  # it had to forget,
    assert cache[0].budgets == made(model)[0].budgets  # and may remember as much as ever again
    smallest = conversations.nbytes // 3
    conversations.room(smallest)
    assert conversations.shrunk == 3
    assert conversations.prefix_of([*prompts[1], 7]) == 0  # unused longest
    conversations.room(0)
    assert (len(conversations), conversations.nbytes) == (0, 0)


def test_a_prompt_stays_until_its_answer_is_kept(model):
    """Where caches cannot take back an end token, the next turn goes on from the prompt."""
    tokens = [prompt_tokens(70, seed=i) for i in range(3)]
    conversations = Store(model)
    for i, kind in enumerate(("turn", "turn", "prompt")):
        cache = having_read(model, tokens[i])
        conversations.put(tokens[i], cache, kind)
    conversations.room(sum(pieces_of(cache).values()))
    (entry,) = conversations.entries
    assert (entry.kind, entry.shrunk) == ("prompt", False)


def test_what_made_room_comes_back_from_its_file_as_it_was(model, tmp_path):
    tokens = prompt_tokens(80)
    conversations = Store(model, tmp_path)
    conversations.put(tokens[:70], having_read(model, tokens[:70]))
    taken, rest = conversations.fetch(tokens)
    expected = read(model, taken, rest)
    for left in (conversations.nbytes - 1, 0):  # shrunk, then gone
        conversations.room(left)
        back, rest = conversations.fetch(tokens)
        assert rest == tokens[70:]
        assert mx.array_equal(read(model, back, rest), expected)
    back, rest = Store(model, tmp_path).fetch(tokens)
    assert mx.array_equal(read(model, back, rest), expected)
    assert Store(model, tmp_path, "another model").prefix_of(tokens) == 0


def test_damaged_sessions_are_left_aside(model, tmp_path):
    tokens, conversations = prompt_tokens(50), Store(model, tmp_path)
    conversations.put(tokens[:40], having_read(model, tokens[:40]))
    (path,) = tmp_path.glob("*.safetensors")
    whole = path.read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(whole[:100])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])  # one bit of an array
    again = Store(model, tmp_path)
    assert again.prefix_of(tokens) == 0
    assert again.prefix_of(tokens) == 0


def test_the_file_of_an_earlier_turn_goes_when_the_client_has_the_later_one(model, tmp_path):
    tokens, conversations = prompt_tokens(60), Store(model, tmp_path)
    for count in (20, 40, 60):
        cache = having_read(model, tokens[:count])
        turn = replace(TURN, name=f"cmpl-{count}")
        conversations.keep(place(tokens[:count]), cache, "turn", turn)
    assert len(list(tmp_path.iterdir())) == 3  # no client is known to have any answer
    conversations.room(0)
    conversations.delivered("cmpl-60")
    assert [path.stem for path in tmp_path.iterdir()] == [
        conversations.sessions.path_of(place(tokens)).stem
    ]
    assert tokens_of(key_of(tokens)) == tokens
    assert token_count(key_of(tokens)) == 60


def test_the_longest_text_that_a_prompt_begins_with_is_found_first(model):
    conversations = Store(model)
    keys = [key_of(range(i, i + 10)) for i in range(6)]
    for text, key in zip(("ab", "abc", "abc", "abd", "abcdef"), keys, strict=False):
        own = Place(Mark("a"), key)
        conversations.name(own, Turn("", "", ((text, 10),)))
    assert conversations.spellings("", "abcde") == [(3, keys[2]), (3, keys[1]), (2, keys[0])]
    assert conversations.spellings("", "x") == conversations.spellings("other", "abcde") == []
    conversations.clear()
    assert conversations.spellings("", "abcde") == []


# -- the ledger -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"policy": "h2o", "remainder": False}, {"undo": 3}, {"policy": "tova:evict_every=4"}],
)
def test_no_cache_ever_takes_more_than_was_reserved(model, settings):
    cache = made(model, **settings)
    most = most_bytes(cache)
    sizes = []
    for seed, count in enumerate((7, 50, 1, 1, 1, 1, 1, 30, 1, 1)):
        read(model, cache, prompt_tokens(count, seed=seed))
        sizes.append(sum(entry.nbytes for entry in cache))
    assert max(sizes) <= most
    assert max(sizes) > 0.9 * most


def test_a_size_in_bytes_is_reserved_at_its_largest_stage(model):
    cache = mlx_h2o.make_prompt_cache(model, max_bytes=60_000, context=256, bits=16)
    assert 0 < most_bytes(cache) <= 60_000


@pytest.mark.parametrize("chunk", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7)), 40])
@pytest.mark.parametrize(
    "name",
    ["gemma3_text", "gpt_oss", "qwen3_next", "granitemoehybrid", "plamo2", "llama4_text", "mamba2"],
)
def test_layers_of_other_kinds_are_reserved_whole(name, chunk):
    """Sliding windows, chunks and states: alone and in a batch, and not far from what they take."""
    model = coverage_model(name)
    try:
        empty = mlx_h2o.make_prompt_cache(model, SIZE)
    except NothingToBound:
        empty = stock_caches(model)
    most, tokens = most_bytes(empty, model, chunk), prompt_tokens(120)
    cache, sizes = copy.deepcopy(empty), list[int]()
    for first in range(0, len(tokens), chunk):
        read(model, cache, tokens[first : first + chunk])
        sizes.append(sum(entry.nbytes for entry in cache))
    for _ in range(3):
        read(model, cache, [5])
        sizes.append(sum(entry.nbytes for entry in cache))
    assert 0.3 * most < max(sizes) <= most
    if all(hasattr(entry, "merge") for entry in empty):
        generator = BatchGenerator(
            model, prefill_step_size=chunk, completion_batch_size=4, prefill_batch_size=4
        )
        prompts = [prompt_tokens(count, seed=count) for count in (90, 3, 33, 60)]
        generator.insert(prompts[:3], [9] * 3, [copy.deepcopy(empty) for _ in range(3)])
        for _ in range(3):
            generator.next()
        generator.insert(prompts[3:], [9], [copy.deepcopy(empty)])
        while any(generator.next()):
            running = len(generator._prompt_batch) + len(generator._generation_batch)
            assert generator.prompt_cache_nbytes <= most * running


def test_what_grows_or_is_not_known_is_refused_with_its_name(model):
    with pytest.raises(ValueError, match="Layer 0 has a KVCache, whose bytes are not known"):
        most_bytes(stock_caches(model), model)
    with pytest.raises(ValueError, match="Layer 0 has a RotatingKVCache, whose bytes"):
        most_bytes(mlx_h2o.make_prompt_cache(tiny_model("gemma3_text"), SIZE))


def test_bytes_are_reserved_and_freed():
    ledger = Ledger()
    ledger.bound = 100
    assert ledger.has_room(60)
    ledger.reserve("a", 60)
    assert (ledger.reserved, ledger.left_for_idle) == (60, 40)
    assert not ledger.has_room(50)
    assert ledger.has_room(40)
    ledger.weigh(30, 20)
    assert ledger.peak == 50
    ledger.release("a", 4.0)
    ledger.release("a", 400.0)
    assert (ledger.reserved, ledger.retry_after, ledger.current.running) == (0, 4, 0)
    assert Ledger().has_room(10**18)
