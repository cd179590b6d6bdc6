"""Batches: every sequence gives what it gives alone, whatever joins, leaves or is padded."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from mlx_h2o import H2OKVCache, make_policy
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.loading.load import SAMPLE_TEXT, model_path
from mlx_h2o.policies import policy_names
from tiny_models import TinyLayer, prompt_tokens, tiny_model

WIDTH = 32
STORES: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": {"bits": 4, "group_size": 32},
    "mixed": {"bits": 4, "group_size": 32, "recent_bits": 8},
    "undo": {"undo": 3},
}


@dataclass
class Talk:
    """A conversation with the cache that it has alone."""

    layer: TinyLayer
    alone: H2OKVCache

    @classmethod
    def of(cls, seed: int, **settings: Any) -> "Talk":
        layer = TinyLayer(key_width=WIDTH, value_width=WIDTH, seed=seed, length=400)
        return cls(layer, H2OKVCache(**settings))


def padded(parts: Sequence[mx.array], before: Sequence[int], length: int) -> mx.array:
    """Rows `[1, H, n, D]` of each sequence with others' rubbish around them, `[B, H, L, D]`."""
    rows = []
    for part, first in zip(parts, before, strict=True):
        _, H, n, D = part.shape
        rubbish = mx.full((1, H, length, D), 7.0, part.dtype)
        row = mx.concatenate([rubbish[:, :, :first], part, rubbish[:, :, first + n :]], axis=2)
        rows.append(row)
    return mx.concatenate(rows)


def feed(
    batch: BatchH2OKVCache, members: Sequence[Talk], counts: Sequence[int], left: bool = False
) -> None:
    """Send so many tokens of each through the batch and alone, and compare."""
    length = max(counts)
    padding = [length - n for n in counts]
    before = padding if left else [0] * len(counts)
    offsets = [member.alone.offset for member in members]
    if left and any(padding):
        batch.prepare(left_padding=padding)
    elif any(padding):
        batch.prepare(lengths=list(counts), right_padding=padding)
    assert batch.offset.tolist() == [o - b for o, b in zip(offsets, before, strict=True)]
    parts = [m.layer.at(o, n) for m, o, n in zip(members, offsets, counts, strict=True)]
    q, k, v = (padded([part[i] for part in parts], before, length) for i in range(3))
    mask = batch.make_mask(length)
    keys, values = batch.update_and_fetch(k, v)
    out = batch.attend(q, keys, values, scale=members[0].layer.scale, mask=mask)
    if not left and any(padding):
        batch.finalize()
    assert batch.offset.tolist() == [o + n for o, n in zip(offsets, counts, strict=True)]
    for i, (member, count, first) in enumerate(zip(members, counts, before, strict=True)):
        own = out[i : i + 1, :, first : first + count]
        if count:
            assert mx.array_equal(own, member.layer.feed(member.alone, count, count))
        rest = mx.concatenate([out[i, :, :first], out[i, :, first + count :]], axis=1)
        assert not mx.any(rest).item()


def require_alike(cache: H2OKVCache, alone: H2OKVCache) -> None:
    """Everything held, bit by bit."""
    assert cache.config() == alone.config()
    arrays = alone.arrays()
    for name, array in cache.arrays().items():
        assert mx.array_equal(array, arrays[name]), name


@pytest.mark.few(15)
@pytest.mark.pairwise
@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("remainder", [True, False])
def test_who_is_beside_a_sequence_changes_nothing(policy, store, remainder):
    """Steps, ragged chunks, joining, leaving and changing places, budgets differing."""
    rng = random.Random(f"{policy} {store} {remainder}")

    def new(seed: int) -> "Talk":
        chosen = make_policy(policy, sink=2, recent=0.25)
        settings = {"policy": chosen, "remainder": remainder, **STORES[store]}
        return Talk.of(seed, max_size=rng.choice([40, 48]) if remainder else 32, **settings)

    members = [new(seed) for seed in range(3)]
    batch = members[0].alone.merge([member.alone for member in members])
    feed(batch, members, [1, 30, 55])
    for turn in range(8):
        happens = rng.choice(["steps", "steps", "chunk", "join", "leave", "places"])
        if happens == "steps":
            for _ in range(4):
                feed(batch, members, [1] * len(members))
        elif happens == "chunk":
            feed(batch, members, [rng.choice([0, 1, 3, 20]) for _ in members[1:]] + [9])
        elif happens == "join":
            members.append(new(10 + turn))
            batch.extend(members[-1].alone.merge([members[-1].alone]))
        elif happens == "leave" and len(members) > 1:
            place = rng.randrange(len(members))
            require_alike(batch.extract(place), members.pop(place).alone)
            batch.filter([i for i in range(len(batch.caches)) if i != place])
        elif happens == "places":
            order = rng.sample(range(len(members)), len(members))
            members = [members[i] for i in order]
            batch.filter(mx.array(order))
    feed(batch, members, [1] * len(members))
    for cache, member in zip(batch.caches, members, strict=True):
        require_alike(cache, member.alone)
    assert batch.nbytes == sum(member.alone.nbytes for member in members)


def test_left_padding_comes_before_a_sequence_and_changes_nothing():
    members = [Talk.of(seed, max_size=48) for seed in range(3)]
    batch = BatchH2OKVCache.merge([member.alone for member in members])
    feed(batch, members, [70, 1, 33], left=True)
    for _ in range(5):
        feed(batch, members, [1, 1, 1])
    with pytest.raises(ValueError, match="before a sequence's first token"):
        batch.prepare(left_padding=[1, 0, 0])


def test_padding_may_end_or_begin_in_any_chunk():
    """mlx-lm sends a padded prompt in chunks."""
    members = [Talk.of(seed, max_size=40) for seed in range(3)]
    for left in (False, True):
        own = [48, 17, 5]
        batch = BatchH2OKVCache.merge([H2OKVCache(max_size=40) for _ in members])
        alone = [H2OKVCache(max_size=40) for _ in members]
        padding = [max(own) - n for n in own]
        if left:
            batch.prepare(left_padding=padding)
        else:
            batch.prepare(lengths=own, right_padding=padding)
        before = padding if left else [0, 0, 0]
        parts = [m.layer.at(0, n) for m, n in zip(members, own, strict=True)]
        q, k, v = (padded([p[i] for p in parts], before, 48) for i in range(3))
        outs = []
        for start in range(0, 48, 12):
            chunk = slice(start, start + 12)
            keys, values = batch.update_and_fetch(k[:, :, chunk], v[:, :, chunk])
            outs.append(batch.attend(q[:, :, chunk], keys, values, scale=1.0, mask="causal"))
        batch.finalize()
        out = mx.concatenate(outs, axis=2)
        for i, (first, n) in enumerate(zip(before, own, strict=True)):
            edges = [0, *(e - first for e in range(12, 48, 12) if first < e < first + n), n]
            expected = []
            for a, b in pairwise(edges):
                q_, k_, v_ = (x[:, :, a:b] for x in parts[i])
                keys, values = alone[i].update_and_fetch(k_, v_)
                expected.append(alone[i].attend(q_, keys, values, scale=1.0, mask="causal"))
            own_out = out[i : i + 1, :, first : first + n]
            assert mx.allclose(own_out, mx.concatenate(expected, axis=2), atol=1e-6)
            assert batch.caches[i].offset == n


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_all_sequences_is_read_by_sequence(additive):
    """`[B, 1, L, N]`, as other caches of the same model make it."""
    members = [Talk.of(seed, max_size=40) for seed in range(2)]
    batch = BatchH2OKVCache.merge([member.alone for member in members])
    causal = mx.tril(mx.ones((6, 6), mx.bool_))
    hidden = mx.arange(6)[None, None, None] != mx.array([2, 3])[:, None, None, None]
    mask = (causal & hidden) | mx.eye(6, dtype=mx.bool_)
    if additive:
        mask = mx.where(mask, 0.0, -1e9)
    parts = [member.layer.at(0, 6) for member in members]
    q, k, v = (mx.concatenate([part[i] for part in parts]) for i in range(3))
    keys, values = batch.update_and_fetch(k, v)
    out = batch.attend(q, keys, values, scale=0.2, mask=mask)
    for i, member in enumerate(members):
        keys, values = member.alone.update_and_fetch(*parts[i][1:])
        alone = member.alone.attend(parts[i][0], keys, values, scale=0.2, mask=mask[i : i + 1])
        assert mx.array_equal(out[i : i + 1], alone)


def test_tokens_are_taken_back_of_all_sequences_or_of_none():
    settings = [{"undo": 4}, {"undo": 2}]
    members = [Talk.of(i, max_size=40, **s) for i, s in enumerate(settings)]
    batch = BatchH2OKVCache.merge([member.alone for member in members])
    feed(batch, members, [60, 50])
    for _ in range(4):
        feed(batch, members, [1, 1])
    assert (batch.undo, batch.trimmable) == (2, 2)
    with pytest.raises(ValueError, match="Cannot take back 3 tokens"):
        batch.trim(3)
    assert batch.trim(2) == 2
    for member in members:
        member.alone.trim(2)
    feed(batch, members, [1, 1])


def test_a_batch_shares_memory_with_what_it_was_made_of_and_changes_none_of_it():
    members = [Talk.of(seed, max_size=40) for seed in range(2)]
    for member in members:
        member.layer.feed(member.alone, 60, 60)
    before = [{n: mx.array(a) for n, a in m.alone.arrays().items()} for m in members]
    batch = BatchH2OKVCache.merge([member.alone for member in members])
    together = {}
    for cache in (*batch.caches, *(member.alone for member in members)):
        together |= cache.pieces()
    assert sum(together.values()) == batch.nbytes  # all of it is shared
    for at in range(60, 64):
        if at == 63:
            taken = batch.extract(0)
            held = {name: mx.array(a) for name, a in taken.arrays().items()}
        q, k, v = (mx.concatenate(x) for x in zip(*(m.layer.at(at) for m in members), strict=True))
        mx.eval(batch.attend(q, *batch.update_and_fetch(k, v), scale=1.0))
    untouched = [taken, *(member.alone for member in members)]
    for cache, arrays in zip(untouched, [held, *before], strict=True):
        for name, array in cache.arrays().items():
            assert mx.array_equal(array, arrays[name]), name


# -- what is refused ------------------------------------------------------------------------------


def test_what_cannot_be_a_batch_is_refused():
    two, rows = H2OKVCache(40), mx.zeros((3, 2, 1, 8))
    TinyLayer(batch=2).feed(two, 3)
    plain_rows = PlainRowsKVCache(40, policy="keydiff")
    batch = BatchH2OKVCache([H2OKVCache(40), H2OKVCache(40)])
    for text, call in {
        "made of H2OKVCaches; got a KVCache": lambda: batch.merge(
            [H2OKVCache(40), mlx_lm_cache.KVCache()]
        ),
        "got a PlainRowsKVCache": lambda: BatchH2OKVCache.merge([plain_rows]),
        "got one of 2 sequences": lambda: two.merge([two]),
        "cannot take in a BatchKVCache": lambda: batch.extend(mlx_lm_cache.BatchKVCache([0])),
        "Rows of 3 sequences came for a batch of 2": lambda: batch.update_and_fetch(rows, rows),
        "needs lengths": lambda: batch.prepare(right_padding=[1, 0]),
    }.items():
        with pytest.raises(ValueError, match=text):
            call()
    batch.update_and_fetch(mx.zeros((2, 2, 1, 8)), mx.zeros((2, 2, 1, 8)))
    for change in (
        lambda: batch.filter([0]),
        lambda: batch.extract(0),
        lambda: batch.extend(batch),
        lambda: batch.trim(1),
        lambda: batch.prepare(left_padding=[1, 0]),
        lambda: batch.finalize(),
        lambda: copy.deepcopy(batch),
        lambda: batch.state,
    ):
        with pytest.raises(RuntimeError, match="in the middle of a step"):
            change()


@pytest.mark.parametrize("family", ["gemma2_by_itself", "deepseek_v3"])
def test_models_that_attend_in_their_own_way_say_that_they_cannot_be_batched(family):
    """mlx-lm's server asks in this way, and then serves them one at a time."""
    caches = mlx_h2o.make_prompt_cache(tiny_model(family), 40, remainder=False)
    assert not any(hasattr(cache, "merge") for cache in caches)


# -- whole models, by mlx-lm's own generator ------------------------------------------------------


def alone(model: Any, prompt: list[int], count: int, **settings: Any) -> list[int]:
    cache = mlx_h2o.make_prompt_cache(model, **settings)
    steps = generate_step(
        mx.array(prompt), model, max_tokens=count, prompt_cache=cache, prefill_step_size=16
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gpt_oss",
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("gemma3_text", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=pytest.mark.slow),
    ],
)
def test_mlx_lms_batches_give_the_tokens_that_sequences_give_alone(family):
    """Ragged prompts; the third joins while the others decode, and the second leaves first."""
    model = tiny_model(family)
    settings = [
        {"max_size": 40},
        {"max_size": 48, "policy": "h2o"},
        {"max_size": 24, "remainder": False},
    ]
    prompts = [prompt_tokens(n, seed) for seed, n in enumerate((61, 9, 40))]
    counts = [30, 7, 20]
    generator = BatchGenerator(model, prefill_step_size=16, prefill_batch_size=4)

    def insert(which: Sequence[int]) -> list[int]:
        caches = [mlx_h2o.make_prompt_cache(model, **settings[i]) for i in which]
        return generator.insert(
            [prompts[i] for i in which], [counts[i] for i in which], caches=caches
        )

    tokens: dict[int, list[int]] = {uid: [] for uid in insert([0, 1])}
    steps = 0
    while responses := generator.next_generated():
        steps += 1
        for response in responses:
            tokens[response.uid].append(response.token)
            if response.finish_reason:
                entry = response.prompt_cache[-1]
                assert type(entry) is H2OKVCache
                assert entry.offset == len(response.all_tokens)
        if steps == 12:
            tokens |= {uid: [] for uid in insert([2])}
    for i, generated in enumerate(tokens.values()):
        assert generated == alone(model, prompts[i], counts[i], **settings[i]), i
    generator.close()


def test_batch_generate_after_install_is_bounded():
    """The texts that each prompt gives alone, and caches that hold no more than they may."""
    model, tokenizer = mlx_lm.load(model_path("builtin:recall-4m"))
    words = SAMPLE_TEXT.read_text(encoding="utf-8").split()
    prompts = [tokenizer.encode(" ".join(words[i : i + n])) for i, n in ((0, 90), (200, 30))]
    mlx_h2o.install(max_size=48)
    try:
        batch = mlx_lm.batch_generate(
            model, tokenizer, prompts, max_tokens=12, return_prompt_caches=True
        )
    finally:
        mlx_h2o.uninstall()
        mlx_h2o.install()
    for prompt, text, caches in zip(prompts, batch.texts, batch.caches, strict=True):
        cache = mlx_h2o.make_prompt_cache(model, 48)
        alone = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12, prompt_cache=cache)
        assert text.lstrip() == alone.lstrip()
        assert {type(entry) for entry in caches} == {H2OKVCache}
        assert all(max(entry.budgets) >= entry.size() for entry in caches)
