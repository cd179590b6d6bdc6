"""Public names of the stand-ins in swift/Linux that nothing uses, neither sources nor tests.

    python tools/unused_stand_ins.py

A name counts as used where it is written outside of the declarations of that name. Ends with 1
where there are any.
"""

import re
import sys
from pathlib import Path

SWIFT = Path(__file__).resolve().parent.parent / "swift"
DECLARED = re.compile(
    r"^\s*public (?:(?:static|final|mutating|convenience|class) )*"
    r"(?:func|var|let|struct|class|enum|protocol|typealias) `?(\w+)"
)
# What a protocol or the compiler requires: of interpolated strings, result builders and wrappers.
REQUIRED = {"Digest", "appendInterpolation", "appendLiteral", "projectedValue"} | {
    f"build{part}" for part in ("Block", "Either", "Optional")
}


def declarations(lines: list[str]) -> list[tuple[str, int, int]]:
    """Names of public declarations with the first line and the one after the last."""
    names = []
    for first, line in enumerate(lines):
        if not (match := DECLARED.match(line)):
            continue
        depth, last = 0, first
        for last in range(first, len(lines)):
            code = re.sub(r'"[^"]*"|//.*', "", lines[last])
            depth += sum(code.count(c) for c in "{([") - sum(code.count(c) for c in "})]")
            following = lines[last + 1].strip() if last + 1 < len(lines) else ""
            if depth <= 0 and not following.startswith(("-> ", "where ", "{")):
                break
        names.append((match[1], first, last + 1))
    return names


def unused() -> dict[str, list[tuple[Path, int, int]]]:
    """Each unused name with what declares it: file, first line, the one after the last."""
    texts = {
        path: path.read_text().split("\n")
        for path in SWIFT.rglob("*.swift")
        if ".build" not in path.parts
    }
    stand_ins = SWIFT / "Linux" / "Sources"
    places: dict[str, list[tuple[Path, int, int]]] = {}
    for path, lines in texts.items():
        if stand_ins in path.parents:
            for name, first, end in declarations(lines):
                places.setdefault(name, []).append((path, first, end))
    names = {}
    for name, own in places.items():
        word = re.compile(rf"\b{name}\b")
        inside = {(path, i) for path, first, end in own for i in range(first, end)}
        used = any(
            word.search(line.split("//")[0]) and (path, i) not in inside
            for path, lines in texts.items()
            for i, line in enumerate(lines)
        )
        if not used and name not in REQUIRED:
            names[name] = own
    return names


def main() -> int:
    """Prints what is unused."""
    names = unused()
    for name, own in sorted(names.items()):
        for path, first, _ in own:
            print(f"{path.relative_to(SWIFT.parent)}:{first + 1}: {name}")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
