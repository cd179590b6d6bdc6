"""Taking steps back: afterwards a cache is, bit for bit, what it would be without them."""

import copy
import pickle
import random
from contextlib import nullcontext
from dataclasses import astuple

import mlx.core as mx
import pytest

from covering import covering
from mlx_h2o import H2OKVCache, load_prompt_cache, make_policy, make_prompt_cache, save_prompt_cache
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.policies import policy_names
from tiny_models import TinyLayer, tiny_model

UNDO = 5
STORES = {
    "dense": {},
    "packed": {"bits": 4, "group_size": 32},
    "packed keys": {"k_bits": 8, "group_size": 32},
    "mixed, wider": {"bits": 4, "recent_bits": 8, "group_size": 32},
    "mixed, unpacked": {"k_bits": 4, "recent_bits": 16, "group_size": 32},
}
BUDGETS = {
    "uniform": [24, 24],
    "ragged": [24, 40],
    "growing": [20, 300],  # One head's slots are allocated anew while the other evicts.
}
FACTORS = {
    "policy": [*policy_names(), "a step at a time"],
    "store": list(STORES),
    "budgets": list(BUDGETS),
    "reference": [False, True],
    "batch": [1, 2],
    "evict_every": [1, 3],
    "unit": ["head", "layer"],
    "remainder": [True, False],
    "dtype": [mx.float32, mx.float16],
}


def allowed(case) -> bool:
    return case["budgets"] == "uniform" or case["unit"] == "head"


CASES = covering(FACTORS, allowed)


def name_of(case) -> str:
    return "-".join(str(value).replace("mlx.core.", "") for value in case.values())


class Custom(type(make_policy("h2o"))):
    """A policy that no kernel knows."""

    def priority(self, slots):
        return super().priority(slots) + 0.0


def cache_of(case, undo=UNDO, **settings) -> H2OKVCache:
    options = {"evict_every": case["evict_every"], "unit": case["unit"], "recent": 8}
    own = case["policy"] == "a step at a time"
    policy = Custom(**options) if own else make_policy(case["policy"], **options)
    return H2OKVCache(
        budgets=BUDGETS[case["budgets"]],
        policy=policy,
        remainder=case["remainder"],
        undo=undo,
        **STORES[case["store"]],
        **settings,
    )


def layers_of(case) -> tuple[TinyLayer, TinyLayer]:
    """What is said, and what is taken back."""
    shape = {"key_width": 64, "value_width": 32, "batch": case["batch"], "dtype": case["dtype"]}
    return TinyLayer(seed=1, **shape), TinyLayer(seed=2, **shape)


def send(cache, rows) -> mx.array:
    """One call of a model; evaluated as decoding does, the output alone."""
    q, k, v = rows
    mask = cache.make_mask(q.shape[2])
    out = cache.attend(q, *cache.update_and_fetch(k, v), scale=0.125, mask=mask)
    mx.eval(out)
    return out


def joined(*parts):
    return tuple(mx.concatenate(rows, axis=2) for rows in zip(*parts, strict=True))


def held(cache) -> dict[str, bytes | tuple]:
    """Everything that decides what a cache does next, bit for bit."""
    store = cache.store
    found: dict[str, bytes | tuple] = {"offset": cache.offset}
    arrays = {f"remainder.{n}": a for n, a in cache.remainder.arrays.items()}
    for i, run in enumerate(store.runs):
        found[f"run {i}"] = (*astuple(run)[:4], run.victims)
        arrays |= {f"run {i} {name}": view for name, view in store.views(run).items()}
        if run.victims:
            named = cache.layer.victims[:, run.first : run.last, -run.victims :]
            arrays[f"run {i} victims"] = named
    if cache.layer.window is not None:
        found["recent"] = (cache.layer.window.length, cache.layer.window.oldest)
        fields = cache.layer.window._oldest_first()
        arrays |= {f"recent.{name}": field for name, field in fields.items()}
    for name, array in arrays.items():
        flat = mx.contiguous(array).reshape(-1)
        found[name] = bytes(flat.view(mx.uint8)) if flat.size else b""
    return found


def assert_same(cache, twin) -> None:
    ours, theirs = held(cache), held(twin)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


# Thirteen of the sixty cases have every policy and every store.
@pytest.mark.few(13)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_steps_taken_back_leave_no_trace(case):
    """Drafts of every length, checked in one call or step by step, rejected in part or whole."""
    said, unsaid = layers_of(case)
    rng = random.Random(0)
    cache, twin = cache_of(case), cache_of(case)
    with only_reference() if case["reference"] else nullcontext():
        for first in (cache, twin):
            send(first, said.at(0, 17))
        while cache.offset < 56:
            kept, gone = rng.randint(1, 3), rng.randint(1, UNDO - 2)
            start = cache.offset
            expected = [send(twin, said.at(start + i)) for i in range(kept)]
            if rng.random() < 0.7:
                chunk = joined(said.at(start, kept), unsaid.at(start, gone))
                got = send(cache, chunk)[:, :, :kept]
            else:
                rows = [said.at(start + i) for i in range(kept)]
                rows += [unsaid.at(start + i) for i in range(gone)]
                got = mx.concatenate([send(cache, row) for row in rows][:kept], axis=2)
            assert mx.array_equal(got, mx.concatenate(expected, axis=2))
            assert cache.is_trimmable()
            assert cache.trim(gone) == gone
            if rng.random() < 0.3:
                assert_same(cache, twin)
        assert_same(cache, twin)
        assert cache.evicted > 0
        for size in (1, 20, 1, 1):
            rows = said.at(cache.offset, size)
            assert mx.array_equal(send(cache, rows), send(twin, rows))
        assert_same(cache, twin)


@pytest.mark.few(2)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", ["distinct", "streaming"])
def test_kernels_keep_the_journal_and_take_back_in_place(policy, store):
    """A chunk is one operation; what is told of the bytes is what arrays then hold."""
    pytest.importorskip("mlx_h2o._ext", reason="the extension is not built here")
    said, unsaid = layers_of(CASES[0])
    settings = {"policy": make_policy(policy, recent=8), "undo": 4, **STORES[store]}
    cache = H2OKVCache(budgets=[24, 40], **settings)
    send(cache, said.at(0, 50))
    send(cache, said.at(50))
    decoder = cache.layer.decoder
    for gone in (4, 0, 2):
        send(cache, joined(said.at(cache.offset), unsaid.at(cache.offset, 4)))
        assert cache.trim(gone) == gone
    assert cache.layer.decoder is decoder
    assert len(cache.layer.journal) == 2
    assert not any(step.arrays for step in cache.layer.journal.steps)
    told = cache.nbytes
    cache.layer.take_back()
    assert all(step.arrays for step in cache.layer.journal.steps)
    assert cache.nbytes == told


@pytest.mark.parametrize("reference", [False, True])
def test_what_is_older_than_the_journal_stays(reference):
    said, _ = layers_of(CASES[0])
    cache = H2OKVCache(24, undo=3)
    with only_reference() if reference else nullcontext():
        for i in range(40):
            send(cache, said.at(i))
        before = held(cache)
        with pytest.raises(ValueError, match=r"only the last 3 steps .*undo=4"):
            cache.trim(4)
        assert held(cache) == before
        assert cache.trim(0) == cache.trim(-2) == 0
        assert (cache.trim(2), cache.trimmable, cache.is_trimmable()) == (2, 1, True)
        assert (cache.trim(1), cache.trimmable, cache.is_trimmable()) == (1, 0, False)
        with pytest.raises(ValueError, match="undo=1 or more"):
            cache.trim(1)
        send(cache, said.at(cache.offset))
        assert cache.trimmable == 1


def test_a_prompt_empties_the_journal_and_a_short_chunk_does_not():
    said, _ = layers_of(CASES[0])
    cache = H2OKVCache(24, undo=4)
    for i in range(40):
        send(cache, said.at(i))
    send(cache, said.at(40, 5))
    assert cache.trimmable == 4
    send(cache, said.at(45, 6))
    assert cache.trimmable == 0
    cache.resize(20)
    send(cache, said.at(cache.offset))
    assert cache.trimmable == 1
    cache.resize(18)
    assert cache.trimmable == 0


def test_steps_from_before_the_first_eviction_go_with_what_came_before_them():
    """The journal takes back six steps, and there nothing had been evicted: all may go."""
    said, _ = layers_of(CASES[0])
    cache, fresh = (H2OKVCache(budgets=[24, 24], policy="streaming", undo=6) for _ in range(2))
    send(cache, said.at(0, 22))
    for i in range(22, 28):
        send(cache, said.at(i))
    assert cache.evicted == 4
    assert cache.trimmable == 28
    assert cache.trim(20) == 20
    send(fresh, said.at(0, 8))
    for i in range(8, 60):
        assert mx.allclose(send(cache, said.at(i)), send(fresh, said.at(i)), atol=1e-5)
    assert cache.trimmable == 6


@pytest.mark.parametrize("store", ["dense", "mixed, wider"])
def test_a_pinned_token_within_a_chunk_is_marked(store):
    """As it comes, or as it leaves the recent window."""
    said, _ = layers_of(CASES[0])
    settings = {"policy": make_policy("distinct", recent=8), "undo": 4, **STORES[store]}
    cache, twin = (H2OKVCache(budgets=[24, 24], **settings) for _ in range(2))
    for c in (cache, twin):
        send(c, said.at(0, 30))
        c.pin([(33, 34)])
    for start in range(30, 50, 5):
        send(cache, said.at(start, 5))
        for i in range(start, start + 5):
            send(twin, said.at(i))
        assert_same(cache, twin)


@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_a_short_chunk_reads_its_array_mask_column_by_column(mask):
    said, _ = layers_of({"batch": 2, "dtype": mx.float32})
    cache, twin = (H2OKVCache(budgets=[24, 24], undo=4) for _ in range(2))
    visible = mx.array([[True, False], [True, True]])[:, None, None, :]  # one sequence is padded
    for c in (cache, twin):
        send(c, said.at(0, 30))
    q, k, v = said.at(30, 2)
    whole = mx.broadcast_to(visible, (2, 1, 2, 2)) & mx.array([[True, False], [True, True]])
    if mask == "additive":
        whole, visible = (mx.where(m, 0.0, -1e9) for m in (whole, visible))
    out = cache.attend(q, *cache.update_and_fetch(k, v), scale=0.125, mask=whole)
    for i in range(2):
        token = [x[:, :, i : i + 1] for x in (q, k, v)]
        fetched = twin.update_and_fetch(*token[1:])
        columns = [mx.zeros_like(visible[..., :1]) + (mask == "bool"), visible[..., i : i + 1]]
        column = mx.concatenate([c.astype(visible.dtype) for c in columns], axis=-1)
        expected = twin.attend(token[0], *fetched, scale=0.125, mask=column)
        assert mx.array_equal(out[:, :, i : i + 1], expected)
    assert_same(cache, twin)


@pytest.mark.few(3)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", ["distinct", "streaming", "h2o"])
def test_bytes_hold_with_the_journal(policy, store):
    said, _ = layers_of({"batch": 1, "dtype": mx.float16})
    limit = 24_000
    settings = {"max_bytes": limit, "policy": make_policy(policy, recent=0.25), **STORES[store]}
    cache, without = H2OKVCache(undo=8, **settings), H2OKVCache(**settings)
    for reference in (False, True):
        with only_reference() if reference else nullcontext():
            for c in (cache, without):
                send(c, said.at(c.offset, 100))
            for _ in range(12):
                for c in (cache, without):
                    send(c, said.at(c.offset))
                assert cache.nbytes <= limit
    assert cache.nbytes > 0.8 * limit
    assert cache.budgets[0] < without.budgets[0]


def test_copies_keep_the_journal_and_files_do_not(tmp_path):
    said, unsaid = layers_of(CASES[0])
    cache, twin = (H2OKVCache(24, undo=4) for _ in range(2))
    for i in range(40):
        for c in (cache, twin):
            send(c, said.at(i))
    for i in range(40, 43):
        send(cache, unsaid.at(i))
    save_prompt_cache(tmp_path / "chat.safetensors", [cache])
    (loaded,) = load_prompt_cache(tmp_path / "chat.safetensors")
    copied, pickled = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    assert (loaded.undo, loaded.trimmable, loaded.is_trimmable()) == (4, 0, False)
    for c in (cache, copied, pickled):
        assert c.trim(3) == 3
        assert_same(c, twin)
    send(loaded, said.at(loaded.offset))
    assert loaded.trimmable == 1
    save_prompt_cache(tmp_path / "trimmed.safetensors", [cache])
    (loaded,) = load_prompt_cache(tmp_path / "trimmed.safetensors")
    assert_same(loaded, twin)


def test_what_undo_cannot_be():
    for undo in (2.5, True, "4", None):
        with pytest.raises(ValueError, match="undo must be a whole number"):
            H2OKVCache(24, undo=undo)
    with pytest.raises(ValueError, match="undo must be at most 65536"):
        H2OKVCache(24, undo=2**40)
    arrays, config = H2OKVCache(24, undo=2).state
    with pytest.raises(ValueError, match="undo must be at most 65536"):
        H2OKVCache.from_state((arrays, config.replace('"undo": 2', '"undo": 1000000000000')))
    with pytest.raises(ValueError, match="undo must be at least 0"):
        make_prompt_cache(tiny_model("llama"), 24, undo=-1)
    with pytest.raises(ValueError, match="cannot take tokens back"):
        PlainRowsKVCache(24, undo=2, policy="streaming")
    for family in ("deepseek_v3", "phi3small"):
        with pytest.raises(ValueError, match="omit undo"):
            make_prompt_cache(tiny_model(family), 32, undo=2)
    with pytest.raises(ValueError, match="max_bytes=20000 is too small"):
        make_prompt_cache(tiny_model("llama"), max_bytes=20_000, undo=50)


def test_keys_made_of_the_cached_ones_are_refused():
    said, _ = layers_of(CASES[0])
    for L in (1, 3, 9):
        cache = H2OKVCache(24, undo=4, remainder=False)
        q, k, v = said.at(0, L)
        k, v = cache.update_and_fetch(k, v)
        with pytest.raises(RuntimeError, match="no undo"):
            cache.attend(q, k + 0, v, scale=0.125)


#: One layer of two heads, 40 slots each on average, shared out anew beyond 40 and 80 tokens.
STAGES = ((40, (60, 20)), (80, (24, 56)))


def growing(undo: int, policy: str = "distinct") -> H2OKVCache:
    settings = CacheSettings(
        budgets=(40, 40), policy=make_policy(policy), filling=STAGES, undo=undo
    )
    return H2OKVCache.of(settings)


@pytest.mark.parametrize("policy", ["distinct", "h2o"])
def test_a_growing_cache_keeps_all_that_fits_though_steps_can_be_taken_back(policy):
    tokens, cache = TinyLayer(), growing(undo=4, policy=policy)
    tokens.feed(cache, 40, 1)
    assert cache.evicted == 0
    tokens.feed(cache, 60, 1)
    assert tuple(cache.budgets) == STAGES[1][1]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rejected", [0, 1, 3])
def test_drafts_can_always_be_taken_back_where_slots_are_shared_out_anew(together, rejected):
    """As a draft model's cache sees them (one by one) and the main model's (in one chunk)."""
    tokens, cache = TinyLayer(), growing(undo=4)
    tokens.feed(cache, 30, 30)
    shared_out_at = []
    while cache.offset < 120:
        budgets, before = tuple(cache.budgets), cache.offset
        tokens.feed(cache, 4, 4 if together else 1)
        if tuple(cache.budgets) != budgets:
            shared_out_at.append(before)
        assert cache.trimmable >= 3
        assert cache.trim(rejected) == rejected
        assert cache.offset == before + 4 - rejected
        assert cache.evicted == 0 or cache.offset > 40
    assert tuple(cache.budgets) == STAGES[1][1]
    # Each within one draft of where it was due.
    for at, (beyond, _) in zip(shared_out_at, STAGES, strict=True):
        assert beyond - 4 <= at <= beyond + 4
    assert [run.length for run in cache.layer.runs] == [24, 56]
