"""Conversations that go on from their file of rows."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from decode_until_killed import begun, go_on, prompt

from mlx_h2o import Spill, load, make_prompt_cache, resume
from mlx_h2o.caches.conversation import pin
from mlx_h2o.caches.resume import resume_apart, told_by
from mlx_h2o.spill import state_keeping
from mlx_h2o.spill.layout import POSITIONS, DamagedFile
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.sealing import Seal
from mlx_h2o.spill.state_record import StateRecord, paths_of, read_record
from tiny_models import tiny_model

KEY = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Records of the state every four blocks."""
    monkeypatch.setattr(state_keeping, "EVERY", 64)


@pytest.fixture(scope="module")
def model():
    return load("builtin:recall-4m")[0]


def steps(model, cache, count, first=0):
    outs = []
    for i in range(first, first + count):
        token = mx.random.randint(0, 200, (1, 1), key=mx.random.key(i))
        outs.append(model(token, cache=cache))
        mx.async_eval(outs[-1])
    return outs


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"bits": 6}, {"bits": 4, "recent_bits": 8}, {"policy": "h2o", "remainder": False},
        {"undo": 4}, {"pins": [(3, 6)]}, {"spill_key": KEY},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("prompt", [70, 90])  # of the latter rows come back where it goes on
def test_a_conversation_goes_on_as_if_nothing_had_happened(tmp_path, model, settings, prompt):
    settings = dict(settings)
    key = settings.pop("spill_key", None)
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True, key=key), **settings)
    model(mx.random.randint(0, 200, (1, prompt), key=mx.random.key(9)), cache=cache)
    steps(model, cache, 100)
    path = cache[0].spill.conversation.file.path
    cache[0].spill.conversation.close()
    assert all(of_record.exists() for of_record in paths_of(path))
    del cache
    again = resume(path, key=key)
    known = again[0].offset
    assert known == (136 if prompt == 70 else 160)  # the second record: 64 after the first
    outs = steps(model, again, 40, known - prompt)
    plain = make_prompt_cache(model, 40, spill=Spill(tmp_path / "other"), **settings)
    model(mx.random.randint(0, 200, (1, prompt), key=mx.random.key(9)), cache=plain)
    expected = steps(model, plain, known - prompt + 40)[-40:]
    assert all(mx.array_equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert again[0].spill.available == known + 40
    assert not again[0].spill.failure


def test_a_damaged_record_leaves_the_one_before(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 130)
    path = cache[0].spill.conversation.file.path
    cache[0].spill.conversation.close()
    del cache
    offsets = []
    rng = random.Random(0)
    for _ in paths_of(path):
        again = resume(path)
        offsets.append(again[0].offset)
        again[0].spill.conversation.close()
        of_record = paths_of(path)[1 if offsets[-1] == 72 else 0]
        changed = bytearray(of_record.read_bytes())
        changed[rng.randrange(len(changed))] ^= 4
        of_record.write_bytes(changed)
    assert offsets == [72, 8]
    with pytest.raises(ValueError, match="no record"):
        resume(path)


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_no_damage_of_a_record_is_taken_for_one(tmp_path, key):
    """Cut off, longer, with other bits, and with numbers in its head that no record has."""
    arrays = [{"a": ("float32", np.arange(6, dtype=np.float32))}] * 2
    seal, checksum, path = key and Seal(key, bytes(32)), 77, tmp_path / "record"
    good = StateRecord(16, 5, [{"n": 1}, {}], arrays, {"t": [1]}).as_bytes(checksum, seal)
    path.write_bytes(good)
    assert read_record(path, checksum, seal).position == 16
    draw = random.Random(3)
    for _ in range(300):
        worse = bytearray(good)
        how = draw.randrange(4)
        if how == 0:
            del worse[draw.randrange(len(good)) :]
        elif how == 1:
            worse += bytes(draw.randrange(1, 99))
        elif how == 2:
            at = draw.randrange(len(good))
            worse[at] ^= 1 << draw.randrange(8)
        else:  # a number of the head: version, JSON's bytes, all, checksum
            at, size = draw.choice([(8, 4), (12, 4), (16, 8), (24, 4)])
            number = draw.choice([0, 1, 2**26 + 1, 2**31, 2**32 - 1, 2**33 + 1, 2**63, 2**64 - 1])
            worse[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
        path.write_bytes(worse)
        # Without a seal its bits are in no checksum: nothing is read from them.
        if worse != good and not (how == 2 and 28 <= at < 52 and seal is None):
            with pytest.raises(DamagedFile):
                read_record(path, checksum, seal)
    # As long as its head says, and empty: a hole that would take all memory.
    path.write_bytes(good[:16] + (2**40).to_bytes(8, "little") + good[24:])
    os.truncate(path, 2**40 + len(good[:52]))
    with pytest.raises(DamagedFile, match="number"):
        read_record(path, checksum, seal)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position", -1), ("position", 2**31 + 1), ("position", True), ("block", 2**32),
        ("block", -1), ("block", 0.5), ("configs", [{}] * 4097),
        ("arrays", [[0] * 4] * (2**18 + 1)),
        *(
            ("arrays", [[0, "a", "float32", shape]])
            for shape in ([2**31], [2**30, 2**30], [0, 2**31 - 1, 2**31 - 1], [1] * 9, [-1], ["1"])
        ),
        ("arrays", [[2, "a", "float32", [1]]]), ("arrays", [[-1, "a", "float32", [1]]]),
        ("arrays", [[0, "a", "float64", [1]]]), ("told", 3),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_numbers_of_a_record_have_greatest_values(tmp_path, monkeypatch, name, value):
    record, path = StateRecord(16, 5, [{}], [{}]), tmp_path / "record"
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda told: dumps(told | {name: value}))
    path.write_bytes(record.as_bytes(9, None))
    with pytest.raises(DamagedFile):
        read_record(path, 9, None)


def test_until_rows_come_a_file_that_is_resumed_stays_as_it_is(tmp_path, model):
    """So that an attempt with another model loses nothing: the rows after the record are there."""
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    outs = steps(model, cache, 200)
    path = cache[0].spill.conversation.file.path
    recorded(cache)
    steps(model, cache, 21, 200)
    cache[0].spill.conversation.close()
    del cache
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    other = tiny_model("llama")
    for position in (None, 136):
        again = resume(path, position=position)
        assert again[0].offset == (position or 200)
        with pytest.raises(ValueError, match=r"shape|heads|width"):
            other(mx.array([[1]]), cache=again[:2])
        again[0].spill.conversation.close()
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    again = resume(path, position=136)
    same = steps(model, again, 64, 136)
    assert all(mx.array_equal(a, b) for a, b in zip(outs[136:], same, strict=True))
    assert again[0].spill.conversation.file.flush()
    assert again[0].spill.written == 200
    again[0].spill.conversation.close()
    with RowFile.open(path) as file:
        assert file.written == 200  # what was beyond is gone


def test_a_record_of_other_tokens_does_not_count(tmp_path, model):
    """Tokens were taken back after it, and others came in their place."""
    cache = make_prompt_cache(model, 400, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 130)
    records = {path.name: path.read_bytes() for path in tmp_path.glob("*.state-*")}
    assert len(records) == 2
    for entry in cache:
        entry.trim(80)
    steps(model, cache, 80, first=1000)
    path = cache[0].spill.conversation.file.path
    cache[0].spill.conversation.close()
    del cache
    for name, content in records.items():
        (tmp_path / name).write_bytes(content)
    assert resume(path)[0].offset == 8


def test_lies_in_a_record_are_refused(tmp_path, model):
    """Records with right checksums and wrong numbers."""
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 60)
    path = cache[0].spill.conversation.file.path
    cache[0].spill.conversation.close()
    del cache
    with RowFile.open(path) as file:
        checksum = file.layout.checksum
    of_record = paths_of(path)[0]
    good = read_record(of_record, checksum, None)
    rng = random.Random(1)
    numbers = [-1, 0, 1, 7, 2**31, 2**63, 10**30, None, "x", [], 1.5, True]
    refused = 0
    for _ in range(100):
        configs = [dict(config) for config in good.configs]
        config = rng.choice(configs)
        name = rng.choice(list(config))
        if name == "runs" and rng.random() < 0.9:
            config["runs"] = [dict(run) for run in config["runs"]]
            run = rng.choice(config["runs"])
            run[rng.choice(list(run))] = rng.choice(numbers)
        else:
            config[name] = rng.choice(numbers)
        of_record.write_bytes(replace(good, configs=configs).as_bytes(checksum, None))
        try:
            resume(path)[0].spill.conversation.close()
        except ValueError:
            refused += 1
    assert refused > 40


def test_files_that_are_not_kept_leave_nothing(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 60)
    path = cache[0].spill.conversation.file.path
    cache[0].spill.conversation.close()
    del cache
    again = resume(path, keep=False)
    steps(model, again, 100, 60)
    assert len(list(tmp_path.iterdir())) > 1
    del again
    assert not list(tmp_path.iterdir())


class Owner:
    """Knows the tokens up to a position."""

    def __init__(self, known):
        self.known = known

    def until(self, position):
        return {"before": position} if position <= self.known else None


def test_a_record_holds_what_its_owner_tells(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True, key=KEY))
    cache[0].spill.transcript = Owner(100)
    steps(model, cache, 60)
    going_on = copy.deepcopy(cache)
    steps(model, going_on, 80, 60)
    file = cache[0].spill.conversation.file
    with pytest.raises(BlockingIOError):
        told_by(file.path, KEY)
    cache[0].spill.conversation.close()
    assert told_by(file.path, KEY) == [(72, {"before": 72}), (8, {"before": 8})]
    rows = file.path.read_bytes()
    apart = resume_apart(file.path, 8, KEY)
    assert apart[0].offset == 8
    steps(model, apart, 20, 8)
    assert file.path.read_bytes() == rows
    with pytest.raises(ValueError, match=r"no record .* at position 32"):
        resume(file.path, KEY, position=32)
    assert resume(file.path, KEY, position=8)[0].offset == 8


def test_a_changed_state_has_no_record_until_the_next(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 130)
    file = cache[0].spill.conversation.file
    pin(cache, [(128, 130)])
    cache[0].spill.conversation.state_changed()
    assert file.flush()
    assert not any(of_record.exists() for of_record in paths_of(file.path))
    steps(model, cache, 60, 130)
    cache[0].spill.conversation.close()
    again = resume(file.path)
    assert again[0].offset == 136
    assert again[0].pins == cache[0].pins != ()


def test_a_batch_records_the_state_of_each_of_its_conversations(tmp_path, model):
    members = []
    for seed in (1, 2):
        cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
        model(mx.random.randint(0, 200, (1, 30 * seed), key=mx.random.key(seed)), cache=cache)
        members.append(cache)
    batch = [type(layers[0]).merge(layers) for layers in zip(*members, strict=True)]
    for i in range(80):
        token = mx.random.randint(0, 200, (2, 1), key=mx.random.key(i))
        mx.eval(model(token, cache=batch))
    files = [cache[0].spill.conversation.file.path for cache in members]
    for cache in members:
        cache[0].spill.conversation.close()
    assert [resume(path)[0].offset for path in files] == [96, 128]


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_conversation_goes_on(tmp_path, model, kills):
    """Whatever was said before a kill is what a conversation that was never killed says."""
    script = Path(__file__).with_name("decode_until_killed.py")
    said: dict[int, int] = {}
    rng = random.Random(0)
    for _ in range(kills):
        files = [str(path) for path in tmp_path.glob("*.rows")]
        lines = "".join(f"{position} {token}\n" for position, token in said.items())
        (tmp_path / "said").write_text(lines)
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), *files],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        first = process.stdout.readline()
        assert first.startswith("from"), first
        early = "".join(process.stdout.readline() for _ in range(80))  # past the first record
        time.sleep(rng.random() * 0.5)
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0]
        assert int(first.split()[1]) % POSITIONS == (0 if files else 39 % POSITIONS)
        began = int(first.split()[1])
        assert began >= max(said, default=0) - 200  # the thread may be some blocks behind
        for line in (early + rest).split("\n")[:-1]:
            position, token = map(int, line.split())
            assert said.setdefault(position, token) == token
    cache = begun(model, Spill(tmp_path / "other"))  # rows come back there, too
    plain = go_on(model, cache, prompt()[0, -1].item())
    expected = dict(next(plain) for _ in range(max(said) - 39))
    assert all(expected[position] == token for position, token in said.items())


def test_the_record_that_a_conversation_went_on_from_is_not_overwritten_first(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 60)
    path = cache[0].spill.conversation.file.path
    cache[0].spill.conversation.close()
    first = paths_of(path)[0].read_bytes()
    del cache
    again = resume(path)
    steps(model, again, 120, 8)
    again[0].spill.conversation.close()
    assert paths_of(path)[0].read_bytes() == first
    assert resume(path)[0].offset == 72


def recorded(cache):
    """Record the state where it is; the file of rows."""
    conversation = cache[0].spill.conversation
    assert conversation.record([entry.spill for entry in cache])
    return conversation.file.path


@pytest.mark.parametrize("count", [7, 77, 96])
@pytest.mark.parametrize(
    "settings", [{}, {"bits": 4, "recent_bits": 8}, {"bits": 6, "spill_key": KEY}], ids=str
)
def test_a_conversation_that_ends_goes_on_with_its_very_last_token(
    tmp_path, model, settings, count
):
    settings = dict(settings)
    key = settings.pop("spill_key", None)
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True, key=key), **settings)
    steps(model, cache, count)
    path = recorded(cache)
    cache[0].spill.conversation.close()
    del cache
    assert resume_apart(path, count, key)[0].offset == count
    again = resume(path, key=key)
    outs = steps(model, again, 60, count)
    plain = make_prompt_cache(model, 40, spill=Spill(tmp_path / "other"), **settings)
    expected = steps(model, plain, count + 60)[-60:]
    assert all(mx.array_equal(a, b) for a, b in zip(outs, expected, strict=True))
    assert recorded(again) == path  # the file goes on, too
    again[0].spill.conversation.close()
    assert resume(path, key=key)[0].offset == count + 60


def test_tokens_taken_back_take_their_record_along(tmp_path, model):
    cache = make_prompt_cache(model, 400, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 70)
    path = recorded(cache)
    for entry in cache:
        entry.trim(3)  # within the block, of which no checksum tells
    steps(model, cache, 3, first=1000)
    cache[0].spill.conversation.close()
    assert resume(path)[0].offset == POSITIONS


def test_who_goes_on_from_an_earlier_record_gives_the_later_one_up(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 55)
    path = recorded(cache)
    cache[0].spill.conversation.close()
    again = resume(path, position=POSITIONS)
    steps(model, again, 4, first=1000)
    again[0].spill.conversation.close()
    assert resume(path)[0].offset == POSITIONS


def test_a_record_needs_all_caches_of_the_conversation(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 20)
    conversation, ways = cache[0].spill.conversation, [entry.spill for entry in cache]
    assert not conversation.record(ways[:2])
    other = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, other, 20)
    assert not conversation.record([*ways[:3], other[3].spill])
    gone = make_prompt_cache(model, 40, spill=Spill(tmp_path), budgets="uniform")
    steps(model, gone, 20)
    assert not gone[0].spill.conversation.record([entry.spill for entry in gone])


def test_a_record_without_its_rows_is_damaged(tmp_path, model):
    cache = make_prompt_cache(model, 40, spill=Spill(tmp_path, keep=True))
    steps(model, cache, 21)
    path = recorded(cache)
    cache[0].spill.conversation.close()
    with RowFile.open(path) as file:
        checksum = file.layout.checksum
    (good,) = [
        (one, at)
        for at in paths_of(path)
        if at.exists() and (one := read_record(at, checksum, None)).position == 21
    ]
    for change in ("missing", "short"):
        arrays = [dict(own) for own in good[0].arrays]
        dtype, rows = arrays[1].pop("tail.keys")
        if change == "short":
            arrays[1]["tail.keys"] = dtype, rows[:, :, :-1]
        good[1].write_bytes(replace(good[0], arrays=arrays).as_bytes(checksum, None))
        with pytest.raises(ValueError, match="record"):
            resume(path)
