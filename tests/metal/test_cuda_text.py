"""The kernels' text compiles for NVIDIA GPUs, as MLX would have NVRTC compile it."""

import re

import mlx.core as mx
import pytest
from harness import nvrtc

from mlx_h2o import Remainder
from mlx_h2o.backends import attention_launches
from mlx_h2o.backends.launcher import Launcher

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="needs nvidia-cuda-nvrtc, -runtime and -cccl from PyPI"
)


class Compiling:
    """Stands where `mx.fast.cuda_kernel` stands: compiles, and returns zeros."""

    def __init__(self):
        self.ptx = []

    def __call__(
        self, name, input_names, output_names, source, header="", ensure_row_contiguous=True
    ):
        def call(inputs, output_shapes, output_dtypes, grid, threadgroup, template):
            text = nvrtc.generate(
                f"custom_kernel_{name}",
                header,
                source,
                list(zip(input_names, inputs, strict=True)),
                list(zip(output_names, output_dtypes, strict=True)),
                template,
            )
            self.ptx.append(nvrtc.compile_text(text))
            return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

        return call


def compiled(q, k, v, **options):
    """PTX of the kernels that a call of the attention launches."""
    make = Compiling()
    attention_launches.attend(Launcher(make, "cuda"), q, k, v, scale=0.1, **options)
    return make.ptx


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("queries", [1, 5])
def test_attention(dtype, queries):
    q = mx.zeros((2, 8, queries, 128), dtype)
    k, v = mx.zeros((2, 2, 40, 128), dtype), mx.zeros((2, 2, 40, 64), dtype)
    (ptx,) = compiled(
        q,
        k,
        v,
        mask=mx.zeros((queries, 40), dtype),
        sinks=mx.zeros(8),
        remainder=Remainder.empty(2, 2, 128, 64),
        means=mx.zeros((2, 2, 128)),
    )
    # Rows stay in registers: no array is indexed by what only runs know.
    assert ".local" not in ptx
    assert re.search(r"\.maxntid (384|512)\b", ptx)


def test_two_passes():
    k = mx.zeros((1, 2, 4096, 64), mx.float16)
    assert len(compiled(mx.zeros((1, 8, 1, 64), mx.float16), k, k, mask="causal")) == 2
