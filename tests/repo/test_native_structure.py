"""C++ and C functions stay short, as test_structure.py holds Python to it."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_FUNCTION = 60
FOLDERS = ("c_api/src", "c_api/tests", "python/src", "benchmarks/native")
# What is longer today; none may be added.
LONG_FUNCTIONS = {"c_api/src/cpu/attention.cpp: item", "python/src/bindings.cpp: NB_MODULE"}
# The first words of a line that opens something else than a function.
OTHERS = re.compile(
    r"\s*(namespace|struct|class|enum|union|extern|if|for|while|switch|else|do|case)\b"
)
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".h", ".c", ".cpp") and path.name != "kernel_files.cpp"  # generated
]


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and length of each function of a file that clang-format has laid out.

    Its head is what stands together above a line that ends with a brace, and it ends at the next
    brace that is indented as its head is.
    """
    lines = text.splitlines()
    end = 0
    for i, line in enumerate(lines):
        if i < end or not line.endswith("{") or OTHERS.match(line):
            continue
        start = i
        while start and lines[start - 1] and not lines[start - 1].endswith((";", "{", "}", ":")):
            start -= 1
        while start < i and lines[start].lstrip().startswith("//"):
            start += 1
        head = " ".join(lines[start : i + 1])
        named = re.search(r"([\w~]+)\(", head)
        if named is None or OTHERS.match(head):
            continue
        closing = re.match(r"\s*", lines[start]).group() + "}"  # type: ignore[union-attr]
        end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith(closing)) + 1
        yield named[1], end - start


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_functions_are_found():
    told = dict(functions((ROOT / "c_api/src/step.cpp").read_text()))
    assert {"update_and_attend", "check_rows", "add_plain_rows"} <= told.keys()
    assert all(length > 1 for length in told.values())


def test_functions_are_short():
    long = {
        f"{name_of(path)}: {name}"
        for path in SOURCES
        for name, length in functions(path.read_text())
        if length > LONGEST_FUNCTION
    }
    assert long <= LONG_FUNCTIONS


def engine_files_with(pattern: str) -> set[str]:
    """The engine's files, without those of the CPU kernels, in which a pattern occurs."""
    engine = [path for path in SOURCES if name_of(path).startswith("c_api/src/")]
    engine = [path for path in engine if not name_of(path).startswith("c_api/src/cpu/")]
    assert len(engine) > 60
    return {name_of(path) for path in engine if re.search(pattern, path.read_text())}


def test_the_engine_evaluates_in_one_place():
    """So that a program's own evaluator sees all (`mlx_h2o_set_evaluator`)."""
    evaluates = r"\beval\(|mlx_(async_|array_)?eval\("
    assert engine_files_with(evaluates) == {"c_api/src/evaluation.cpp"}


def test_the_engine_knows_mlx_by_one_header():
    """Which is MLX's C++ API, or what there is of it over mlx-c."""
    includes = r'#include [<"](mlx/(?!c/)|primitives/|kernels/)'
    assert engine_files_with(includes) == {"c_api/src/cpu_kernels.cpp", "c_api/src/mx.h"}
