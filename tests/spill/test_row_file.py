"""Files of rows: every row comes back as it was given, whatever happened in between."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o.spill.layout import DamagedFile, LayerForm
from mlx_h2o.spill.row_file import RowFile

FORMS = [
    LayerForm.of(
        2, {"keys": ("uint32", 6), "keys.scales": ("bfloat16", 2), "values": ("float32", 5)}
    ),
    LayerForm.of(3, {"keys": ("float16", 8), "values": ("bfloat16", 4)}),
]
BITS = {"uint32": np.uint32, "bfloat16": np.uint16, "float32": np.uint32, "float16": np.uint16}
KEY = b"0123456789abcdef"


def given(layer, head, field, position, width):
    """The bits of a row: another for each place."""
    rng = np.random.default_rng([layer, head, field, position])
    return rng.integers(0, 2**15, width)


def fields(layer, first, count):
    """Rows of a layer in numpy, `[1, H, count, width]` by name."""
    form, named = FORMS[layer], {}
    for i, field in enumerate(form.fields):
        rows = [
            [
                given(layer, head, i, position, field.width)
                for position in range(first, first + count)
            ]
            for head in range(form.heads)
        ]
        bits = np.array(rows, BITS[field.dtype])[None]
        dtype = {"float32": np.float32, "float16": np.float16}.get(field.dtype, bits.dtype)
        named[field.name] = bits.view(dtype)
    return named


def in_mlx(named):
    """The same rows as MLX's arrays, not evaluated."""
    arrays = {}
    for name, rows in named.items():
        array = mx.array(rows)
        arrays[name] = array.view(mx.bfloat16) if rows.dtype == np.uint16 else array[:, :, :]
    return arrays


def append(file, first, count, convert=lambda named: named):
    for layer in range(len(FORMS)):
        file.append(layer, first, convert(fields(layer, first, count)))


def require(file, positions):
    """Every row at these positions is the one that was given."""
    positions = np.asarray(positions)
    for layer, form in enumerate(FORMS):
        for head in range(form.heads):
            rows = file.rows(layer, head, positions)
            assert set(rows) == {field.name for field in form.fields}
            for i, field in enumerate(form.fields):
                expected = [given(layer, head, i, p, field.width) for p in positions]
                bits = rows[field.name].view(BITS[field.dtype])
                assert np.array_equal(bits, np.array(expected).reshape(bits.shape))


def wait_for(condition):
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
@pytest.mark.parametrize("convert", [lambda n: n, in_mlx], ids=["numpy", "mlx"])
@pytest.mark.parametrize("counts", [[1] * 70, [40, 1, 1, 64, 3, 1], [100]], ids=str)
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
        assert wait_for(lambda: file.written == 48)
        assert not file.failure
        assert file.nbytes < 20 * sum(form.heads * form.row_bytes for form in FORMS)
        require(file, range(64))


def test_only_the_owner_may_read_it(tmp_path):
    with RowFile.create(tmp_path / "new" / "a.rows", FORMS) as file:
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_it_goes_with_its_conversation_unless_it_is_kept(tmp_path):
    RowFile.create(tmp_path / "a.rows", FORMS).close()
    RowFile.create(tmp_path / "b.rows", FORMS, keep=True).close()
    assert [path.name for path in tmp_path.iterdir()] == ["b.rows"]
