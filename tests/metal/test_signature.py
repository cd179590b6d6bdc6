"""The harness generates the text that MLX generates, as MLX prints it when asked to."""

import mlx.core as mx
import pytest
from harness.signature import generate

SOURCE = """
  uint i = thread_position_in_grid.x;
  if (simdgroup_index_in_threadgroup < threads_per_threadgroup.x && i < uint(x_shape[0])) {
    y[i] = x[i * x_strides[0]] + T(few[0]) + T(one) + T(few_ndim);
    z[i] = int(i);
  }
"""


@pytest.mark.parametrize("elements", [7, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_generated_text_is_mlx_own(capfd, tmp_path, dtype, elements):
    x = mx.zeros((elements, 2), dtype)
    few = mx.zeros((elements,), mx.int32)
    template = [("T", dtype), ("N", 3), ("FLAG", True)]
    kernel = mx.fast.metal_kernel(
        name="example",
        input_names=["x", "few", "one"],
        output_names=["y", "z"],
        header="// a header\n",
        source=SOURCE,
        ensure_row_contiguous=False,
    )

    def call(x, few):
        return kernel(
            inputs=[x, few, 2.5],
            template=template,
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(8,), (8,)],
            output_dtypes=[dtype, mx.int32],
            verbose=True,
        )

    # Without a GPU MLX does not launch kernels, but it writes their text when exporting a graph.
    mx.export_function(str(tmp_path / "graph.mlxfn"), call, x, few)
    printed = capfd.readouterr().out
    ours = generate(
        "example",
        "// a header\n",
        SOURCE,
        [("x", x), ("few", few), ("one", mx.array(2.5))],
        [("y", dtype), ("z", mx.int32)],
        template,
    )
    assert ours.text + ours.instantiation in printed


def test_buffers_come_with_what_the_body_mentions():
    x = mx.zeros((8, 2))
    ours = generate("k", "", "x_shape x_strides x_ndim", [("x", x)], [("y", mx.float32)], [])
    assert [argument.name for argument in ours.arguments] == [
        "x",
        "x_shape",
        "x_strides",
        "x_ndim",
        "y",
    ]
    assert [argument.space for argument in ours.arguments] == ["device"] + 3 * ["constant"] + [
        "device"
    ]
