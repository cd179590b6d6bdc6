"""A kernel that exports nothing is the kernel without the text that exports."""

import re

import mlx.core as mx
import pytest
from harness import compiler
from harness.kernel import PRELUDE
from harness.signature import generate

from mlx_h2o.attention.backends.attention_launches import EXPORT_LOGITS, EXPORT_NOTHING
from mlx_h2o.attention.backends.interface import interface
from mlx_h2o.attention.backends.kernel_text import kernel_text


def without_export(text):
    """Text without the statements that only an export runs; other lines keep their numbers."""
    kept, rest = "", text
    while found := re.search(r"\n *if \(EXPORT\b[^{]*\{", rest):
        end, depth = found.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(rest[end], 0)
            end += 1
        removed = rest[found.start() : end].count("\n") * "\n"
        kept, rest = kept + rest[: found.start()] + removed, rest[end:]
    return kept + rest


def compiled(dtype, rows, header, body, export):
    """The host compiler's code for the kernel that MLX would generate."""
    template = {"T": dtype, "D": 128, "DV": 128, "G": rows, "QUERIES": 1, "ROWS": rows}
    template |= {"ROW_GROUPS": 1, "SIMDS": 8, "KEYS": 16, "MASK": 0, "SINKS": False}
    template |= {"K_BITS": 0, "K_GROUP": 1, "V_BITS": 0, "V_GROUP": 1}
    template |= {"REMAINDER": False, "COLUMNS": False, "DISTANCES": False, "FRAME": False}
    template |= {"EXPORT": export}
    arrays = {"params": mx.zeros(16, mx.int32), "factors": mx.zeros(1)}
    arrays |= {name: mx.zeros((1, 8, 1, 128), dtype) for name in ("queries", "keys", "values")}
    outputs = [("out", dtype), ("lse", mx.float32), ("logits", mx.float32)]
    passed = {*arrays, *(name for name, _ in outputs)}
    optional = interface("attention_vector").optional
    absent = [line for name, line in optional.items() if name not in passed]
    kernel = generate(
        "attention",
        header,
        "\n".join([*absent, body]),
        list(arrays.items()),
        outputs,
        list(template.items()),
    )
    listing = compiler.assembly(PRELUDE + kernel.text + kernel.use)
    return "\n".join(line for line in listing.splitlines() if ".file" not in line)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_export_of_nothing_compiles_to_nothing(dtype, rows):
    text = kernel_text("attention_vector", "metal")
    bare = without_export(text.header)
    assert bare.count("logits_out[") == 0
    assert bare.count("lse[") == 0
    off = compiled(dtype, rows, text.header, text.body, EXPORT_NOTHING)
    assert off == compiled(dtype, rows, bare, text.body, EXPORT_NOTHING)
    # The comparison can fail: with the export the code differs.
    assert off != compiled(dtype, rows, text.header, text.body, EXPORT_LOGITS)
