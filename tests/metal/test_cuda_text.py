"""The kernels' text compiles for NVIDIA GPUs, as MLX would have NVRTC compile it; nothing runs.

Compiled are the variants that this session's other tests launched on the host harness: a few of
them, in which every option of a kernel occurs with all dtypes it occurs with. So a new kernel is
compiled as soon as something launches it, and one that nothing launches is a failure.
"""

from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from harness import nvrtc
from launches import covering

from covering import STEP
from mlx_h2o.attention.backends.gpu import CUDA
from mlx_h2o.attention.backends.kernel_text import folder
from mlx_h2o.attention.backends.launcher import Launcher

pytestmark = pytest.mark.skipif(
    not nvrtc.available(), reason="needs nvidia-cuda-nvrtc, -runtime and -cccl from PyPI"
)

KERNELS = sorted(path.stem for path in folder().glob("*.metal"))
# In `make test`, since NVRTC takes seconds for a variant: the first few hold most options.
QUICK_VARIANTS = 3
# A multiprocessor's, all of which one block may have.
REGISTERS = 65536
# What a block has without asking for more.
THREADGROUP_BYTES = 48 * 1024
# Of a thread: a few registers that do not fit cost little (ten, where prompt_lse unpacks its keys),
# a row's share in memory would cost much.
SPILLED_BYTES = 40


def cuda_kernel(
    found, name, input_names, output_names, source, header="", ensure_row_contiguous=True
):
    """Stands where `mx.fast.cuda_kernel` stands: compiles, shows the result, returns zeros."""

    def call(inputs, output_shapes, output_dtypes, grid, threadgroup, template):
        text = nvrtc.generate(
            f"custom_kernel_{name}",
            header,
            source,
            list(zip(input_names, inputs, strict=True)),
            list(zip(output_names, output_dtypes, strict=True)),
            template,
        )
        found(nvrtc.compile_text(text))
        return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

    return call


def compiling(found):
    """The CUDA backend's launcher, with a compiler in the place of a GPU."""
    return Launcher(partial(cuda_kernel, found), "cuda")


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_option_compiles(request, launched, kernel):
    variants = [variant for variant in launched if variant.kernel == kernel]
    if not variants:
        ran = {item.path for item in request.session.items}
        whole = ran.issuperset(Path(__file__).parent.glob("test_*.py"))
        assert not whole, f"no test launches {kernel}"
        pytest.skip("compiles what other tests launch: run all of tests/metal")
    chosen = covering(variants)
    for variant in chosen if STEP == 1 else chosen[:QUICK_VARIANTS]:
        results = []
        variant.launch(compiling(results.append))
        (result,) = results
        # A launch with more threads than the text says would fail; with fewer, registers lie idle.
        assert result.most_threads == variant.threads
        assert result.registers * variant.threads <= REGISTERS
        assert result.threadgroup_bytes <= THREADGROUP_BYTES
        assert result.spilled <= SPILLED_BYTES
        assert not result.local_arrays
        assert not result.doubles


@pytest.mark.parametrize(("slots", "launches"), [(40, 1), (1025, 2)])
def test_the_backend_launches(monkeypatch, slots, launches):
    results = []
    monkeypatch.setattr(CUDA, "launcher", compiling(results.append))
    monkeypatch.setattr(CUDA, "architecture", lambda: "sm_90")
    q, k = mx.zeros((2, 8, 1, 64), mx.float16), mx.zeros((2, 2, slots, 64), mx.float16)
    out, scores, lse = CUDA.attention_with_scores(q, k, k, scale=0.1, mask="causal")
    assert (out.shape, scores.shape, lse.shape) == (q.shape, (2, 8, 1, slots), (2, 8, 1))
    assert len(results) == launches


@pytest.mark.skipif(mx.cuda.is_available(), reason="needs an MLX without CUDA")
def test_mlx_is_called_with_arguments_that_it_has():
    q = mx.zeros((1, 1, 1, 32))
    with pytest.raises(RuntimeError, match="No CUDA back-end"):
        CUDA.attend(q, q, q, scale=1.0, architecture="sm_90")


X = [("x", mx.zeros(8))]
Y = [("y", mx.float32)]
SLOW = {
    "doubles": "y[0] = exp(double(x[0]));",
    "local_arrays": "float all[8]; for (int i = 0; i < 8; i++) all[i] = x[i]; "
    "y[0] = all[int(x[9])];",
}


@pytest.mark.parametrize("kind", SLOW)
def test_what_is_slow_is_seen(kind):
    result = nvrtc.compile_text(nvrtc.generate("slow", "", SLOW[kind], X, Y, []))
    assert getattr(result, kind)
    fine = nvrtc.compile_text(nvrtc.generate("fine", "", "y[0] = exp(x[0]);", X, Y, []))
    assert not getattr(fine, kind)


def test_errors_are_seen():
    with pytest.raises(nvrtc.NvrtcError, match='identifier "z" is undefined'):
        nvrtc.compile_text(nvrtc.generate("wrong", "", "y[0] = z[0];", X, Y, []))
