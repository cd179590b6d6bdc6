"""Caches with a file of all their rows: what slots hold is in it, and nothing else changes."""

import copy
import pickle
import threading
import time
import warnings

import mlx.core as mx
import numpy as np
import pytest

from conversation_rows import HEADS, SCALE, WIDTH, attended, cache_of, rows_of
from mlx_h2o import H2OKVCache, Spill, load, make_prompt_cache, save_prompt_cache
from mlx_h2o.attention.backends.choice import only_reference
from mlx_h2o.budgets.cost import RowWidths
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.batch import BatchH2OKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.layer import returning
from mlx_h2o.slots.pins import true_positions
from mlx_h2o.spill import row_file
from mlx_h2o.spill.conversation_rows import SpillStopped
from mlx_h2o.spill.layout import POSITIONS
from mlx_h2o.spill.row_file import WAITING
from mlx_h2o.spill.setting import TOGETHER
from rows_for_files import wait_for
from tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _no_rows_come_back(monkeypatch):
    """So that outputs are those without a file."""
    monkeypatch.setattr(returning, "is_due", lambda *_: False)


def step(cache, count, seed, dtype=mx.float32):
    return attended(cache, *rows_of(count, seed, dtype))


def bits_of(array):
    array = array if isinstance(array, np.ndarray) else np.array(array.view(mx.uint8))
    return np.ascontiguousarray(array).view(np.uint8)


def require_slots_in_file(cache):
    """Every row of every slot is in the file, bit for bit."""
    names = [*cache.packing.names("keys"), *cache.packing.names("values")]
    for run in cache.store.runs:
        views = cache.store.views(run)
        positions = np.array(true_positions(views["positions"]))
        for head in range(run.heads):
            rows = cache.spill.rows(run.first + head, positions[0, head])
            assert set(rows) == set(names)
            for name in names:
                assert np.array_equal(bits_of(rows[name]), bits_of(views[name][0, head])), name


STORES = {
    "dense": {},
    "bfloat16": {"dtype": mx.bfloat16},
    "float16": {"dtype": mx.float16},
    "8 bits": {"bits": 8},
    "6 bits, half": {"bits": 6, "dtype": mx.float16},
    "4 bits": {"bits": 4},
    "framed": {"bits": 6, "frame": True},
    "framed, bfloat16": {"bits": 4, "frame": True, "dtype": mx.bfloat16},
    "keys alone": {"k_bits": 5},
    "newest dense": {"bits": 4, "recent_bits": 16},
    "newest wider": {"bits": 4, "recent_bits": 8, "frame": True},
    "undo": {"bits": 6, "undo": 5},
    "two budgets": {"budgets": [24, 40]},
}


@pytest.mark.few(5)
@pytest.mark.parametrize("reference", [False, True], ids=["fused", "definition"])
@pytest.mark.parametrize("store", STORES)
def test_what_slots_hold_is_in_the_file(tmp_path, store, reference):
    options = dict(STORES[store])
    dtype = options.pop("dtype", mx.float32)
    context = only_reference() if reference else warnings.catch_warnings()
    with context:
        cache, plain = cache_of(tmp_path, **options), cache_of(None, **options)
        for i, count in enumerate([1, 1, 30, *[1] * 20, 3, 40, *[1] * 30, 100, *[1] * 3]):
            out, other = (step(one, count, i, dtype) for one in (cache, plain))
            assert mx.array_equal(out, other)
            if i % 7 == 0:
                require_slots_in_file(cache)
        require_slots_in_file(cache)
        assert cache.spill.available == cache.offset
        file = cache.spill.conversation.file
        assert file.flush()
        assert file.written == cache.offset // POSITIONS * POSITIONS
        require_slots_in_file(cache)


def test_a_model_s_layers_share_one_file(tmp_path):
    model, tokenizer = load("builtin:recall-4m")
    tokens = mx.random.randint(0, 200, (1, 150), key=mx.random.key(1))
    outs = []
    for spill in (tmp_path, None):
        cache = make_prompt_cache(model, 64, budgets="uniform", spill=spill)
        outs.append([model(tokens[:, :70], cache=cache)])
        for i in range(70, 150):
            outs[-1].append(model(tokens[:, i : i + 1], cache=cache))
        mx.eval(outs[-1])
        if spill is not None:
            for entry in cache:
                require_slots_in_file(entry)
            file = cache[0].spill.conversation.file
            assert {entry.spill.conversation.file for entry in cache} == {file}
            assert file.complete == 150 // TOGETHER * TOGETHER
    assert all(mx.array_equal(a, b) for a, b in zip(*outs, strict=True))
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_layers_to_which_rows_come_back(tmp_path):
    """With its profile, rows come back to the last layer of recall-4m only."""
    model, _ = load("builtin:recall-4m")
    settings = {"max_bytes": "25%", "context": 400, "bits": 6}
    cache = make_prompt_cache(model, **settings, spill=tmp_path)
    plain = make_prompt_cache(model, **settings)
    tokens = mx.random.randint(0, 200, (1, 150), key=mx.random.key(1))
    for one in (cache, plain):
        model(tokens[:, :140], cache=one)
        for i in range(140, 150):
            mx.eval(model(tokens[:, i : i + 1], cache=one))
    *others, last = cache
    assert all(entry.spill is None for entry in others)
    assert last.back is not None
    file = last.spill.conversation.file
    assert len(file.forms) == 1
    assert file.complete == 150 // TOGETHER * TOGETHER
    require_slots_in_file(last)
    # The file's own bytes are taken off the slots; the other three layers pay none.
    fewer = sum(sum(e.budgets) for e in plain) - sum(sum(e.budgets) for e in cache)
    assert 0 < fewer < 3 * 2 * (WAITING + TOGETHER)


def test_tokens_taken_back_leave_the_file(tmp_path):
    cache = cache_of(tmp_path, undo=20)
    rng = np.random.default_rng(0)
    for seed in range(60):
        step(cache, int(rng.choice([1, 1, 1, 4, 30])), seed)
        cache.trim(int(rng.integers(0, min(cache.trimmable, 20) + 1)))
        assert cache.spill.available == cache.offset
        require_slots_in_file(cache)
    assert cache.spill.follows


def test_one_of_two_copies_goes_on_in_the_file(tmp_path):
    cache = cache_of(tmp_path)
    for i in range(40):
        step(cache, 1, i)
    other = copy.deepcopy(cache)
    for i in range(40, 60):
        step(other, 1, i)
    for i in range(60, 90):
        step(cache, 1, i)
    assert other.spill.follows
    assert not cache.spill.follows
    assert "copy" in cache.spill.failure
    require_slots_in_file(other)
    assert cache.spill.available == 40
    for one in (cache, other):  # both began with these rows
        assert np.array_equal(
            bits_of(one.spill.rows(1, [0, 31])["keys"]),
            bits_of(mx.stack([rows_of(1, i)[1][0, 1, 0] for i in (0, 31)])),
        )


def test_who_takes_back_what_another_reads_goes_on_without(tmp_path):
    cache = cache_of(tmp_path, max_size=200)
    for i in range(60):
        step(cache, 1, i)
    other = copy.deepcopy(cache)
    other.trim(30)
    for i in range(60, 100):
        step(other, 1, i)
        step(cache, 1, i)
    assert not other.spill.follows
    require_slots_in_file(cache)


def test_copies_of_empty_caches_have_files_of_their_own(tmp_path):
    model, _ = load("builtin:recall-4m")
    empty = make_prompt_cache(model, 64, budgets="uniform", spill=tmp_path)
    tokens = mx.random.randint(0, 200, (1, 40), key=mx.random.key(1))
    copies = [copy.deepcopy(empty) for _ in range(3)]
    for cache in copies:
        mx.eval(model(tokens, cache=cache))
    assert len({cache[0].spill.conversation.file for cache in copies}) == 3
    for cache in copies:
        for entry in cache:
            require_slots_in_file(entry)


def test_a_batch_s_sequences_go_on_in_their_own_files(tmp_path):
    caches = [cache_of(tmp_path), cache_of(tmp_path), cache_of(None)]
    step(caches[0], 20, 0)
    batch = BatchH2OKVCache.merge(caches)
    for i in range(50):
        q, k, v = (mx.concatenate(each) for each in zip(*[rows_of(1, 100 + i)] * 3, strict=True))
        k, v = batch.update_and_fetch(k, v)
        mx.eval(batch.attend(q, k, v, scale=SCALE))
    ended = [batch.extract(i) for i in range(2)]
    for taken in ended:
        require_slots_in_file(taken)
        assert taken.spill.available == taken.offset
    assert len({taken.spill.conversation.file for taken in ended}) == 2


def test_several_sequences_at_once_have_no_file(tmp_path):
    cache = cache_of(tmp_path)
    q, k, v = (mx.concatenate([rows, rows]) for rows in rows_of(3, 0))
    k, v = cache.update_and_fetch(k, v)
    with pytest.warns(SpillStopped, match="several sequences"):
        cache.attend(q, k, v, scale=SCALE, mask="causal")
    assert "several" in cache.spill.failure


def test_rows_that_a_second_reading_drops_are_in_the_file(tmp_path):
    cache = cache_of(tmp_path, bits=6, frame=True)
    cache.resize([100] * HEADS)
    q, k, v = rows_of(100, 0)
    cache.attend(q, *cache.update_and_fetch(k, v), scale=SCALE, mask="causal")
    cache.keep_best([mx.random.normal((1, 100)) for _ in range(HEADS)], [30] * HEADS)
    require_slots_in_file(cache)
    for i in range(30):
        step(cache, 1, i)
    require_slots_in_file(cache)


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path):
    (tmp_path / "file").write_text("")
    cache = cache_of(tmp_path / "file" / "under")
    with pytest.warns(SpillStopped, match="no file can be made") as told:
        [step(cache, 1, i) for i in range(40)]
    assert len(told) == 1
    assert "no file can be made" in cache.spill.failure
    assert cache.spill.available == 0


def test_saved_and_pickled_caches_leave_the_file_behind(tmp_path):
    cache = cache_of(tmp_path / "rows")
    for i in range(40):
        step(cache, 1, i)
    save_prompt_cache(tmp_path / "cache", [cache])
    assert pickle.loads(pickle.dumps(cache)).spill is None
    require_slots_in_file(cache)


@pytest.mark.parametrize("spill", [3, "", True, b"auto", ["a"]])
def test_other_settings_are_refused(spill):
    with pytest.raises(ValueError, match="spill must be"):
        H2OKVCache(16, spill=spill)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "family", ["gemma3_text", "gemma2_by_itself", "phi3small", "deepseek_v3", "qwen3_next"]
)
def test_caches_of_every_kind_have_their_rows_in_the_file(tmp_path, family):
    """Of models that attend by themselves, or to derived keys, or have other caches, too."""
    model = tiny_model(family)
    tokens = mx.random.randint(0, 128, (1, 90), key=mx.random.key(1))
    outs = []
    for spill in (tmp_path, None):
        cache = make_prompt_cache(model, 32, budgets="uniform", spill=spill)
        outs.append([model(tokens[:, :30], cache=cache)])
        outs[-1] += [model(tokens[:, i : i + 1], cache=cache) for i in range(30, 90)]
        mx.eval(outs[-1])
        bounded = [entry for _, entry in entries(cache) if isinstance(entry, BoundedKVCache)]
        for entry in bounded if spill else ():
            assert not entry.spill.failure
            assert entry.spill.available == entry.offset
            require_slots_in_file(entry)
    assert bounded
    assert all(mx.array_equal(a, b) for a, b in zip(*outs, strict=True))


def test_rows_that_wait_for_the_file_are_counted_and_few(tmp_path, monkeypatch):
    dtype, dense = mx.float16, 2 * 2 * WIDTH
    cache = cache_of(tmp_path, bits=6)
    step(cache, 40, 0, dtype)
    rows, open_again = cache.spill.conversation, threading.Event()
    stored = rows.file.forms[0].row_bytes
    most = 0
    for i in range(40):
        step(cache, 1, i + 1, dtype)
        assert wait_for(lambda: rows.file.written >= rows.file.handed)
        if i >= 2 * POSITIONS:  # the first chunk's rows are in the file
            most = max(most, cache.spill.nbytes)
        held = cache.offset % TOGETHER
        waits = cache.offset - held - rows.file.written
        assert cache.spill.nbytes == HEADS * (held * dense + waits * stored)
        assert cache.nbytes >= cache.spill.nbytes
    assert most <= HEADS * ((TOGETHER - 1) * dense + WAITING * stored)
    # A disk that is slow: what was given to the writer stays in memory, and is counted.
    write = row_file._write
    monkeypatch.setattr(row_file, "_write", lambda *args: (open_again.wait(), write(*args)))
    before = rows.file.written
    for i in range(before + WAITING - cache.offset):
        step(cache, 1, i + 100, dtype)
    assert rows.file.written == before
    assert cache.spill.nbytes == HEADS * WAITING * stored
    open_again.set()
    assert wait_for(lambda: rows.file.written >= rows.file.handed > before)


@pytest.mark.few(6)
@pytest.mark.parametrize("store", ["dense", "4 bits", "newest wider"])
@pytest.mark.parametrize("chunk", [1, 7, 12, 13, 64, 512])
def test_after_no_chunk_more_rows_wait_than_are_planned_for(tmp_path, monkeypatch, chunk, store):
    """However slow the disk is, and in the first chunk too, with which the file is made."""
    write, model = row_file._write, tiny_model("llama", head_dim=64)
    monkeypatch.setattr(row_file, "_write", lambda *args: (time.sleep(0.002), write(*args)))
    options = {name: n for name, n in STORES[store].items() if name != "frame"}
    cache = make_prompt_cache(model, 48, budgets="uniform", spill=tmp_path, **options)
    for first in range(0, max(3 * chunk, 80), chunk):
        model(mx.arange(first, first + chunk)[None] % 128, cache=cache)
        for entry in cache:
            form = entry.spill.conversation.file.forms[entry.spill.index]
            widths = RowWidths(WIDTH, WIDTH, 4, 4, entry.packing, waiting=WAITING)
            assert widths.row_bytes == form.row_bytes
            before = Spill(tmp_path).head_bytes(widths, 0)
            assert entry.spill.nbytes <= form.heads * (before + WAITING * widths.row_bytes)
            assert not entry.spill.failure


def test_a_chunk_s_rows_do_not_stay_in_memory(tmp_path):
    """No more than without a file."""

    def after_a_chunk(cache):
        mx.eval(step(cache, 48, 0))
        before = mx.get_active_memory()
        mx.eval(step(cache, 4003, 1))
        return before

    plain, cache = cache_of(None), cache_of(tmp_path)
    before = after_a_chunk(plain)
    without = mx.get_active_memory() - before
    before, of_chunk = after_a_chunk(cache), 4003 * HEADS * 2 * 4 * WIDTH
    assert wait_for(lambda: mx.get_active_memory() - before - without < of_chunk / 20)


def test_a_layer_that_gets_no_rows_ends_the_file(tmp_path):
    """The others' rows would wait for it in memory for good."""
    model, _ = load("builtin:recall-4m")
    first, second, *_ = make_prompt_cache(model, 48, budgets="uniform", spill=tmp_path)
    for one in (first, second):
        step(one, 20, 0)
    with pytest.warns(SpillStopped, match="no rows in the first step"):
        step(first, 1, 1)
    assert first.spill.nbytes == 0
    step(second, 1, 1)
    assert second.spill.nbytes == 0


def test_a_layer_that_gets_no_more_rows_ends_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(row_file, "MOST_APART", 64)
    model, _ = load("builtin:recall-4m")
    first, *others = make_prompt_cache(model, 48, budgets="uniform", spill=tmp_path)
    for one in (first, *others):
        step(one, 20, 0)
    with pytest.warns(SpillStopped, match="no more rows"):
        [step(first, 1, i) for i in range(120)]
    assert all(one.spill.nbytes == 0 for one in (first, *others))
