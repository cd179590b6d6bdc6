"""Rows that come back from the file: which, at whose cost, and that nothing is counted twice."""

import copy
import warnings
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

import conversation_rows
from conversation_rows import HEADS, QUERIES, WIDTH, attended, rows_of
from mlx_h2o import H2OKVCache, Profile, Spill, load, make_prompt_cache
from mlx_h2o.budgets.plan import FEWEST_CHOICES
from mlx_h2o.budgets.profile import FILE_NAME
from mlx_h2o.evaluate.facts import recall_task
from mlx_h2o.loading.load import CALIBRATION_TEXT, EMBEDDED_MODEL, MODELS
from mlx_h2o.slots.packed import dense
from mlx_h2o.slots.pins import true_positions
from mlx_h2o.slots.remainder import Remainder
from mlx_h2o.spill.conversation_rows import SpillStopped
from mlx_h2o.spill.page_digests import PAGE, TRACT, PageDigests, digests_of
from mlx_h2o.spill.setting import Returns
from research.returning import recall

OFTEN = Returns(every=8, window=4, pages=2, rows=8, ahead=4)


def cache_of(folder, returns=OFTEN, **options):
    spill = None if folder is None else Spill(folder, returns=returns)
    return conversation_rows.cache_of(spill, policy="salient", **options)


def positions_of(cache, head):
    """The positions of the rows in one head's slots and in the recent window."""
    for run in cache.store.runs:
        if run.first <= head < run.last:
            held = true_positions(cache.store.views(run)["positions"])[0, head - run.first]
    recent = cache.layer.window_length
    newest = range(cache.offset - recent, cache.offset)
    return {*held.tolist(), *newest}


def asking_for(keys, position):
    """Queries `[1, Hq, 1, D]` that want one position's row in every head."""
    wanted = mx.repeat(keys[:, :, position : position + 1], QUERIES // HEADS, axis=1)
    return wanted * 4


STORES = {
    "dense": {},
    "half": {"dtype": mx.float16},
    "bfloat16": {"dtype": mx.bfloat16},
    "6 bits": {"bits": 6},
    "framed": {"bits": 6, "frame": True},
    "values alone": {"v_bits": 6},
    "newest wider": {"bits": 4, "recent_bits": 8, "frame": True},
    "two budgets": {"budgets": [24, 40]},
    "undo": {"bits": 6, "undo": 3},
}


@pytest.mark.parametrize("store", STORES)
def test_the_remainder_stands_for_exactly_the_rows_that_are_absent(tmp_path, store):
    options = dict(STORES[store])
    dtype = options.pop("dtype", mx.float32)
    cache = cache_of(tmp_path, **options)
    for i, count in enumerate([40, *[1] * 40, 20, *[1] * 30, 60, *[1] * 9]):
        attended(cache, *rows_of(count, i, dtype))
    assert cache.back.returned > 0
    remainder, layer = cache.remainder, cache.layer
    for head in range(HEADS):
        held = positions_of(cache, head)
        assert len(held) == cache.budgets[head]
        absent = np.array(sorted(set(range(cache.offset)) - held))
        rows = {}
        for name, of_name in cache.spill.rows(head, absent).items():
            array, stored = mx.array(of_name), layer.store.fields[name].dtype
            rows[name] = (array.view(stored) if stored == mx.bfloat16 else array)[None, None]
        keys, values = (dense(layer.packing.rows(name, rows)) for name in ("keys", "values"))
        anew = Remainder.empty(1, 1, WIDTH, WIDTH).fold(keys, values)
        for name, array in remainder.heads(head, head + 1).arrays.items():
            assert mx.allclose(array, anew.arrays[name], rtol=1e-3, atol=1e-4), (head, name)


def test_between_returns_the_kernels_keep_the_rows(tmp_path):
    """A decoder that is taken back at each step copies all slots for the next."""
    cache = cache_of(tmp_path, bits=6)
    attended(cache, *rows_of(64, 1))
    decoders = []
    for i in range(3 * OFTEN.every):
        attended(cache, *rows_of(1, i + 2))
        decoders.append(cache.layer.decoder)
    assert cache.back.returned > 0
    assert None not in decoders, "fused steps need the CPU kernels"
    changed = sum(a is not b for a, b in pairwise(decoders))
    assert changed <= 3


def test_taking_rows_out_of_a_remainder_undoes_folding_them_in():
    _, k, v = rows_of(50, 3)
    apart = [
        Remainder.empty(1, HEADS, WIDTH, WIDTH).fold(k[:, :, :n], v[:, :, :n]) for n in (30, 50)
    ]
    back = apart[1].without(k[:, :, 30:], v[:, :, 30:])
    for name, array in back.arrays.items():
        assert mx.allclose(array, apart[0].arrays[name], rtol=1e-4, atol=1e-5), name
    nothing = back.without(k[:, :, :30], v[:, :, :30])
    for name, array in nothing.arrays.items():
        assert not array.any(), name


@pytest.mark.parametrize("store", ["dense", "framed", "two budgets"])
def test_a_row_that_a_chunk_wants_is_back_before_the_chunk_attends(tmp_path, store):
    cache, without = (cache_of(at, **STORES[store]) for at in (tmp_path, None))
    q, k, v = rows_of(160, 1)
    for start in range(0, 160, 40):
        part = slice(start, start + 40)
        for one in (cache, without):
            attended(one, 0 * q[:, :, part], k[:, :, part], v[:, :, part])
    absent = set(range(160)) - positions_of(cache, 0) - positions_of(cache, 1)
    wanted = min(p for p in absent if p % PAGE < 8)
    ask = asking_for(k, wanted)
    new = rows_of(2, 7)
    outs = [attended(one, mx.concatenate([ask, ask], axis=2), *new[1:]) for one in (cache, without)]
    assert all(wanted in positions_of(cache, head) for head in range(HEADS))
    value = mx.repeat(v[:, :, wanted], QUERIES // HEADS, axis=1)
    near, far = (float(mx.abs(out[:, :, 1] - value).max()) for out in outs)
    assert near < 0.2 < 1 < far
    # The rows behind it came, too: the model reads on from there.
    assert wanted + 1 in positions_of(cache, 0)


def test_a_fact_that_begins_in_one_page_comes_with_its_end_in_the_next(tmp_path):
    cache = cache_of(tmp_path, replace(OFTEN, pages=1))
    _, k, v = rows_of(320, 1)
    _, of_pages, _ = rows_of(320 // PAGE, 2)
    k = 0.1 * k + mx.repeat(of_pages, PAGE, axis=2)  # so that each page's mean tells it
    for start in range(0, 320, 40):
        part = slice(start, start + 40)
        attended(cache, mx.zeros((1, QUERIES, 40, WIDTH)), k[:, :, part], v[:, :, part])
    absent = set(range(320)) - positions_of(cache, 0)
    last = min(p for p in absent if p % PAGE == PAGE - 1 and p + 1 in absent)
    k[:, :, last] *= 1.5
    ask = asking_for(k, last)
    attended(cache, mx.concatenate([ask, ask], axis=2), *rows_of(2, 7)[1:])
    assert last + 1 in positions_of(cache, 0)


def test_a_row_that_decoding_wants_comes_a_little_later_and_leaves_when_unwanted(tmp_path):
    cache = cache_of(tmp_path)
    q, k, v = rows_of(160, 1)
    attended(cache, 0 * q[:, :, :40], k[:, :, :40], v[:, :, :40])
    attended(cache, 0 * q[:, :, 40:], k[:, :, 40:], v[:, :, 40:])
    absent = set(range(160)) - positions_of(cache, 0) - positions_of(cache, 1)
    wanted = min(p for p in absent if p + 1 in absent)
    steps = iter(range(10**6))

    def decode(count, position):
        for _ in range(count):
            attended(cache, asking_for(k, position), *rows_of(1, 50 + next(steps))[1:])

    # The row behind it comes with it. It gets no attention itself, and stays by its lease alone.
    decode(OFTEN.every + 1, wanted)
    for _ in range(6):
        assert {wanted, wanted + 1} <= positions_of(cache, 0) & positions_of(cache, 1)
        assert {wanted, wanted + 1} <= set(cache.back.credits[0].positions.tolist())
        decode(OFTEN.every, wanted)
    other = next(p for p in range(8, 40) if abs(p - wanted) > OFTEN.ahead)
    # The last queries still want it at the next return, not at the one after it.
    decode(2 * OFTEN.every, other)
    assert wanted + 1 not in cache.back.credits[0].positions
    decode(OFTEN.every, other)
    assert wanted + 1 not in positions_of(cache, 0) | positions_of(cache, 1)


@pytest.mark.parametrize("policy", ["salient", "h2o", "tova"])
def test_rows_that_no_query_gives_much_of_its_attention_stay_in_the_file(tmp_path, policy):
    spills = (Spill(tmp_path, returns=OFTEN), None)
    cache, without = (H2OKVCache(48, policy=policy, spill=spill) for spill in spills)
    for i, count in enumerate([40, *[1] * 20, 20, *[1] * 10]):
        q, k, v = rows_of(count, i)
        outs = [attended(one, 0.1 * q, k, v) for one in (cache, without)]
        assert mx.array_equal(*outs)
    assert cache.back.rows_read > 0
    assert cache.back.returned == 0


def test_a_lease_ends_without_a_trace_in_the_score(tmp_path):
    """A row's score is the attention that it got since it came."""
    cache = cache_of(tmp_path, returns=replace(OFTEN, room=0.3))
    q, k, v = rows_of(160, 1)
    for start in range(0, 160, 40):
        part = slice(start, start + 40)
        attended(cache, 0 * q[:, :, part], k[:, :, part], v[:, :, part])
    wanted = min(set(range(160)) - positions_of(cache, 0))
    got, others = 0.0, [p for p in range(8, 40) if p != wanted]
    came = False
    for i in range(3 * OFTEN.every):
        ask = asking_for(k, wanted if i <= OFTEN.every else others[i % 8])
        attended(cache, ask, *rows_of(1, 500 + i)[1:])
        views = cache.store.views(cache.store.runs[0])
        held = true_positions(views["positions"])[0, 0].tolist()
        if wanted not in held:
            continue
        came = True
        credit = dict(zip(*(part.tolist() for part in cache.back.credits[0]), strict=True))
        got = views["scores"][0, 0, held.index(wanted)].item() - credit.get(wanted, 0)
        # At most all of the attention of each step since.
        assert -1e-3 < got <= 3 * OFTEN.every
    assert came
    assert wanted not in cache.back.credits[0].positions


def test_rows_come_back_only_to_the_heads_that_ask_for_them(tmp_path):
    cache = cache_of(tmp_path, budgets=[24, 40])
    cache.spill_to(cache.spill, frozenset({1}))
    alone = cache_of(None, budgets=[24, 40])
    for i, count in enumerate([40, 20, *[1] * 20, 20]):
        for one in (cache, alone):
            attended(one, *rows_of(count, i))
    assert cache.back.returned > 0
    # Only their queries are kept, in 16 bits, and no arrays from which they were made.
    kept = mx.concatenate(cache.back.queries, axis=2)
    assert kept.shape[1] == QUERIES // HEADS
    assert kept.dtype == mx.float16
    asked = rows_of(20, 22)[0][:, 2:, -OFTEN.window :]
    assert mx.array_equal(kept[:, :, -OFTEN.window :], asked.astype(mx.float16))
    assert positions_of(cache, 0) == positions_of(alone, 0)
    assert positions_of(cache, 1) != positions_of(alone, 1)


@pytest.mark.parametrize("rows", [0, 60])
def test_copies_bring_rows_back_to_the_same_heads(tmp_path, rows):
    """A server copies the caches of every request."""
    cache = cache_of(tmp_path, budgets=[24, 40])
    cache.spill_to(cache.spill, frozenset({1}))
    if rows:
        attended(cache, *rows_of(rows, 0))
    other = copy.deepcopy(cache)
    assert other.back.heads == frozenset({1})
    assert other.back is not cache.back
    assert len(other.back.queries) == len(cache.back.queries) == min(rows, 1)
    if rows:
        assert other.layer.back is other.back


@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
def test_policies_without_attention_get_no_rows_back(tmp_path, policy):
    cache = H2OKVCache(48, policy=policy, spill=Spill(tmp_path, returns=OFTEN))
    for i, count in enumerate([40, 20, 40]):
        attended(cache, *rows_of(count, i))
    assert cache.back.returned == 0


def test_slots_are_bought_with_less_retrieval_loss_where_rows_return(tmp_path):
    """Not where no row can come back: with a policy that sees no attention."""
    model, _ = load(EMBEDDED_MODEL)
    profile = Profile.load(MODELS / "recall-4m" / FILE_NAME)

    def shares(spill, policy="salient"):
        cache = make_prompt_cache(model, 180, budgets=profile, spill=spill, policy=policy)
        least = cache[0].policy.least_budget() + FEWEST_CHOICES
        mean = cache[0].settings.filling[0].beyond
        slots = [list(entry.settings.filling[-1].budgets) for entry in cache]
        return slots, mean, least

    back, *size = shares(Spill(tmp_path))
    assert back == profile.where_rows_return().budgets(*size) != profile.budgets(*size)
    slots, *size = shares(None)
    assert slots == profile.budgets(*size)
    slots, *size = shares(Spill(tmp_path), "keydiff")  # gets no rows back
    assert slots == profile.budgets(*size)
    # Bits are chosen by all of the retrieval loss. By a quarter of it these rows would have 5.
    sized = make_prompt_cache(model, max_bytes=70_000, context=1024, spill=Spill(tmp_path))
    assert sized[0].packing.k_bits == 4


def test_a_file_that_cannot_be_read_changes_nothing_but_the_warning(tmp_path):
    cache, plain = cache_of(tmp_path), cache_of(None)
    for i, count in enumerate([40, 20]):
        for one in (cache, plain):
            attended(one, *rows_of(count, i))
    file = cache.spill.conversation.file
    assert file.flush()
    file._file.truncate(0)
    with pytest.warns(SpillStopped, match="cannot be read"):
        out = attended(cache, *rows_of(30, 8))
    assert mx.array_equal(out, attended(plain, *rows_of(30, 8)))
    assert mx.array_equal(*(attended(one, *rows_of(1, 9)) for one in (cache, plain)))


def test_copies_go_on_apart(tmp_path):
    cache = cache_of(tmp_path)
    for i, count in enumerate([40, 20, *[1] * 9]):
        attended(cache, *rows_of(count, i))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpillStopped)
        other = copy.deepcopy(cache)
        firsts = [attended(one, *rows_of(30, 77)) for one in (cache, other)]
        assert mx.array_equal(*firsts)
        for i in range(40):
            attended(cache, *rows_of(1, 100 + i))
        again = [attended(other, *rows_of(1, 200 + i)) for i in range(40)]
    assert all(mx.isfinite(out).all() for out in again)
    assert other.back.queries is not cache.back.queries


def test_drafted_tokens_are_taken_back_across_returns(tmp_path):
    cache = cache_of(tmp_path, undo=3)
    attended(cache, *rows_of(60, 0))
    for i in range(30):
        attended(cache, *rows_of(1, 10 + i))
        attended(cache, *rows_of(3, 50 + i))
        assert cache.trimmable >= 3
        assert cache.trim(2) == 2
    assert cache.back.returned > 0
    assert cache.offset == 60 + 30 * 2


def test_a_batch_of_conversations_decodes_as_each_alone(tmp_path):
    alone, members = [], []
    for i in range(2):
        caches = [cache_of(tmp_path) for _ in range(2)]
        for cache in caches:
            attended(cache, *rows_of(100, i))
        steps = [rows_of(1, 10 * t + i) for t in range(40)]
        alone.append([attended(caches[0], *step) for step in steps])
        members.append(caches[1])
    batch = H2OKVCache.merge(members)
    for t in range(40):
        of_both = zip(*(rows_of(1, 10 * t + i) for i in range(2)), strict=True)
        out = attended(batch, *(mx.concatenate(list(rows)) for rows in of_both))
        for i in range(2):
            assert mx.allclose(out[i], alone[i][t][0], rtol=1e-5, atol=1e-5), t
    assert all(cache.back.returned > 0 for cache in batch.caches)


def test_digests_are_read_as_they_were_written(tmp_path):
    keys = np.random.default_rng(0).normal(size=(2, TRACT + 40, PAGE, 8)).astype(np.float32)
    digests, made = PageDigests(tmp_path), digests_of(keys)
    for first in (0, 1, 30, TRACT - 1, TRACT + 2):
        digests.truncate(1, first * PAGE)
        digests.append(1, made[:, digests.count(1) :])
    for head in range(2):
        parts = list(digests.read(1, head, 8))
        assert [first for first, _ in parts] == [0, TRACT]
        read = np.concatenate([of_tract for _, of_tract in parts])
        assert np.array_equal(read, made[head])
        near = read["keys"] * read["scale"][:, None, None]
        largest = np.abs(keys[head]).max(axis=(1, 2), keepdims=True)
        assert (np.abs(near - keys[head]) <= largest / 253).all()
    assert not list(digests.read(0, 0, 8))
    assert not list(tmp_path.iterdir())


def test_evicted_facts_are_found_again(tmp_path):
    model, tokenizer = load("builtin:recall-4m")
    text = CALIBRATION_TEXT.read_text()
    task = recall_task(tokenizer, text, prompts=3, tokens=400, facts=1, seed=3)
    found = {}
    for spill in (None, Spill(tmp_path)):

        def make(spill=spill):
            return make_prompt_cache(model, 40, bits=6, spill=spill)

        found[spill is not None] = sum(recall(model, task, make, "recall").known)
    assert found[False] <= 1
    assert found[True] == 3
