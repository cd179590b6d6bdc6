"""Rows for files of rows: every place has other bits, so that a wrong row is found."""

import time

import mlx.core as mx
import numpy as np

from mlx_h2o.spill.layout import LayerForm

FORMS = [
    LayerForm.of(
        2, {"keys": ("uint32", 6), "keys.scales": ("bfloat16", 2), "values": ("float32", 5)}
    ),
    LayerForm.of(3, {"keys": ("float16", 8), "values": ("bfloat16", 4)}),
]
BITS = {"uint32": np.uint32, "bfloat16": np.uint16, "float32": np.uint32, "float16": np.uint16}
GIVEN = {"float32": np.float32, "float16": np.float16}


def bits_of(layer, field, head, positions):
    """The bits of some rows, `[M, width]`: another number for each place."""
    form = FORMS[layer].fields[field]
    of_row = np.asarray(positions, np.uint64) * 131 + head * 17 + field * 5 + layer
    numbers = (of_row[:, None] * 2654435761 + np.arange(form.width, dtype=np.uint64) * 40503) >> 7
    return (numbers % 2**15).astype(BITS[form.dtype])


def fields(layer, first, count):
    """Rows of a layer in numpy, `[1, H, count, width]` by name."""
    named = {}
    for i, field in enumerate(FORMS[layer].fields):
        heads = range(FORMS[layer].heads)
        bits = np.stack([bits_of(layer, i, head, range(first, first + count)) for head in heads])
        named[field.name] = bits[None].view(GIVEN.get(field.dtype, bits.dtype))
    return named


def in_mlx(named):
    """The same rows as MLX's arrays, not evaluated."""
    arrays = {}
    for name, rows in named.items():
        array = mx.array(rows)
        arrays[name] = array.view(mx.bfloat16) if rows.dtype == np.uint16 else array[:, :, :]
    return arrays


def append(file, first, count):
    """Append rows to all layers."""
    for layer in range(len(FORMS)):
        file.append(layer, first, in_mlx(fields(layer, first, count)))


def waiting_bytes(file):
    """Bytes of rows that are not in the file yet."""
    return sum(array.nbytes for layer in range(len(FORMS)) for array in file.waiting(layer))


def require(file, positions):
    """Every row at these positions is the one that was given."""
    positions = np.asarray(positions)
    for layer, form in enumerate(FORMS):
        for head in range(form.heads):
            rows = file.rows(layer, head, positions)
            assert set(rows) == {field.name for field in form.fields}
            for i, field in enumerate(form.fields):
                bits = np.ascontiguousarray(rows[field.name]).view(BITS[field.dtype])
                assert np.array_equal(bits, bits_of(layer, i, head, positions))


def wait_for(condition):
    """Whether a condition comes true within five seconds."""
    for _ in range(500):
        if condition():
            return True
        time.sleep(0.01)
    return False
