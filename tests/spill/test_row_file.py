"""Files of rows: every row comes back as it was given, whatever happened in between."""

import fcntl
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mlx_h2o.spill import block_writer, row_file
from mlx_h2o.spill.layout import POSITIONS, DamagedFile, read_layout
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import WAITING
from rows_for_files import FORMS, append, bits_of, fields, in_mlx, require, wait_for

KEY = b"0123456789abcdef"


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@pytest.mark.parametrize("convert", [lambda n: n, in_mlx], ids=["numpy", "mlx"])
@pytest.mark.parametrize(
    "counts", [[1] * 70, [40, 1, 1, 64, 3, 1], [100]], ids=["tokens", "mixed", "chunk"]
)
def test_rows_come_back_before_and_after_they_are_written(tmp_path, counts, convert, key):
    with RowFile.create(tmp_path / "a.rows", FORMS, key=key, keep=True) as file:
        first = 0
        for count in counts:
            append(file, first, count, convert)
            first += count
            require(file, [0, first - 1, first // 2])
        require(file, np.random.default_rng(0).permutation(first))
        assert file.complete == first
        assert file.flush()
        assert file.written == first
        require(file, range(first))
    with RowFile.open(tmp_path / "a.rows", key=key) as file:
        assert file.written == first
        require(file, range(first))
        append(file, first, 20)
        assert file.flush()
        require(file, range(first + 20))
    with RowFile.open(tmp_path / "a.rows", key=key, writable=False) as file:
        require(file, range(first + 20))
        file.prefetch(1, 2, np.arange(first))


def test_blocks_are_written_while_rows_come(tmp_path):
    with RowFile.create(tmp_path / "a.rows", FORMS) as file:
        for position in range(64):
            append(file, position, 1, in_mlx)
            file.schedule()
        assert wait_for(lambda: file.written == 64 - POSITIONS)
        assert not file.failure
        assert file.nbytes == POSITIONS * sum(form.heads * form.row_bytes for form in FORMS)
        require(file, range(64))


def test_only_the_owner_may_read_it(tmp_path):
    with RowFile.create(tmp_path / "new" / "a.rows", FORMS) as file:
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_it_goes_with_its_conversation_unless_it_is_kept(tmp_path):
    RowFile.create(tmp_path / "a.rows", FORMS).close()
    RowFile.create(tmp_path / "b.rows", FORMS, keep=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["b.rows"]


# -- crashes and damage ---------------------------------------------------------------------------


def killed_while_appending(path, most_seconds):
    """Append in another process, which is killed; how many rows it said were safe."""
    script = Path(__file__).with_name("append_until_killed.py")
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
    process = subprocess.Popen(
        [sys.executable, str(script), str(path)], stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        first = process.stdout.readline()
        assert first
        time.sleep(random.random() * most_seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0]
    said = [line for line in (first + rest).split("\n")[:-1] if line]
    return int(said[-1])


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_all_blocks_that_were_written(tmp_path, kills):
    path = tmp_path / "a.rows"
    RowFile.create(path, FORMS, keep=True).close()
    written = 0
    for _ in range(kills):
        safe = killed_while_appending(path, 0.2)
        with RowFile.open(path) as file:
            assert file.written >= max(safe, written)
            written = file.written
            assert written % POSITIONS == 0
            require(file, range(written))
    assert written > 16 * kills


def file_of(path, count, **options):
    """A closed file of so many rows."""
    with RowFile.create(path, FORMS, keep=True, **options) as file:
        append(file, 0, count)
    return file.layout


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_a_torn_block_is_dropped(tmp_path, key):
    path = tmp_path / "a.rows"
    layout = file_of(path, 4 * POSITIONS, key=key)
    whole = path.read_bytes()
    assert len(whole) == layout.block_start(4)
    rng = random.Random(0)
    for _ in range(40):
        end = rng.randrange(layout.block_start(2), layout.block_start(3))
        torn = whole[:end] + bytes(rng.choice([0, layout.block_start(3) - end]))
        path.write_bytes(torn)
        with RowFile.open(path, key=key) as file:
            # The bytes of a block's end are unused.
            unused = layout.block_start(3) - end <= layout.block_bytes - (
                layout.record_start + layout.record_bytes
            )
            whole_again = unused and len(torn) == layout.block_start(3)
            assert file.written == (3 if whole_again else 2) * POSITIONS
            assert path.stat().st_size == layout.block_start(file.written // POSITIONS)
            require(file, range(file.written))


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_a_flipped_byte_is_found_when_it_is_read(tmp_path, key):
    path = tmp_path / "a.rows"
    layout = file_of(path, 4 * POSITIONS, key=key)
    whole = path.read_bytes()
    rng = random.Random(1)
    for _ in range(60):
        block = rng.randrange(4)
        at = layout.block_start(block) + rng.randrange(layout.record_start + layout.record_bytes)
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with RowFile.open(path, key=key, writable=False) as file:
            if block == 3:
                assert file.written == 3 * POSITIONS
                require(file, range(3 * POSITIONS))
                continue
            bad = 0
            for layer, form in enumerate(FORMS):
                for head in range(form.heads):
                    positions = np.arange(POSITIONS * block, POSITIONS * (block + 1))
                    try:
                        rows = file.rows(layer, head, positions)
                    except DamagedFile:
                        bad += 1
                        continue
                    bits = np.ascontiguousarray(rows["keys"]).view(np.uint8)
                    assert np.array_equal(bits, bits_of(layer, 0, head, positions).view(np.uint8))
            assert bad in (1, 5)  # one head's part of the block, or its record
            require(file, [p for p in range(4 * POSITIONS) if p // POSITIONS != block])


def test_a_block_in_another_s_place_is_found(tmp_path):
    first, second = tmp_path / "a.rows", tmp_path / "b.rows"
    layout = file_of(first, 64)
    file_of(second, 64)
    blocks = [
        path.read_bytes()[layout.block_start(2) : layout.block_start(3)] for path in (first, second)
    ]
    for own in (True, False):
        whole = bytearray(first.read_bytes())
        at = layout.block_start(1 if own else 2)
        whole[at : at + layout.block_bytes] = blocks[0 if own else 1]
        path = tmp_path / "c.rows"
        path.write_bytes(whole)
        with RowFile.open(path, writable=False) as file, pytest.raises(DamagedFile):
            file.rows(0, 0, [(1 if own else 2) * POSITIONS + 1])


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_damaged_headers_are_refused(tmp_path, key):
    """Each is opened as it was, or refused with a ValueError, at once."""
    path = tmp_path / "a.rows"
    layout = file_of(path, 40, key=key)
    whole = path.read_bytes()
    rng = random.Random(2)
    used = len(layout.header.rstrip(b"\0"))
    refused = 0
    for _ in range(300):
        changed = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randrange(1, 4)):
            if changed:
                changed[rng.randrange(min(used, len(changed)))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            RowFile.open(path, key=key).close()
        except ValueError:
            refused += 1
    assert refused > 250


HUGE = 10**30


@pytest.mark.parametrize(
    "changed",
    [
        {"positions": HUGE}, {"positions": 0}, {"positions": -16}, {"positions": 16.0},
        {"positions": True}, {"layers": []}, {"layers": [[HUGE, [["k", "float16", 4]]]]},
        {"layers": [[2, [["k", "float16", HUGE]]]]}, {"layers": [[2, [["k", "float64", 4]]]]},
        {"layers": [[2, [["k", "float16", 4], ["k", "float16", 4]]]]},
        {"layers": [[65536, [["k", "float32", 2**20]]]]}, {"layers": [[1, []]]},
        {"layers": [[1, [["k" * 65, "float16", 4]]]]}, {"layers": [[1, [[["k"], "float16", 4]]]]},
        {"layers": {"a": 1}}, {"layers": [3]}, {"layers": [[1, [["k", [], 4]]]]},
        {"layers": [[1, [["k", "float16", 4]]]] * 4097}, {"sealed": 1}, {"notes": 3},
        {"notes": "[" * 10**5}, {"notes": "[]"}, {"sealed": True},
    ],
    ids=lambda changed: str(changed)[:40],
)  # fmt: skip
def test_numbers_of_a_header_have_greatest_values(tmp_path, changed):
    """A header with a right checksum may still lie."""
    import json
    import struct
    import zlib

    layout = file_of(tmp_path / "a.rows", 40)
    start = (tmp_path / "a.rows").read_bytes()
    length = struct.unpack_from("<8sIII", start)[2]
    header = {**json.loads(start[20 : 20 + length]), **changed}
    text = json.dumps(header).encode()
    whole = struct.pack("<8sIII", b"MLXH2ORW", 1, len(text), zlib.crc32(text, 1)) + text
    (tmp_path / "b.rows").write_bytes(whole.ljust(2**19, b"\0") + start[len(layout.header) :])
    with pytest.raises(ValueError, match=r"damaged|sealed"):
        RowFile.open(tmp_path / "b.rows")


def test_what_is_no_file_of_rows_is_refused(tmp_path):
    for content in (b"", b"MLXH2ORW", b"GGUF" * 100, bytes(10**6)):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(ValueError, match="no file of rows"):
            RowFile.open(tmp_path / "a")
    with pytest.raises(ValueError, match="version 2"):
        read_layout(b"MLXH2ORW" + (2).to_bytes(4, "little") + bytes(100))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for name in ("link", "missing"):
        with pytest.raises(OSError, match=name):
            RowFile.open(tmp_path / name)
    for writable in (True, False):
        with pytest.raises(ValueError, match="no file"):
            RowFile.open(tmp_path / "pipe", writable=writable)


# -- who may have it ------------------------------------------------------------------------------


def test_one_writes_or_many_read(tmp_path):
    path = tmp_path / "a.rows"
    file_of(path, 32)
    with RowFile.open(path):
        for writable in (True, False):
            with pytest.raises(BlockingIOError, match="open already"):
                RowFile.open(path, writable=writable)
        code = f"from mlx_h2o.spill.row_file import RowFile; RowFile.open({str(path)!r})"
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "BlockingIOError" in other.stderr
    with RowFile.open(path, writable=False) as one, RowFile.open(path, writable=False) as two:
        require(one, range(32))
        require(two, range(32))
        append(one, 32, 16)
        assert one.complete == 32
        with pytest.raises(BlockingIOError):
            RowFile.open(path)


def test_sealed_rows_need_their_key(tmp_path):
    path = tmp_path / "a.rows"
    file_of(path, 64, key=KEY)
    plain = tmp_path / "b.rows"
    file_of(plain, 64)
    row = bits_of(0, 0, 0, range(3, 4)).tobytes()
    assert row in plain.read_bytes()
    assert row not in path.read_bytes()
    with pytest.raises(ValueError, match="another key"):
        RowFile.open(path, key=b"another key, as long")
    with pytest.raises(ValueError, match="give its key"):
        RowFile.open(path)
    with pytest.raises(ValueError, match="not sealed"):
        RowFile.open(plain, key=KEY)
    with pytest.raises(ValueError, match="16 to 1024"):
        RowFile.create(tmp_path / "c.rows", FORMS, key=b"short")


def test_a_nonce_is_used_once(tmp_path):
    """A block that is written again is sealed anew."""
    path, nonces = tmp_path / "a.rows", set()
    with RowFile.create(path, FORMS, key=KEY, keep=True) as file:
        layout = file.layout
        for _ in range(10):
            append(file, 0, 16)
            assert file.flush()
            at = layout.block_start(0) + layout.record_start
            record = path.read_bytes()[at : at + layout.record_bytes]
            nonces.add(layout.checked_record(0, record).nonce)
            file.truncate(0)
    assert len(nonces) == 10


# -- what fails -----------------------------------------------------------------------------------


def test_a_full_disk_ends_the_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.rows"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = RowFile.create(path, FORMS, keep=True)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.layout.block_start(3) + 100, before[1]))
        for first in range(0, 160, 16):
            append(file, first, 16)
        assert wait_for(lambda: file.failure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be written" in file.failure
    assert file.written == 3 * POSITIONS
    require(file, range(3 * POSITIONS))
    append(file, 160, 16)
    assert file.nbytes == 0
    assert file.complete == 3 * POSITIONS
    assert not file.flush()
    file.close()
    with RowFile.open(path) as file:
        assert file.written == 3 * POSITIONS
        require(file, range(3 * POSITIONS))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("anything")])
def test_whatever_writing_raises_is_told(tmp_path, monkeypatch, error):
    def failing(*args):
        raise error

    with RowFile.create(tmp_path / "a.rows", FORMS) as file:
        append(file, 0, 32)
        assert file.flush()
        monkeypatch.setattr(row_file, "_write", failing)
        append(file, 32, 32)
        assert wait_for(lambda: file.failure)
        assert str(error.args[-1]) in file.failure
        require(file, range(32))


def test_a_slow_disk_ends_the_file(tmp_path, monkeypatch):
    """Rows wait for it; if one has to wait for long, nothing more is written."""
    write, seconds = row_file._write, [0.05]
    monkeypatch.setattr(row_file, "_write", lambda *args: (time.sleep(seconds[0]), write(*args)))
    monkeypatch.setattr(block_writer, "LONGEST_WAIT", 0.3)
    with RowFile.create(tmp_path / "a.rows", FORMS) as file:
        for first in range(0, 64, 16):
            append(file, first, 16)
            assert file.complete - file.written <= WAITING
        assert not file.failure
        seconds[0], start = 1.0, time.perf_counter()
        for first in range(64, 320, 16):
            append(file, first, 16)
        assert 0.2 < time.perf_counter() - start < 0.9
        assert "too slow" in file.failure
        append(file, 320, 16)
        assert file.nbytes == 0


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        RowFile.create(tmp_path / "file" / "a.rows", FORMS)
    with pytest.raises(FileExistsError):
        RowFile.create(tmp_path / "file", FORMS)
    assert (tmp_path / "file").read_text() == ""


def test_rows_that_do_not_fit_are_refused(tmp_path):
    with RowFile.create(tmp_path / "a.rows", FORMS) as file:
        good = fields(0, 0, 16)
        with pytest.raises(ValueError, match="next row"):
            file.append(0, 3, good)
        with pytest.raises(ValueError, match="keys must be"):
            file.append(0, 0, {**good, "keys": good["keys"].astype(np.float32)})
        with pytest.raises(ValueError, match="values must be"):
            file.append(0, 0, {**good, "values": good["values"][:, :1]})
        with pytest.raises(ValueError, match=r"keys\.scales"):
            file.append(0, 0, {n: r for n, r in good.items() if n != "keys.scales"})
        append(file, 0, 16)
        for layer, head, positions in ((2, 0, [0]), (0, 2, [0]), (0, 0, [16]), (0, 0, [-1])):
            with pytest.raises(ValueError, match=r"layer|Layer"):
                file.rows(layer, head, positions)
        assert file.rows(0, 0, [])["keys"].shape == (0, 6)


# -- tokens are taken back ------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_what_is_taken_back_comes_again(tmp_path, key):
    rng, path = random.Random(3), tmp_path / "a.rows"
    file, held = RowFile.create(path, FORMS, key=key, keep=True), 0
    for _ in range(150):
        event = rng.random()
        if event < 0.6:
            count = rng.choice([1, 1, 2, 16, 50])
            append(file, held, count, rng.choice([in_mlx, lambda named: named]))
            held += count
        elif event < 0.85:
            held = max(held - rng.choice([1, 3, 20, 40]), 0)
            file.truncate(held)
        elif event < 0.95:
            assert file.flush()
            assert file.written == held
        else:
            file.close()
            file = RowFile.open(path, key=key)
            assert file.written == held
        assert file.complete == held
        assert file.written <= held
        require(file, range(max(held - 70, 0), held))
    require(file, range(held))
    file.close()


def test_a_killed_file_that_is_not_kept_is_removed_by_the_next(tmp_path):
    from mlx_h2o.spill.setting import remove_ownerless

    for name, keep in (("kept", True), ("gone", False), ("held", False)):
        file = RowFile.create(tmp_path / f"{name}.rows", FORMS, keep=keep)
        if name != "held":
            os.close(file._descriptor)  # as the end of its process does
            file._closed = True
    (tmp_path / "other.rows").write_text("something else")
    remove_ownerless(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4  # all of them are new
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    remove_ownerless(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"kept", "held", "other"}
    fcntl.flock(file._descriptor, fcntl.LOCK_UN)
    file.close()
