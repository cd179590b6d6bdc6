"""The documentation of the Swift package: its links resolve, and every public type has a topic.

    python tools/check_docc.py FOLDER

FOLDER has the module's symbol graph (`swift-symbolgraph-extract`), by which DocC resolves links:
from a symbol outward, in the module, and in the types of other modules that it extends.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path("swift/Sources/MLXH2O/MLXH2O.docc/MLXH2O.md")
LINK = re.compile(r"``([^`]+)``")
TYPES = {"swift.class", "swift.enum", "swift.protocol", "swift.struct"}
BLOCK = re.compile(r"```.*?```", re.S)
# What tells symbols of one name apart: a kind, or types of arguments.
SUFFIX = re.compile(r"-(?:swift\.\w+|\w+|\([^)]*\))$")

Paths = dict[tuple[str, ...], int]


def read(folder: Path) -> tuple[list[dict[str, Any]], Paths]:
    """The module's public symbols, and how many have each path."""
    symbols: list[dict[str, Any]] = []
    paths: Paths = {("MLXH2O",): 1}
    for file in sorted(folder.glob("MLXH2O*.symbols.json")):
        _, _, extended = file.name.removesuffix(".symbols.json").partition("@")
        for symbol in json.loads(file.read_text())["symbols"]:
            symbols.append(symbol)
            path = tuple(symbol["pathComponents"])
            for one in [path, (extended, *path)] if extended else [path]:
                paths[one] = paths.get(one, 0) + 1
    return symbols, paths


def fault(link: str, scope: tuple[str, ...], paths: Paths) -> str | None:
    """Why a link does not resolve, or None."""
    parts = link.split("/")
    path = tuple(SUFFIX.sub("", part) for part in parts)
    for length in range(len(scope), -1, -1):
        if count := paths.get(scope[:length] + path):
            ambiguous = count > 1 and parts[-1] == path[-1]
            return f"{count} symbols are ``{link}``" if ambiguous else None
    return f"there is no ``{link}``"


def main() -> None:
    """Print what does not resolve, and exit with 1 if there is something."""
    symbols, paths = read(Path(sys.argv[1]))
    page = PAGE.read_text()
    texts: list[tuple[str, tuple[str, ...], str]] = [(str(PAGE), (), page)]
    faults = []
    for symbol in symbols:
        path = tuple(symbol["pathComponents"])
        lines = symbol.get("docComment", {}).get("lines", [])
        texts.append((".".join(path), path, "\n".join(line["text"] for line in lines)))
        is_type = symbol["kind"]["identifier"] in TYPES and len(path) == 1
        if is_type and f"- ``{path[0]}``" not in page:
            faults.append(f"{PAGE}: no topic has {path[0]}")
    for place, scope, text in texts:
        for link in LINK.findall(BLOCK.sub("", text)):
            if why := fault(link, scope, paths):
                faults.append(f"{place}: {why}")
    sys.exit("\n".join(faults) or 0)


if __name__ == "__main__":
    main()
