"""The harness sees what it promises to see: for each kind of mistake, a kernel that makes it."""

import mlx.core as mx
import numpy as np
import pytest
from harness import BuildError, DialectError, KernelError, metal_kernel, recorded

X = mx.arange(256, dtype=mx.float32)


def run(body, *, header="", x=X, size=256, grid=(256, 1, 1), threadgroup=(256, 1, 1), **options):
    """Run a body that reads x and writes y, one thread per element unless told otherwise."""
    kernel = metal_kernel(
        "broken", ["x"], ["y"], source=body, header=header, ensure_row_contiguous=False
    )
    return kernel([x], [(size,)], [mx.float32], grid, threadgroup, **options)[0]


INDEX = "  const uint i = thread_position_in_grid.x;\n"
SHARED = INDEX + "  THREADGROUP_ARRAY(float, shared, 256);\n"
BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);\n"

MISTAKES = {
    "read past the end": (INDEX + "y[i] = x[i + 1];", r"read out of bounds: x\[256\], lane 255 of"),
    "read before the start": (
        INDEX + "y[i] = x[int(i) - 2];",
        r"read out of bounds: x\[-2\], lane 0",
    ),
    "read far away": (INDEX + "y[i] = x[i == 9 ? 100000 : i];", r"x\[100000\], lane 9 "),
    "write past the end": (
        INDEX + "y[i + 1] = x[i];",
        r"write out of bounds: y\[256\], lane 255 of",
    ),
    "threadgroup index past the end": (
        SHARED + "shared[i + 1] = x[i];\n" + BARRIER + "y[i] = shared[i + 1];",
        r"write out of bounds: shared\[256\], lane 255 of",
    ),
    "threadgroup index before the start": (
        SHARED + "shared[i] = x[i];\n" + BARRIER + "y[i] = shared[int(i) - 1];",
        r"read out of bounds: shared\[-1\], lane 0 of",
    ),
    "uninitialised threadgroup read": (
        SHARED + "if (i != 40) shared[i] = x[i];\n" + BARRIER + "y[i] = shared[255 - i];",
        r"uninitialised read: shared\[40\], lane 215 of",
    ),
    "read of an output before it is written": (
        INDEX + "y[i] = y[i] + x[i];",
        r"uninitialised read: y\[0\], lane 0 of",
    ),
    "barrier in a branch": (
        SHARED + "shared[i] = x[i];\n if (i < 64) {\n" + BARRIER + "}\n y[i] = shared[i];",
        r"barrier divergence: lane 0 is at threadgroup_barrier \(line \d+\), lane 64 at its end",
    ),
    "barrier in a branch within a simdgroup": (
        SHARED + "shared[i] = x[i];\n if (i % 2 == 0) {\n" + BARRIER + "}\n y[i] = shared[i];",
        r"barrier divergence: lane 0 is at threadgroup_barrier \(line \d+\), lane 1 at its end",
    ),
    "simdgroup operation in a branch": (
        INDEX + "float s = x[i];\n if (i % 32 < 5) s = simd_sum(s);\n y[i] = s;",
        r"simdgroup divergence: lane 0 is at simd_sum \(line \d+\), lane 5 at its end",
    ),
    "two different simdgroup operations": (
        INDEX
        + "float s = x[i];\n if (i % 32 < 5) s = simd_sum(s); else s = simd_max(s);\n y[i] = s;",
        r"simdgroup divergence: lane 0 is at simd_sum \(line \d+\), lane 5 at simd_max",
    ),
    "shuffle from nowhere": (
        INDEX + "y[i] = simd_shuffle(x[i], ushort(32));",
        r"shuffle from lane 32 of 32",
    ),
    "threadgroup read without a barrier": (
        SHARED + "shared[i] = x[i];\n y[i] = shared[255 - i];",
        r"(read of another lane's write without a barrier|uninitialised read).*shared\[",
    ),
    "threadgroup write over a read": (
        SHARED
        + "shared[i] = x[i];\n"
        + BARRIER
        + "y[i] = shared[0];\n if (i == 7) shared[0] = 1.0f;",
        r"(write over what another lane reads|read of another lane's write).*: shared\[0\], lanes",
    ),
    "a simdgroup's barrier for a threadgroup's work": (
        SHARED + "shared[i] = x[i];\n simdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "y[i] = shared[i ^ 32];",
        r"(read of another lane's write without a barrier|uninitialised read).*shared\[",
    ),
    "a barrier that orders other memory": (
        SHARED + "shared[i] = x[i];\n threadgroup_barrier(mem_flags::mem_device);\n"
        "y[i] = shared[i ^ 1];",
        r"read of another lane's write without a barrier between: shared\[1\], lanes 1 and 0 of",
    ),
    "two lanes write one element": (
        INDEX + "y[i / 2] = x[i];\n y[128 + i / 2] = x[i];",
        r"two lanes write without a barrier between: y\[0\], lanes 0 and 1 of",
    ),
    "element never written": (INDEX + "if (i != 77) y[i] = x[i];", r"never written: y\[77\]"),
    "write to an input": (
        INDEX + "y[i] = x[i];\n const_cast<device float*>(x)[i] = 0.0f;",
        r"write to an input: x\[0\], lane 0 of",
    ),
    "too much threadgroup memory": (
        INDEX + "THREADGROUP_ARRAY(float, much, 8193);\n much[i] = x[i];\n y[i] = much[i];",
        r"more than 32 KB of threadgroup memory: much\[8193\]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    body, message = MISTAKES[mistake]
    with pytest.raises(KernelError, match=f"kernel broken: .*{message}"):
        run(body)


def test_threadgroups_may_not_share_what_they_write():
    with pytest.raises(
        KernelError, match=r"race between threadgroups: y\[0\], lane 0 of .*\(1, 0, 0\)"
    ):
        run("y[thread_index_in_threadgroup] = x[0];", size=64, threadgroup=(64, 1, 1))


def test_gaps_of_a_view_are_out_of_bounds():
    view = X.reshape(16, 16)[:, :10]
    body = INDEX + "y[i] = x[i / 10 * x_strides[0] + i % 10 + {}];"
    assert mx.array_equal(run(body.format(0), x=view, size=160, grid=(160, 1, 1)), view.flatten())
    with pytest.raises(KernelError, match=r"read out of bounds: x\[10\], lane 9 of"):
        run(body.format(1), x=view, size=160, grid=(160, 1, 1))


def test_an_output_with_an_initial_value_need_not_be_written():
    y = run(INDEX + "if (i != 77) y[i] = x[i];", init_value=-1.0)
    assert y[77].item() == -1


TEXT_MISTAKES = {
    "static": (INDEX + "static float s; y[i] = s;", "static"),
    "double": (INDEX + "double s = x[i]; y[i] = s;", "double"),
    "double literal": (INDEX + "y[i] = 0.5 * x[i];", "double literal"),
    "lambda": (INDEX + "auto f = [&](int j) { return x[j]; };\n y[i] = f(i);", "lambda"),
}


@pytest.mark.parametrize("mistake", TEXT_MISTAKES)
def test_text_outside_the_dialect_is_found(mistake):
    body, message = TEXT_MISTAKES[mistake]
    with pytest.raises(DialectError, match=message):
        run(body)


def test_recursion_is_found():
    header = """
      inline float up(int n);
      inline float down(int n) { return n == 0 ? 1.0f : up(n - 1); }
      inline float up(int n) { return down(n); }
    """
    with pytest.raises(DialectError, match=r"recursion: (down -> up -> down|up -> down -> up)"):
        run(INDEX + "y[i] = down(3);", header=header)


def test_words_of_the_dialect_are_not_mistaken():
    header = """
      // static double recursion() in a comment is no mistake; nor is 1.0
      template <int N>
      inline float half_of(const device float* from, int i) {
        static_assert(N > 0, "static 1.0");
        const float table[2] = {1.0f, 0.5f};
        return static_cast<float>(from[i]) * table[1] + 1e-9f;
      }
    """
    y = run(INDEX + "y[i] = half_of<1>(x, i);", header=header)
    assert mx.allclose(y, X / 2)


ADDRESS_SPACES = {
    "a device pointer without its space": "inline float first(const float* from) { return *from; }",
    "a threadgroup pointer for a device one": (
        "inline float first(const threadgroup float* from) { return *from; }"
    ),
    "a constant pointer for a device one": (
        "inline float first(const constant float* from) { return *from; }"
    ),
}


@pytest.mark.parametrize("mistake", ADDRESS_SPACES)
def test_missing_address_spaces_are_found(mistake):
    with pytest.raises(BuildError, match="no matching function for call to 'first'"):
        run(INDEX + "y[i] = first(x) + x[i];", header=ADDRESS_SPACES[mistake])


def test_a_space_on_a_local_variable_is_found():
    with pytest.raises(BuildError, match="cannot initialize a variable of type"):
        run(INDEX + "const float* from = x;\n y[i] = from[i];")


def test_simdgroup_operations():
    body = (
        INDEX
        + """
      const float v = x[i];
      const uint lane = thread_index_in_simdgroup;
      const float results[8] = {
        simd_sum(v), simd_max(v), simd_min(v), simd_prefix_inclusive_sum(v),
        simd_shuffle(v, ushort(3)), simd_shuffle_xor(v, ushort(4)),
        simd_shuffle_down(v, ushort(2)), float(simd_any(v == 40.0f))};
      for (int j = 0; j < 8; j++) y[8 * i + j] = results[j];
    """
    )
    y = np.array(run(body, size=8 * 256)).reshape(8, 32, 8)
    x = np.array(X).reshape(8, 32)
    lanes = np.arange(32)
    expected = [
        np.repeat(x.sum(1), 32).reshape(8, 32),
        np.repeat(x.max(1), 32).reshape(8, 32),
        np.repeat(x.min(1), 32).reshape(8, 32),
        x.cumsum(1),
        np.repeat(x[:, 3], 32).reshape(8, 32),
        x[:, lanes ^ 4],
        x[:, np.where(lanes + 2 < 32, lanes + 2, lanes)],
        np.repeat((x == 40).any(1), 32).reshape(8, 32),
    ]
    for j, result in enumerate(expected):
        np.testing.assert_array_equal(y[..., j], result)


def test_counts():
    body = SHARED + "shared[i] = x[i] + x[0];\n" + BARRIER + "y[i] = simd_sum(shared[i ^ 1]);"
    with recorded() as launches:
        run(body)
    (counts,) = launches
    # x once, and x[0] once more for each of the 8 simdgroups: a broadcast.
    assert counts.bytes_read["x"] == 4 * (256 + 8)
    assert counts.bytes_written["y"] == 4 * 256
    assert (counts.barriers, counts.simd_reductions, counts.threadgroups) == (1, 8, 1)


def test_a_read_in_a_loop_is_requested_each_time():
    body = INDEX + "float s = 0.0f;\n for (int j = 0; j < 3; j++) s += simd_max(x[j]);\n y[i] = s;"
    with recorded() as launches:
        run(body, grid=(32, 1, 1), size=32)
    assert launches[0].bytes_read["x"] == 4 * 3


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_narrow_floats_round_as_mlx_does(dtype):
    mx.random.seed(0)
    x = mx.random.normal((4000,)) * mx.exp(mx.random.uniform(-25, 12, (4000,)))
    edge = [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e30, -1e30, 6e-8, 2.9e-8, 5.96e-8, 6.1e-5]
    x = mx.concatenate([x, mx.array([*edge, mx.inf, -mx.inf])])
    kernel = metal_kernel(
        "round", ["x"], ["y", "z"], source=INDEX + "y[i] = T(x[i]);\n z[i] = float(T(x[i]));"
    )
    y, z = kernel(
        [x],
        [x.shape, x.shape],
        [dtype, mx.float32],
        (x.size, 1, 1),
        (256, 1, 1),
        template=[("T", dtype)],
    )
    assert mx.array_equal(y, x.astype(dtype))
    assert mx.array_equal(z, x.astype(dtype).astype(mx.float32))
