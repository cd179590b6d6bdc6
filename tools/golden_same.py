#!/usr/bin/env python3
"""Compares every golden array with the same array of an earlier commit, byte for byte.

    tools/golden_same.py [--base main~20]

Prints which cases went and which came. It fails if an array that both have differs in its bytes,
shape or dtype.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from safetensors import deserialize

ROOT = Path(__file__).parents[1]
#: An array by group and name ("case/out.name"), and what must not change of it.
Digests = dict[str, str]


def digests(group: str, content: bytes) -> Digests:
    """The digest of each array of a safetensors file, over its dtype, shape and bytes."""
    result = {}
    for name, array in deserialize(content):
        head = f"{array['dtype']} {array['shape']} ".encode()
        result[f"{group}/{name}"] = hashlib.sha256(head + bytes(array["data"])).hexdigest()
    return result


def in_tree() -> Digests:
    """The arrays of the working tree."""
    files = sorted((ROOT / "golden").glob("*.safetensors"))
    return {name: d for file in files for name, d in digests(file.stem, file.read_bytes()).items()}


def in_commit(revision: str) -> Digests:
    """The arrays of a commit."""
    listing = ["git", "ls-tree", "--name-only", revision, "golden/"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    result: Digests = {}
    for path in (Path(name) for name in names.split() if name.endswith(".safetensors")):
        show = ["git", "show", f"{revision}:{path}"]
        content = subprocess.run(show, cwd=ROOT, capture_output=True, check=True).stdout
        result.update(digests(path.stem, content))
    return result


def cases(names: set[str]) -> list[str]:
    """ "group/case" of each array name."""
    return sorted({name.rpartition("/")[0] for name in names})


def main() -> int:
    """Compare and print; 1 if an array changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="HEAD", help="the earlier commit (HEAD)")
    base, now = in_commit(parser.parse_args().base), in_tree()
    changed = sorted(name for name in base.keys() & now.keys() if base[name] != now[name])
    print(f"{len(base.keys() & now.keys()) - len(changed)} arrays are the same.")
    for what, names in (("gone", base.keys() - now.keys()), ("new", now.keys() - base.keys())):
        listed = cases(names)
        print(f"{len(names)} arrays are {what}, of {len(listed)} cases", *listed, sep="\n    ")
    print(f"{len(changed)} arrays changed", *changed, sep="\n    ")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
