"""The documentation of the Swift package: its links resolve, and every public type has a topic.

A symbol is what the sources declare, by name and argument labels, as DocC writes it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCES = Path("swift/Sources/MLXH2O")
PAGE = SOURCES / "MLXH2O.docc" / "MLXH2O.md"
LINK = re.compile(r"``([^`]+)``")
TYPE = re.compile(r"^public (?:final )?(?:class|enum|protocol|struct) (\w+)", re.M)
FUNCTION = re.compile(r"\bfunc (\w+)[^(]*\(")
INITIALISER = re.compile(r"\b(init)\??(?:<[^>]*>)?\(")
NAME = re.compile(r"\b(?:class|enum|let|protocol|struct|typealias|var) (\w+)")
CASE = re.compile(r"^ *case ([a-z`].*)$", re.M)
BLOCK = re.compile(r"```.*?```", re.S)
# What DocC adds to a name that several symbols have: a kind, or types of arguments.
ADDED = re.compile(r"-swift\.\w+|-\([^)]*\)")


def labels(text: str, start: int) -> str:
    """The argument labels "a:b:" of a parameter list that begins at an index."""
    depth, parts = 0, [""]
    for letter in text[start:]:
        if letter in ")]}>" and not parts[-1].endswith("-"):
            depth -= 1
            if depth < 0:
                break
        depth += letter in "([{<"
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    names = [re.sub(r"@\w+(\([^)]*\))? *", "", part).split() for part in parts]
    return "".join(words[0].rstrip(":") + ":" for words in names if words)


def declared(text: str) -> set[str]:
    """What a source declares: types, variables, cases, and functions with their labels."""
    code = re.sub(r"//.*", "", text)
    found = set(NAME.findall(code))
    for pattern in (FUNCTION, INITIALISER):
        for match in pattern.finditer(code):
            found.add(f"{match[1]}({labels(code, match.end())})")
    for match in CASE.finditer(code):
        for case in re.findall(r"(`?\w+`?)(\([^)]*\))?", match[1]):
            name = case[0].strip("`")
            of_values = "".join(
                f"{part.split(':')[0].strip()}:" if ":" in part else "_:"
                for part in case[1].strip("()").split(",")
            )
            found.add(f"{name}({of_values})" if case[1] else name)
    return found


def main() -> None:
    """Print what does not resolve, and exit with 1 if there is something."""
    texts = {path: path.read_text() for path in sorted(SOURCES.rglob("*.swift"))}
    symbols = set().union(*map(declared, texts.values())) | {"MLXH2O"}
    types = {name for text in texts.values() for name in TYPE.findall(text)}
    page = PAGE.read_text()
    faults = [f"{PAGE}: no topic has {name}" for name in sorted(types) if f"``{name}``" not in page]
    for path, text in {**texts, PAGE: page}.items():
        for link in LINK.findall(BLOCK.sub("", text)):
            # (An extension of a type of Swift's lies below that.)
            parts = ADDED.sub("", link).removeprefix("Swift/Array/").split("/")
            if not symbols.issuperset(parts):
                faults.append(f"{path}: there is no ``{link}``")
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
