"""Files of rows: every row comes back as it was given, whatever happened in between."""

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
from mlx_h2o.spill.layout import POSITIONS
from mlx_h2o.spill.row_file import WAITING, RowFile
from rows_for_files import FORMS, append, require, wait_for, waiting_bytes


@pytest.mark.parametrize(
    "counts", [[1] * 70, [40, 1, 1, 64, 3, 1], [100]], ids=["tokens", "mixed", "chunk"]
)
def test_rows_come_back_before_and_after_they_are_written(tmp_path, counts):
    file, first = RowFile(tmp_path, FORMS), 0
    for count in counts:
        append(file, first, count)
        first += count
        require(file, [0, first - 1, first // 2])
    require(file, np.random.default_rng(0).permutation(first))
    assert file.complete == first
    assert file.flush()
    assert file.written == first // POSITIONS * POSITIONS
    require(file, range(first))


def test_blocks_are_written_while_rows_come(tmp_path):
    file = RowFile(tmp_path, FORMS)
    for position in range(64):
        append(file, position, 1)
        file.schedule()
    assert wait_for(lambda: file.written == 64 - POSITIONS)
    assert not file.failure
    of_token = sum(form.heads * form.row_bytes for form in FORMS)
    assert waiting_bytes(file) == POSITIONS * of_token
    assert os.fstat(file._file.fileno()).st_size == file.written * of_token
    require(file, range(64))


def test_nobody_else_finds_it_and_nothing_is_left(tmp_path):
    file = RowFile(tmp_path / "new", FORMS)
    append(file, 0, 40)
    assert file.flush()
    assert not list((tmp_path / "new").iterdir())
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    descriptor = file._file.fileno()
    assert os.fstat(descriptor).st_nlink == 0
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_killed_process_leaves_nothing(tmp_path):
    script = """
import sys, time
from pathlib import Path
from mlx_h2o.spill.row_file import RowFile
from rows_for_files import FORMS, append
file = RowFile(Path(sys.argv[1]), FORMS)
append(file, 0, 64)
assert file.flush()
print(file.written, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout.readline() == b"64\n"
        process.send_signal(signal.SIGKILL)
    assert not list(tmp_path.iterdir())


# -- what fails -----------------------------------------------------------------------------------


def test_a_full_disk_ends_the_file_and_nothing_else(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = RowFile(tmp_path, FORMS)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * file.layout.block_bytes + 100, before[1]))
        for first in range(0, 160, 16):
            append(file, first, 16)
        assert wait_for(lambda: file.failure)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "could not be written" in file.failure
    assert file.written == 3 * POSITIONS
    require(file, range(3 * POSITIONS))
    append(file, 160, 16)
    assert waiting_bytes(file) == 0
    assert file.complete == 3 * POSITIONS
    assert not file.flush()
    require(file, range(3 * POSITIONS))


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("anything")])
def test_whatever_writing_raises_is_told(tmp_path, monkeypatch, error):
    def failing(*args):
        raise error

    file = RowFile(tmp_path, FORMS)
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
    file = RowFile(tmp_path, FORMS)
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
    assert waiting_bytes(file) == 0


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="file"):
            RowFile(folder, FORMS)
    assert (tmp_path / "file").read_text() == ""


def test_rows_that_do_not_fit_are_refused(tmp_path):
    file = RowFile(tmp_path, FORMS)
    with pytest.raises(ValueError, match="next row"):
        append(file, 3, 16)
    append(file, 0, 16)
    for positions in ([16], [-1]):
        with pytest.raises(ValueError, match="Layer 0 has rows"):
            file.rows(0, 0, positions)
    assert file.rows(0, 0, [])["keys"].shape == (0, 6)


def test_a_file_that_lost_rows_is_an_error(tmp_path):
    file = RowFile(tmp_path, FORMS)
    append(file, 0, 32)
    assert file.flush()
    file._file.truncate(file.layout.block_bytes)
    require(file, range(POSITIONS))
    with pytest.raises(OSError, match="shorter"):
        file.rows(0, 0, [POSITIONS])
    file.truncate(POSITIONS + 3)
    assert "could not be read" in file.failure


# -- tokens are taken back ------------------------------------------------------------------------


def test_what_is_taken_back_comes_again(tmp_path):
    rng = random.Random(3)
    file, held = RowFile(tmp_path, FORMS), 0
    for _ in range(150):
        event = rng.random()
        if event < 0.6:
            count = rng.choice([1, 1, 2, 16, 50])
            append(file, held, count)
            held += count
        elif event < 0.9:
            held = max(held - rng.choice([1, 3, 20, 40]), 0)
            file.truncate(held)
        else:
            assert file.flush()
            assert file.written == held // POSITIONS * POSITIONS
        assert file.complete == held
        assert file.written <= held
        require(file, range(max(held - 70, 0), held))
    require(file, range(held))
