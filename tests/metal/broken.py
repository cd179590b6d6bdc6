"""Kernels broken on purpose, on the host harness."""

import harness

from mlx_h2o.attention.backends.gpu import Gpu
from mlx_h2o.attention.backends.kernel_text import KernelText
from mlx_h2o.attention.backends.launcher import Launcher


class Changed(Launcher):
    """Compiles other texts than those of metal/.

    Args:
        changes: By kernel, what is replaced in its text and by what.
    """

    def __init__(self, changes):
        super().__init__(harness.metal_kernel, "metal")
        self._changes = changes

    def text(self, kernel):
        text = super().text(kernel)
        if kernel not in self._changes:
            return text
        old, new = self._changes[kernel]
        changed = [part.replace(old, new) for part in (text.header, text.body)]
        assert changed != [text.header, text.body]
        return KernelText(*changed)


def harness_gpu(changes=None):
    """A GPU that the harness stands for, which has checked nothing yet."""
    return Gpu(Changed(changes or {}), lambda: "applegpu_g13g")


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# By name: what is broken, and what the verdict says of it.
BROKEN = {
    "a barrier removed": (
        {
            "attention_vector": (
                f"      totals[simd * ROWS + r] = sum;\n    }}\n  }}\n  {BARRIER}",
                "      totals[simd * ROWS + r] = sum;\n    }\n  }",
            )
        },
        "raised KernelError",
    ),
    "a wrong scale": ({"attention_vector": ("factors[0]", "(1.01f * factors[0])")}, "differs by"),
    "a text that does not compile": (
        {"attention_vector": ("namespace h2o {", "namespace h2o { nothing known; ")},
        "raised BuildError",
    ),
    "NaN only in the last tile": (
        {
            "attention_vector": (
                "  for (int done = 0; done < work.count; done += STEP) {",
                "  for (int done = 0; done < work.count; done += STEP) {\n"
                "    if (done > 0 && work.count - done <= STEP) {\n"
                "      rows.sums[0].values[0] = INFINITY - INFINITY;\n    }",
            )
        },
        "has a NaN",
    ),
    "the best goes first": (
        {"update": ("min(worth, LARGEST_FLOAT)", "-min(worth, LARGEST_FLOAT)")},
        "kept positions",
    ),
}
