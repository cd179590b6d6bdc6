"""Saving, loading, copying, trimming and resizing bounded caches, and sizes that hold exactly."""

import copy
import json
import pickle
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_lm_cache

import mlx_h2o
from mlx_h2o import (
    H2OKVCache,
    Profile,
    load_prompt_cache,
    make_policy,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.layer.saved_state import used_only
from mlx_h2o.loading.identity import identity_of
from mutants import parts_of, whole
from tiny_models import TinyLayer, kept_positions, prefill, prompt_tokens, tiny_model

LAYER = TinyLayer()
POLICIES = ["distinct", "h2o", "ema", "ema-logits", "tova", "streaming", "keydiff", "paper"]
KEYS_ONLY = ["distinct", "streaming", "keydiff"]


def cache_of(policy: str, mode: str) -> H2OKVCache:
    """An empty cache of about 24 slots a head."""
    recent = 8 if policy == "paper" else None
    if mode == "plain rows":
        mass_weight = {"mass_weight": 0.0} if policy == "distinct" else {}
        return PlainRowsKVCache(40, policy=make_policy(policy, **mass_weight))
    if mode == "ragged":
        return H2OKVCache(budgets=[16, 32], policy=make_policy(policy, recent=recent))
    return H2OKVCache(24, policy=make_policy(policy, recent=recent, evict_every=3))


# The report's policy chooses for all heads of a layer at once, so they must be alike.
UNIFORM_OR_RAGGED = [(p, "uniform") for p in POLICIES]
UNIFORM_OR_RAGGED += [(p, "ragged") for p in POLICIES if p != "paper"]
CASES = UNIFORM_OR_RAGGED + [(p, "plain rows") for p in KEYS_ONLY]


def same(a: H2OKVCache, b: H2OKVCache) -> bool:
    """Whether two caches hold the same, bit for bit; memory without a token may differ."""
    (mine, my_config), (theirs, their_config) = (used_only(c.arrays(), c.config()) for c in (a, b))
    return my_config == their_config and all(
        mx.array_equal(mine[name], theirs.get(name)) for name in mine
    )


def bits(cache: H2OKVCache) -> dict[str, bytes]:
    """What a cache holds now, out of reach of later steps."""
    return {name: np.array(array).tobytes() for name, array in cache.arrays().items()}


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.few(10)
@pytest.mark.pairwise
@pytest.mark.parametrize(("policy", "mode"), CASES)
@pytest.mark.parametrize("prompt", [9, 60], ids=["before eviction", "after"])
def test_a_loaded_cache_continues_as_if_nothing_had_happened(policy, mode, prompt, tmp_path):
    """Decode steps, victims chosen ahead included, and a chunk: bit for bit."""
    cache = cache_of(policy, mode)
    LAYER.feed(cache, prompt, chunk=20)
    LAYER.feed(cache, 5)
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, [cache])
    loaded = load_prompt_cache(path)[0]
    assert same(loaded, cache)
    assert (loaded.offset, loaded.size(), loaded.evicted) == (
        cache.offset,
        cache.size(),
        cache.evicted,
    )
    assert loaded.nbytes <= cache.nbytes
    assert loaded.is_trimmable() == cache.is_trimmable()
    for count, chunk in ((20, 1), (40, 40), (10, 1)):
        assert mx.array_equal(LAYER.feed(loaded, count, chunk), LAYER.feed(cache, count, chunk))
    assert same(loaded, cache)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["uniform", "ragged", "plain rows"])
def test_half_precision_survives_a_file(dtype, mode, tmp_path):
    layer, cache = TinyLayer(dtype=dtype, batch=2), cache_of("distinct", mode)
    layer.feed(cache, 60, chunk=20)
    save_prompt_cache(tmp_path / "cache.safetensors", [cache])
    loaded = load_prompt_cache(tmp_path / "cache.safetensors")[0]
    assert mx.array_equal(layer.feed(loaded, 10), layer.feed(cache, 10))


@pytest.mark.parametrize(
    "family", ["llama", "gpt_oss", "qwen3_next", "gemma2", "gemma2_by_itself", "deepseek_v3"]
)
def test_a_models_mixed_caches_survive_a_file(family, tmp_path):
    """Sliding windows and states of mlx-lm's own beside the bounded layers."""
    model = tiny_model(family)
    cache = make_prompt_cache(model, max_size=24)
    prefill(model, cache, prompt_tokens(60), 13)
    save_prompt_cache(tmp_path / "cache.safetensors", cache, {"model": family, "n": "60"})
    loaded, metadata = load_prompt_cache(tmp_path / "cache.safetensors", return_metadata=True)
    assert metadata == {"model": family, "n": "60"}
    assert [type(entry) for entry in loaded] == [type(entry) for entry in cache]
    for start in range(60, 75, 5):
        tokens = mx.array([prompt_tokens(75)[start : start + 5]])
        assert mx.array_equal(model(tokens, cache=loaded), model(tokens, cache=cache))
    for token in (3, 1, 4):
        tokens = mx.array([[token]])
        assert mx.array_equal(model(tokens, cache=loaded), model(tokens, cache=cache))


def test_lists_of_caches_and_unused_caches_survive_a_file(tmp_path):
    window, state = mlx_lm_cache.RotatingKVCache(max_size=8, keep=2), mlx_lm_cache.ArraysCache(2)
    state[0] = mx.arange(6).reshape(1, 6)
    cache = [
        mlx_lm_cache.CacheList(cache_of("distinct", "ragged"), mlx_lm_cache.KVCache()),
        mlx_lm_cache.CacheList(state, mlx_lm_cache.CacheList(cache_of("h2o", "uniform"), window)),
        H2OKVCache(max_bytes=9000),
        H2OKVCache(30, policy="keydiff", remainder=False),
    ]
    leaves = cache[0][0], cache[0][1], cache[1][1][0], window
    for leaf in leaves:
        LAYER.feed(leaf, 40, chunk=20)
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    loaded = load_prompt_cache(tmp_path / "cache.safetensors")
    twins = loaded[0][0], loaded[0][1], loaded[1][1][0], loaded[1][1][1]
    for leaf, twin in zip(leaves, twins, strict=True):
        assert type(leaf) is type(twin)
        assert mx.array_equal(LAYER.feed(twin, 12), LAYER.feed(leaf, 12))
    assert mx.array_equal(loaded[1][0][0], state[0])
    assert loaded[1][0][1] is None
    for unused, twin in zip(cache[2:], loaded[2:], strict=True):
        assert twin.empty()
        assert same(twin, unused)
        assert mx.array_equal(LAYER.feed(twin, 60, 20), LAYER.feed(unused, 60, 20))


def test_a_cache_without_entries_survives_a_file(tmp_path):
    save_prompt_cache(tmp_path / "cache.safetensors", [], {"a": "b"})
    assert load_prompt_cache(tmp_path / "cache.safetensors", True) == ([], {"a": "b"})


def test_an_object_that_is_no_cache_is_not_saved(tmp_path):
    class Stranger(mlx_lm_cache.KVCache):
        """Loading it would need a class that cannot be found."""

    with pytest.raises(ValueError, match="Cannot save a Stranger"):
        save_prompt_cache(tmp_path / "cache.safetensors", [Stranger()])


@pytest.mark.parametrize("metadata", [{}, {"text": 'née "Ω"\n', "": ""}])
def test_metadata_comes_back_as_it_was(metadata, tmp_path):
    cache = cache_of("h2o", "uniform")
    LAYER.feed(cache, 30, chunk=30)
    save_prompt_cache(tmp_path / "cache.safetensors", [cache], metadata)
    assert load_prompt_cache(tmp_path / "cache.safetensors", True)[1] == metadata
    assert isinstance(load_prompt_cache(tmp_path / "cache.safetensors"), list)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> bytes:
    """A file of one evicted cache."""
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    cache = cache_of("distinct", "uniform")
    LAYER.feed(cache, 60, chunk=20)
    save_prompt_cache(path, [cache], {"a": "b"})
    return path.read_bytes()


def refused(path: Path, content: bytes) -> str:
    """The message with which a file of this content is refused."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=path.name) as refusal:
        load_prompt_cache(path)
    # A parser's own error escaping would be a ValueError too, without a word about the file.
    assert type(refusal.value) is ValueError
    return str(refusal.value)


def test_truncated_files_are_refused(saved, tmp_path):
    header = struct.unpack("<Q", saved[:8])[0] + 8
    for length in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(saved) - 1):
        message = refused(tmp_path / "cut.safetensors", saved[:length])
        assert "no readable prompt cache" in message


def test_random_bytes_are_refused(tmp_path):
    noise = np.random.default_rng(0)
    for length in (3, 8, 100, 5000):
        assert "no readable" in refused(tmp_path / "noise.safetensors", noise.bytes(length))
    huge = struct.pack("<Q", 2**63) + b"{}"
    assert "no readable" in refused(tmp_path / "noise.safetensors", huge)


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(ValueError, match="no readable prompt cache"):
            load_prompt_cache(path)


def test_mlx_lms_own_files_are_refused_with_the_way_to_load_them(tmp_path):
    cache = mlx_lm_cache.KVCache()
    LAYER.feed(cache, 5)
    path = tmp_path / "stock.safetensors"
    mlx_lm_cache.save_prompt_cache(str(path), [cache])
    message = refused(path, path.read_bytes())
    assert "was not written by mlx_h2o" in message
    assert "mlx_lm.models.cache.load_prompt_cache" in message


def test_one_flipped_byte_in_the_data_is_noticed(saved, tmp_path):
    header, data = parts_of(saved)
    arrays = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert {"0.slots.keys", "0.remainder.count", "0.victims"} <= set(arrays)
    for name, entry in arrays.items():  # One in the first and the last byte of every array.
        for at in (entry["data_offsets"][0], entry["data_offsets"][1] - 1):
            changed = bytearray(saved)
            changed[len(saved) - len(data) + at] ^= 1
            message = refused(tmp_path / "flipped.safetensors", bytes(changed))
            assert "changed or damaged" in message, name


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_noticed(saved, tmp_path_factory, data):
    """In the header too: whatever it breaks, the answer is the one ValueError."""
    at = data.draw(st.integers(0, len(saved) - 1))
    changed = bytearray(saved)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    refused(tmp_path_factory.getbasetemp() / "flipped.safetensors", bytes(changed))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("digest", None),
        ("digest", lambda text: text[::-1]),
        ("entries", None),
        ("entries", lambda text: "[]"),
        ("entries", lambda text: text[:-1]),
        ("entries", lambda text: text.replace('"offset": 60', '"offset": 61')),
        ("entries", lambda text: text.replace("distinct", "streaming")),
        ("metadata", None),
        ("metadata", lambda text: '{"a": "c"}'),
        ("format", None),
        ("version", None),
        ("version", lambda text: "999"),
        ("more", lambda text: "1"),
    ],
)
def test_edited_metadata_is_noticed(saved, tmp_path, key, change):
    header, data = parts_of(saved)
    notes = header["__metadata__"]
    old = notes.pop(key, "")
    if change is not None:
        assert change(old) != old
        notes[key] = change(old)
    message = refused(tmp_path / "edited.safetensors", whole(header, data))
    expected = {"format": "was not written by mlx_h2o", "version": "format version"}
    assert expected.get(key, "changed or damaged") in message


def test_edited_metadata_of_an_unused_cache_is_noticed(tmp_path):
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, [H2OKVCache(24)])
    header, data = parts_of(path.read_bytes())
    notes = header["__metadata__"]
    notes["entries"] = notes["entries"].replace('"max_size": 24', '"max_size": 48')
    assert "changed or damaged" in refused(path, whole(header, data))


# -- state and copies -----------------------------------------------------------------------------


@pytest.mark.few(8)
@pytest.mark.pairwise
@pytest.mark.parametrize(("policy", "mode"), CASES)
def test_state_is_everything(policy, mode):
    cache = cache_of(policy, mode)
    LAYER.feed(cache, 60, chunk=20)
    LAYER.feed(cache, 2)
    twin = type(cache).from_state(cache.state)
    assert same(twin, cache)
    assert same(type(cache).from_state(cache.state, ""), cache)  # As mlx-lm before 0.32.1 calls it.
    outs = LAYER.feed(cache, 10), LAYER.feed(twin, 10)
    assert mx.array_equal(*outs)
    assert same(twin, cache)


def test_a_state_that_is_none_is_refused():
    cache = cache_of("distinct", "uniform")
    LAYER.feed(cache, 60, chunk=20)
    arrays, text = cache.state
    config = json.loads(text)
    short = {**arrays, "slots.keys": arrays["slots.keys"][:, :-1]}
    without = {name: array for name, array in arrays.items() if name != "remainder.count"}
    for state in (
        (short, text),
        (without, text),
        ({}, text),
        (arrays, "{}"),
        (arrays, "no json"),
        (arrays, json.dumps({**config, "runs": [{}]})),
        (arrays, json.dumps({**config, "policy": {"name": "nope"}})),
        (arrays,),
        None,
    ):
        with pytest.raises(ValueError, match=r"."):
            H2OKVCache.from_state(state)


@pytest.mark.few(8)
@pytest.mark.pairwise
@pytest.mark.parametrize(("policy", "mode"), CASES)
def test_a_deep_copy_goes_its_own_way(policy, mode):
    """In-place writes of the one must not reach the other."""
    cache, undisturbed = cache_of(policy, mode), cache_of(policy, mode)
    for each in (cache, undisturbed):
        LAYER.feed(each, 60, chunk=20)
        LAYER.feed(each, 2)
    expected = LAYER.feed(undisturbed, 30)
    twin = copy.deepcopy(cache)
    before = bits(cache)
    LAYER.feed(twin, 15, first=300)  # Other tokens than the original will see.
    LAYER.feed(twin, 30, chunk=30)
    assert bits(cache) == before
    assert cache.offset == 62
    assert mx.array_equal(LAYER.feed(cache, 30), expected)


@pytest.mark.parametrize("twin", [copy.copy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_and_a_pickled_cache_go_on_where_they_were(twin):
    """While decoding, when the rows are with the kernel: pickling failed then."""
    cache = H2OKVCache(budgets=[16, 32], bits=8, group_size=32, recent_bits=16)
    layer = TinyLayer(key_width=32, value_width=32, dtype=mx.bfloat16)
    layer.feed(cache, 60, chunk=20)
    layer.feed(cache, 3)
    other = twin(cache)
    assert mx.array_equal(layer.feed(other, 30), layer.feed(cache, 30))
    assert same(other, cache)


def test_a_cache_is_not_saved_or_copied_in_the_middle_of_a_step(tmp_path):
    cache = cache_of("distinct", "uniform")
    LAYER.feed(cache, 30, chunk=30)
    q, k, v = LAYER.at(30)
    handed = cache.update_and_fetch(k, v)
    path = tmp_path / "cache.safetensors"
    for save in (
        pickle.dumps,
        copy.deepcopy,
        lambda c: c.state,
        lambda c: save_prompt_cache(path, [c]),
    ):
        with pytest.raises(RuntimeError, match="middle of a step"):
            save(cache)
    unrouted = cache_of("distinct", "uniform")
    unrouted.update_and_fetch(k, v)
    with pytest.raises(RuntimeError, match=r"mlx_h2o\.install"):  # no model ever attended to it
        _ = unrouted.state
    cache.attend(q, *handed, scale=LAYER.scale)
    assert pickle.loads(pickle.dumps(cache)).offset == 31
    assert not path.exists()


WITHIN_A_STEP = {
    "trim": lambda cache: cache.trim(1),
    "trim_prompt_cache": lambda cache: mlx_lm_cache.trim_prompt_cache([cache], 1),
    "resize": lambda cache: cache.resize(20),
    "resize of all": lambda cache: mlx_h2o.resize([cache], max_size=20),
    "pin": lambda cache: cache.pin([(2, 4)]),
    "pin of all": lambda cache: mlx_h2o.pin([cache], [(2, 4)]),
    "unpin": lambda cache: cache.unpin(),
    "new_turn": lambda cache: cache.new_turn(0.5),
    "arrays": lambda cache: cache.arrays(),
    "config": lambda cache: cache.config(),
    "slots": lambda cache: cache.slots(cache.store.runs[0]),
    "merge": lambda cache: cache.merge([cache]),
}


@pytest.mark.parametrize("undo", [0, 3])
@pytest.mark.parametrize("length", [1, 2])
def test_nothing_changes_or_reads_a_cache_in_the_middle_of_a_step(undo, length):
    """And what was refused left no trace."""
    mlx_h2o.install()
    cache, untouched = (H2OKVCache(24, undo=undo) for _ in range(2))
    for one in (cache, untouched):
        LAYER.feed(one, 30, chunk=10)
        LAYER.feed(one, 3)
    q, k, v = LAYER.at(33, length)
    handed = cache.update_and_fetch(k, v)
    for change in WITHIN_A_STEP.values():
        with pytest.raises(RuntimeError, match="middle of a step"):
            change(cache)
    mask = None if length == 1 else "causal"
    out = cache.attend(q, *handed, scale=LAYER.scale, mask=mask)
    assert mx.array_equal(out, LAYER.feed(untouched, length, length))
    assert cache.config() == untouched.config()
    for name, array in untouched.arrays().items():
        assert mx.array_equal(cache.arrays()[name], array), name


def test_a_list_with_one_cache_in_the_middle_of_a_step_stays_as_it_is():
    """A call of the model that failed between two layers leaves such a list."""
    mlx_h2o.install()  # so that mlx-lm's trim_prompt_cache trims all layers or none
    done, within = (H2OKVCache(24, undo=2) for _ in range(2))
    for one in (done, within):
        LAYER.feed(one, 30, chunk=10)
        LAYER.feed(one, 2)
    within.update_and_fetch(*LAYER.at(32)[1:])
    before = done.config(), {name: mx.array(array) for name, array in done.arrays().items()}
    for change in (
        lambda caches: mlx_lm_cache.trim_prompt_cache(caches, 1),
        lambda caches: mlx_h2o.resize(caches, max_size=20),
        lambda caches: mlx_h2o.pin(caches, [(28, 29)]),
        lambda caches: mlx_h2o.unpin(caches),
        lambda caches: mlx_h2o.new_turn(caches, 0.5),
    ):
        with pytest.raises(RuntimeError, match="middle of a step"):
            change([done, within])
    assert done.config() == before[0]
    assert all(mx.array_equal(array, before[1][name]) for name, array in done.arrays().items())


def test_repr_says_what_a_cache_holds():
    empty = H2OKVCache(max_bytes=90000, policy="keydiff", remainder=False)
    assert repr(empty) == (
        "<H2OKVCache: keydiff, at most 90,000 bytes, no remainder; 0 of 0 tokens in 0 bytes>"
    )
    assert repr(H2OKVCache(64)) == "<H2OKVCache: distinct, 64 slots; 0 of 0 tokens in 0 bytes>"
    ragged = H2OKVCache(budgets=[16, 32], bits=4, group_size=32)
    TinyLayer(key_width=32, value_width=32).feed(ragged, 60, chunk=30)
    assert repr(ragged) == (
        "<H2OKVCache: distinct, 16 to 32 slots in 4 bits; 32 of 60 tokens in "
        f"{ragged.nbytes:,} bytes>"
    )


# -- trimming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 6])
@pytest.mark.parametrize("mode", ["uniform", "ragged", "plain rows"])
@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
def test_trimmed_tokens_leave_no_trace(policy, mode, chunk):
    """Of policies without history: as if other tokens had come in their place from the start."""
    other = TinyLayer(seed=9)
    cache, fresh = (cache_of(policy, mode) for _ in range(2))
    LAYER.feed(cache, 14, chunk=7)
    assert cache.is_trimmable()
    assert cache.trim(6) == 6
    assert cache.offset == 8
    LAYER.feed(fresh, 8, chunk=8)
    for count in (4, 60):  # Before the first eviction and far beyond it.
        outs = [other.feed(c, count, chunk) for c in (cache, fresh)]
        np.testing.assert_allclose(*outs, atol=1e-5)
        assert kept_positions(cache) == kept_positions(fresh)


def test_trim_takes_back_no_more_than_there_is():
    cache = cache_of("h2o", "uniform")
    assert cache.is_trimmable()
    assert cache.trim(3) == 0
    LAYER.feed(cache, 10, chunk=10)
    assert cache.trim(99) == 10
    assert (cache.offset, cache.size()) == (0, 0)
    assert mx.all(mx.isfinite(LAYER.feed(cache, 60, chunk=20)))


@pytest.mark.few(6)
@pytest.mark.pairwise
@pytest.mark.parametrize(("policy", "mode"), CASES)
def test_nothing_can_be_trimmed_once_something_was_evicted(policy, mode):
    cache = cache_of(policy, mode)
    LAYER.feed(cache, 60, chunk=20)
    before = bits(cache)
    assert cache.evicted > 0
    assert not cache.is_trimmable()
    with pytest.raises(ValueError, match=r"only the last 0 steps .* undo=1 or more"):
        cache.trim(1)
    assert (cache.offset, bits(cache)) == (60, before)


@pytest.mark.few(8)
@pytest.mark.parametrize("n", [0, 1, 8])
@pytest.mark.parametrize("mode", ["uniform", "ragged", "plain rows"])
@pytest.mark.parametrize("policy", ["streaming", "keydiff"])
def test_a_cache_that_is_just_full_can_be_trimmed_and_go_on(policy, mode, n):
    """The victims chosen for a step that never came must be chosen anew, and not be missing."""
    other = TinyLayer(seed=9)
    cache, fresh = (cache_of(policy, mode) for _ in range(2))
    LAYER.feed(cache, 1)
    full = min(run.budget for run in cache.store.runs)
    LAYER.feed(cache, full - 1)
    assert cache.trim(n) == n
    assert cache.offset == full - n
    LAYER.feed(fresh, full - n)
    for _ in range(30):
        np.testing.assert_allclose(other.feed(cache, 1), other.feed(fresh, 1), atol=1e-5)
    assert kept_positions(cache) == kept_positions(fresh)


# -- resizing -------------------------------------------------------------------------------------


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("policy", "mode", "target"),
    [("paper", "uniform", 14)]
    + [
        (policy, mode, target)
        for policy, mode in UNIFORM_OR_RAGGED
        for target in (14, [14, 12], [12, 18])
        if policy != "paper"
    ],
)
def test_a_smaller_budget_sends_the_rest_to_the_remainder(policy, mode, target):
    recent = {"recent": 4, "evict_every": 1}
    cache = H2OKVCache(24, policy=make_policy(policy, **recent))
    if mode == "ragged":
        cache = H2OKVCache(budgets=[20, 28], policy=make_policy(policy, **recent))
    LAYER.feed(cache, 60, chunk=20)
    held = kept_positions(cache)
    budgets = target if isinstance(target, list) else [target] * 2
    cache.resize(target)
    assert [len(head) for head in kept_positions(cache)] == budgets
    for before, after in zip(held, kept_positions(cache), strict=True):
        assert set(after) < set(before)
        assert set(range(56, 60)) | {0, 1, 2, 3} <= set(after)
    assert cache.remainder.count.tolist() == [[60.0 - budget for budget in budgets]]
    evicted = TinyLayer().tokens[1][0].astype(mx.float32)
    for head, after in enumerate(kept_positions(cache)):
        gone = mx.array(sorted(set(range(60)) - set(after)))
        np.testing.assert_allclose(
            cache.remainder.mean_key[0, head], evicted[head][gone].mean(0), atol=1e-5
        )
    assert mx.all(mx.isfinite(LAYER.feed(cache, 40)))
    assert [len(head) for head in kept_positions(cache)] == budgets
    assert cache.remainder.count.tolist() == [[100.0 - budget for budget in budgets]]


@pytest.mark.parametrize("target", [48, [30, 48]], ids=str)
@pytest.mark.parametrize("mode", ["uniform", "ragged"])
def test_a_larger_budget_is_filled_before_anything_more_is_evicted(mode, target):
    cache = cache_of("h2o", mode)
    LAYER.feed(cache, 60, chunk=20)
    held, count = kept_positions(cache), cache.remainder.count.tolist()
    cache.resize(target)
    assert kept_positions(cache) == held
    assert cache.remainder.count.tolist() == count
    budgets = target if isinstance(target, list) else [target] * 2
    room = [budget - len(head) for budget, head in zip(budgets, held, strict=True)]
    # What the heads held before stays until the larger budget is full; one by one and in a chunk.
    LAYER.feed(cache, min(room), chunk=3 if min(room) > 10 else 1)
    for before, after in zip(held, kept_positions(cache), strict=True):
        assert set(before) < set(after)
    assert cache.remainder.count.tolist() == count
    LAYER.feed(cache, 60)
    assert [len(head) for head in kept_positions(cache)] == budgets
    assert not cache.is_trimmable()


def test_a_cache_of_plain_rows_can_be_resized():
    """To more and to less, with one budget for all heads; masks follow."""
    cache = cache_of("streaming", "plain rows")
    LAYER.feed(cache, 60, chunk=20)
    for size in (24, 40, 16):
        cache.resize(size)
        assert mx.all(mx.isfinite(LAYER.feed(cache, 30, chunk=7)))
        assert mx.all(mx.isfinite(LAYER.feed(cache, 20)))
        assert cache.size() == size
    assert cache.remainder.count.tolist() == [[cache.offset - 16.0] * 2]


@pytest.mark.parametrize("started", [False, True], ids=["unused", "in use"])
@pytest.mark.parametrize(
    ("mode", "target", "text"),
    [
        ("uniform", 3, "max_size=3 is too small: it must hold 4 sink"),
        ("uniform", [24, 3], "max_size=3 is too small: it must hold 4 sink"),
        ("plain rows", [24, 32], "one budget for all heads"),
        ("layer", [24, 32], "one budget for all heads"),
    ],
)
def test_resizing_to_budgets_that_cannot_be_is_refused(mode, target, text, started):
    if mode == "layer":
        cache = H2OKVCache(24, policy=make_policy("h2o", unit="layer"))
    else:
        cache = cache_of("streaming" if mode == "plain rows" else "h2o", mode)
    if started:
        LAYER.feed(cache, 60, chunk=20)
    with pytest.raises(ValueError, match=text):
        cache.resize(target)
    LAYER.feed(cache, 20)  # It goes on as it was.


def test_resizing_needs_a_budget_for_every_head():
    cache = cache_of("h2o", "uniform")
    LAYER.feed(cache, 10)
    with pytest.raises(ValueError, match="one budget for each of 2 KV heads"):
        cache.resize([24, 24, 24])


def test_a_cache_can_be_resized_before_it_is_used():
    cache = H2OKVCache(max_bytes=100_000, policy="streaming", remainder=False)
    cache.resize(20)
    LAYER.feed(cache, 60, chunk=20)
    assert cache.size() == 20
    cache = H2OKVCache(24, policy="streaming", remainder=False)
    cache.resize([16, 32])
    LAYER.feed(cache, 60, chunk=20)
    assert [len(head) for head in kept_positions(cache)] == [16, 32]


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.few(8)
@pytest.mark.pairwise
@pytest.mark.parametrize("remainder", [True, False], ids=["remainder", ""])
@pytest.mark.parametrize("evict_every", [1, 4])
@pytest.mark.parametrize("policy", ["distinct", "salient", "h2o", "streaming", "keydiff", "paper"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_max_bytes_is_a_bound_and_no_slot_is_wasted(dtype, policy, evict_every, remainder):
    """Everything held counts, and one slot more a head would be too much."""
    chosen = make_policy(policy, evict_every=evict_every, recent=4)
    layer = TinyLayer(heads=3, batch=2, key_width=8, value_width=12, dtype=dtype)
    for max_bytes in (8_000, 12_345):
        cache = H2OKVCache(max_bytes=max_bytes, policy=chosen, remainder=remainder)
        layer.feed(cache, 100, chunk=50)
        layer.feed(cache, 2)
        budget = cache.budgets[0]
        assert cache.budgets == [budget] * 3
        assert cache.size() == budget
        assert cache.nbytes <= max_bytes
        larger = H2OKVCache(budgets=[budget + 1] * 3, policy=chosen, remainder=remainder)
        layer.feed(larger, 102, chunk=51)
        assert larger.nbytes > max_bytes


@pytest.mark.parametrize("policy", KEYS_ONLY)
def test_max_bytes_is_a_bound_with_plain_rows(policy):
    mass_weight = {"mass_weight": 0.0} if policy == "distinct" else {}
    for max_bytes in (6_000, 12_345, 20_000):
        cache = PlainRowsKVCache(max_bytes=max_bytes, policy=make_policy(policy, **mass_weight))
        for count, chunk in ((100, 40), (20, 1)):
            LAYER.feed(cache, count, chunk)
            assert cache.nbytes <= max_bytes


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2_by_itself", "deepseek_v3"])
def test_max_bytes_of_a_model_bounds_its_layers_together(family):
    model = tiny_model(family)
    for max_bytes in (11_111, 30_000):
        cache = make_prompt_cache(model, max_bytes=max_bytes)
        prefill(model, cache, prompt_tokens(200), 50)
        bounded = [entry for entry in cache if isinstance(entry, BoundedKVCache)]
        held = sum(entry.nbytes for entry in bounded)
        # A slot a head of every layer is the least that can be left over.
        slot = sum(
            entry.store.heads * sum(f.nbytes // f.shape[1] for f in entry.store.fields.values())
            for entry in bounded
        )
        # Plain rows, whose budgets do not change, are counted with wide positions from the first.
        spare = sum(
            entry.size() * entry.store.heads * 2 for entry in bounded if not entry.attending
        )
        assert max_bytes - slot - spare - len(bounded) < held <= max_bytes


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
def test_max_size_charges_the_remainder(dtype):
    """A cache of n slots takes no more for rows and remainder than n plain rows would."""
    layer = TinyLayer(dtype=dtype)
    row = (layer.key_width + layer.value_width) * dtype.size
    # Count, mean and variance of the keys, and mean of the values, float32, in whole slots.
    charge = -(-4 * (1 + 2 * layer.key_width + layer.value_width) // row)
    for policy, remainder, charged in (
        ("h2o", True, charge),
        ("h2o", False, 0),
        ("streaming", True, charge),
        # It measures distances from the mean of the evicted, answering or not.
        ("distinct", False, charge),
    ):
        cache = H2OKVCache(32, policy=policy, remainder=remainder)
        layer.feed(cache, 60, chunk=20)
        assert cache.size() == 32 - charged
        held = sum(cache.store.fields[name].nbytes for name in ("keys", "values"))
        if charged:
            held += cache.remainder.nbytes
        assert held <= 32 * row * layer.heads


def test_max_size_of_a_model_charges_the_remainder():
    model = tiny_model("llama")
    plain = make_prompt_cache(model, max_size=40, policy="h2o", remainder=False)
    charged = make_prompt_cache(model, max_size=40, policy="h2o")
    assert plain[0].budgets == [40, 40]
    assert charged[0].budgets[0] < 40


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "exactly one of max_size, max_bytes, budgets; got none of them"),
        ({"max_size": 32, "max_bytes": 9000}, "exactly one"),
        ({"max_size": 32, "budgets": [32]}, "exactly one"),
        ({"max_size": 32, "policy": "nope"}, "Unknown policy 'nope'; choose from .*distinct"),
        ({"max_size": 6, "policy": "h2o"}, "max_size=6 is too small: it must hold 4 sink"),
        ({"max_size": 0, "policy": "streaming"}, "make max_size at least 5"),
        ({"budgets": [32, 6], "policy": "h2o"}, "lower sink, recent or evict_every"),
        ({"max_size": 32, "cls": PlainRowsKVCache}, "computes by itself .*: choose one .*keydiff"),
        (
            {"budgets": [32, 24], "policy": "streaming", "cls": PlainRowsKVCache},
            "one budget for all heads",
        ),
        ({"budgets": [24, 32], "policy": "h2o:unit=layer"}, "one budget for all heads"),
    ],
)
def test_bad_settings_are_refused_with_what_to_change(arguments, text):
    arguments = dict(arguments)
    cls = arguments.pop("cls", H2OKVCache)
    with pytest.raises(ValueError, match=text):
        cls(**arguments)


@pytest.mark.few(8)
@pytest.mark.parametrize("sink", [0, 4])
@pytest.mark.parametrize("recent", [0, 3, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("evict_every", [1, 3])
def test_the_budget_that_a_refusal_advises_is_enough(sink, recent, evict_every):
    policy = make_policy("h2o", sink=sink, recent=recent, evict_every=evict_every)
    for budget in range(40):
        try:
            policy.check_budget(budget)
        except ValueError as refusal:
            advised = int(str(refusal).split("max_size at least ")[1].split(",")[0])
            assert advised > budget
            policy.check_budget(advised)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"budgets": [24, 24, 24]}, "3 budgets were given for 2 KV heads"),
        ({"max_bytes": 300}, "max_bytes=300 is too small: .* make it at least"),
        # Enough for the constructor, and too little when the remainder is charged.
        ({"max_size": 10, "policy": "h2o"}, "make max_size at least"),
        ({"max_bytes": 1300, "policy": "h2o"}, "make it at least"),
    ],
)
def test_sizes_that_the_models_widths_rule_out_are_refused_at_the_first_step(arguments, text):
    with pytest.raises(ValueError, match=text):
        LAYER.feed(H2OKVCache(**arguments), 1)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.complex64], ids=str)
@pytest.mark.parametrize("which", [0, 1])
def test_keys_and_values_must_be_floats(dtype, which):
    rows = [mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8))]
    rows[which] = rows[which].astype(dtype)
    with pytest.raises(ValueError, match="must be float32, float16 or bfloat16"):
        H2OKVCache(32).update_and_fetch(*rows)


@pytest.mark.parametrize("which", ["both", "values"])
def test_a_change_of_dtype_midway_is_refused(which):
    cache = H2OKVCache(32)
    LAYER.feed(cache, 5)
    k, v = (x.astype(mx.float16) for x in LAYER.at(5)[1:])
    if which == "values":
        k = k.astype(mx.float32)
    with pytest.raises(ValueError, match=r"holds .*float32.*float16"):
        cache.update_and_fetch(k, v)
    assert cache.offset == 5


@pytest.mark.parametrize(
    "change", [{"batch": 2}, {"heads": 4}, {"key_width": 16}, {"value_width": 8}], ids=str
)
@pytest.mark.parametrize("count", [1, 4])
def test_a_change_of_shape_midway_is_refused(change, count):
    """It would be written over what is there, repeated, or cut."""
    cache = H2OKVCache(32)
    LAYER.feed(cache, 5)
    with pytest.raises(ValueError, match=r"."):
        TinyLayer(**change).feed(cache, count, chunk=count)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "exactly one of max_size, max_bytes; got none"),
        ({"max_size": 32, "max_bytes": 9000}, "got both max_size and max_bytes"),
        ({"max_size": 32, "policy": "nope"}, "Unknown policy 'nope'"),
        ({"max_size": 32, "heavy": 3}, "There is no option heavy"),
        ({"max_size": 32, "policy": "salient:sink=31"}, "make max_size at least"),
        ({"max_size": 1}, "make max_size at least"),
        ({"max_bytes": 100}, "make max_bytes at least"),
        ({"max_size": 32, "budgets": "/nowhere.json"}, "Cannot read the profile /nowhere.json"),
    ],
)
def test_bad_settings_of_a_models_cache_are_refused(arguments, text):
    """At once or, where only the rows tell the widths, at the first step."""
    model = tiny_model("llama")

    def first_step():
        prefill(model, make_prompt_cache(model, **arguments), [1], 1)

    with pytest.raises(ValueError, match=text):
        first_step()


# -- profiles -------------------------------------------------------------------------------------


def profile_of(model) -> Profile:
    curve = (3.0, 1.0, 0.0)
    return Profile(
        identity_of(model, [2, 2], [12, 12]), (12, 48, 96), ((curve, curve),) * 2, "by hand"
    )


def test_a_profile_survives_its_file(tmp_path):
    model = tiny_model("llama")
    profile = profile_of(model)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    cache = make_prompt_cache(model, max_size=40, budgets=tmp_path / "profile.json")
    sizes = [size for entry in cache for size in entry.budgets]
    assert sum(sizes) == 4 * make_prompt_cache(model, max_size=40)[0].budgets[0]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: tiny_model("llama", seed=5), "its embedding differs"),
        (lambda: tiny_model("qwen2"), "model_type is llama, not qwen2"),
        (lambda: tiny_model("gpt_oss"), "model_type is llama, not gpt_oss"),
    ],
)
def test_a_profile_of_another_model_is_refused(other, reason):
    profile = profile_of(tiny_model("llama"))
    with pytest.raises(ValueError, match="made for another model") as refusal:
        make_prompt_cache(other(), max_size=40, budgets=profile)
    assert reason in str(refusal.value)
    assert "mlx_h2o calibrate" in str(refusal.value)


def test_a_profile_still_fits_its_model_in_half_precision():
    profile = profile_of(tiny_model("llama"))
    make_prompt_cache(tiny_model("llama", dtype=mx.bfloat16), max_size=40, budgets=profile)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data.pop("format"), "is no mlx-h2o profile"),
        (lambda data: data.update(version=99), "has version 99; this reads 1"),
        (lambda data: data.pop("losses"), "damaged"),
        (lambda data: data.pop("model"), "damaged"),
        (lambda data: data.update(model=[]), "damaged"),
        (lambda data: data["model"].pop("probe"), "damaged"),
        (lambda data: data["model"].update(probe=["x"]), "damaged"),
        (lambda data: data.update(grid=[]), "grid must ascend"),
        (lambda data: data.update(grid=[12, 96, 48]), "grid must ascend"),
        (lambda data: data.update(grid=["a", "b", "c"]), "damaged"),
        (lambda data: data["losses"].pop(), "KV heads has losses for"),
        (lambda data: data["losses"][0][0].pop(), "one finite loss >= 0 per grid point"),
        (lambda data: data["losses"][0][0].__setitem__(0, -1.0), "one finite loss >= 0"),
        (lambda data: data["losses"][0][0].__setitem__(0, float("nan")), "one finite loss >= 0"),
        (lambda data: data["losses"][0][0].__setitem__(0, "much"), "damaged"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path, change, text):
    path = tmp_path / "profile.json"
    model = tiny_model("llama")
    profile_of(model).save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=text):
        make_prompt_cache(model, max_size=40, budgets=path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"format": 1}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"profile\.json"):
        Profile.load(path)


@pytest.mark.parametrize("mode", ["uniform", "ragged", "plain rows", "recent"])
def test_a_file_holds_used_slots_only(mode, tmp_path):
    """Memory comes in steps of 256 slots; a conversation of 14 tokens is a file of 14 rows."""
    if mode == "recent":
        policy = make_policy("h2o", recent=300)
        cache = H2OKVCache(budgets=[600, 600], policy=policy, bits=4, recent_bits=8)
    else:
        budgets = {"budgets": [400, 512]} if mode == "ragged" else {"max_size": 400}
        kind = PlainRowsKVCache if mode == "plain rows" else H2OKVCache
        cache = kind(**budgets, policy="streaming")
    layer = TinyLayer(key_width=64, value_width=64) if mode == "recent" else LAYER
    layer.feed(cache, 14, chunk=20)
    path = tmp_path / "cache.safetensors"
    save_prompt_cache(path, [cache])
    rows = cache.nbytes * 14 / 256
    assert path.stat().st_size < 3 * rows + 4096
    loaded = load_prompt_cache(path)[0]
    for count in (1, 1, 300):
        assert mx.array_equal(layer.feed(loaded, count), layer.feed(cache, count))
    assert same(loaded, cache)


def test_a_file_belongs_to_the_weights_it_was_made_with(tmp_path):
    """Another model of the same shape would go on from rows that mean nothing to it."""
    model, other, file = tiny_model("llama"), tiny_model("llama", seed=1), tmp_path / "cache"
    cache = make_prompt_cache(model, 32)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
    mlx_h2o.save_prompt_cache(file, cache, {"note": "a"}, model=model)
    loaded, metadata = mlx_h2o.load_prompt_cache(file, True, model=model)
    assert (loaded[0].offset, metadata["note"]) == (3, "a")
    with pytest.raises(ValueError, match="other weights"):
        mlx_h2o.load_prompt_cache(file, model=other)
    assert mlx_h2o.load_prompt_cache(file)[0].offset == 3
    mlx_h2o.save_prompt_cache(file, cache)  # it says nothing of its model
    assert mlx_h2o.load_prompt_cache(file, model=other)[0].offset == 3
