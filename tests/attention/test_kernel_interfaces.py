"""What the kernels of metal/ declare is what launches pass, and what they number is numbered alike
in Python and C++."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_h2o.attention.backends import attention_launches, prompt_launches, step_launches
from mlx_h2o.attention.backends.interface import interface
from mlx_h2o.attention.backends.kernel_text import kernel_file, kernel_text
from mlx_h2o.attention.backends.launcher import Launcher

ROOT = Path(__file__).parents[2]
KERNELS = sorted(path.stem for path in (ROOT / "metal").glob("*.metal"))


def defines(name: str) -> dict[str, int]:
    """The whole numbers that a file of metal/ defines."""
    found = re.findall(r"^#define (\w+) (\d+)$", kernel_file(name), re.MULTILINE)
    return {key: int(value) for key, value in found}


def block(folder: str, start: str) -> str:
    """From `start` to the next closing brace, in the one file of a folder that has it."""
    texts = [path.read_text() for path in (ROOT / folder).rglob("*.*")]
    [text] = [text for text in texts if start in text]
    return text.split(start)[1].split("}")[0]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_reads_what_it_declares(kernel):
    buffers, body = interface(kernel), kernel_text(kernel, "metal").body
    names = [*buffers.inputs, *buffers.outputs]
    assert len(names) == len(set(names))
    # MLX orders launches by what they take: these are not read.
    unread = {name for name in names if not re.search(rf"\b{name}\b", body)}
    assert unread <= {"after", "slots"}
    for name in names:
        if f"{name}_strides" in body and name in buffers.optional:
            assert f"{name}_strides[4]" in buffers.optional[name]


@pytest.mark.parametrize(
    ("line", "stands_in"),
    [
        ("in x", None),
        ("in x optional", ""),
        ("in x optional bool", "const device bool* x = nullptr;"),
        ("out x optional float", "device float* x = nullptr;"),
    ],
)
def test_declarations(line, stands_in, monkeypatch):
    text = f"functions\n//! buffers\n//! {line}\n//! body\n"
    monkeypatch.setattr("mlx_h2o.attention.backends.interface.kernel_file", lambda _: text)
    found = interface.__wrapped__("made up")
    assert found.inputs + found.outputs == ("x",)
    assert found.optional == ({} if stands_in is None else {"x": stands_in})
    assert found.required == ({"x"} if stands_in is None else set())


@pytest.mark.parametrize(
    "line",
    ["in", "inout x", "in x y", "in x optional float dense", "in x optional float strided y"],
)
def test_other_declarations_are_refused(line, monkeypatch):
    text = f"functions\n//! buffers\n//! {line}\n//! body\n"
    monkeypatch.setattr("mlx_h2o.attention.backends.interface.kernel_file", lambda _: text)
    with pytest.raises(ValueError, match=r"declares no buffer|cannot be declared"):
        interface.__wrapped__("made up")


def test_a_launch_passes_what_is_declared():
    launcher = Launcher(lambda **_: pytest.fail("It was built."), "metal")
    x, out = mx.zeros(8), {"out": ((8,), mx.float32), "lse": ((8,), mx.float32)}
    right = {"params": x, "partials": x, "partial_lses": x}
    with pytest.raises(ValueError, match="attention_merge has no buffers keys"):
        launcher.launch("attention_merge", right | {"keys": x}, out, {}, (1, 1, 1), 32)
    with pytest.raises(ValueError, match="attention_merge has no buffers mass"):
        launcher.launch("attention_merge", right, out | {"mass": out["lse"]}, {}, (1, 1, 1), 32)
    del right["partials"]
    with pytest.raises(ValueError, match="attention_merge must have the buffers partials"):
        launcher.launch("attention_merge", right, out, {}, (1, 1, 1), 32)


# -- numbers --------------------------------------------------------------------------------------

ENGINE = "c_api/src"


def test_scores_are_numbered_alike():
    numbers = defines("priority.h")
    scores = [name for name in numbers if name.startswith("SCORE_")]
    assert [numbers[name] for name in scores] == list(range(len(scores)))
    names = [name.removeprefix("SCORE_").lower() for name in scores]
    assert list(step_launches.SCORES) == names
    assert re.findall(r"\w+", block(ENGINE, "enum class Score {")) == names


def test_priorities_are_numbered_alike():
    numbers = defines("priority.h")
    priorities = [name for name in numbers if name.startswith("BY_")]
    assert [numbers[name] for name in priorities] == list(range(len(priorities)))
    # What kept_keys worked out is a direction's worth.
    names = [name.removeprefix("BY_").lower().replace("worth", "direction") for name in priorities]
    assert list(step_launches.PRIORITIES) == names
    assert re.findall(r"\w+", block(ENGINE, "enum class Priority {")) == names


def test_masks_and_exports_are_numbered_alike():
    names = ("NO_MASK", "CAUSAL", "ARRAY_MASK")
    assert defines("masks.h") == {name: getattr(attention_launches, name) for name in names}
    exports = ("EXPORT_NOTHING", "EXPORT_LSE", "EXPORT_LOGITS")
    numbers = {name: getattr(attention_launches, name) for name in exports}
    assert numbers.items() <= defines("attention_step.h").items()
    of_c = block("c_api/src/gpu", "enum class VectorExport {")
    assert re.findall(r"\w+", of_c) == ["nothing", "lse", "logits"]


def test_sizes_of_tiles_are_alike():
    numbers = defines("logit_tile.h")
    side = numbers["TILE"] // numbers["SQUARE"]
    sizes = (numbers["TILE"], side * side)
    assert sizes == (prompt_launches._TILE, prompt_launches._THREADS)
    of_c = (ROOT / "c_api/src/gpu/prompt_launches.cpp").read_text()
    assert tuple(map(int, re.findall(r"constexpr int k\w+ = (\d+);", of_c))) == sizes
