"""Damaged prompt-cache files and profiles, and what reading and running one must not do.

Run as a program in a process of its own, since what is looked for ends it, or never ends:
`mutants.py FOLDER SEED COUNT`.
"""

import copy
import faulthandler
import hashlib
import json
import random
import resource
import struct
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from mlx_h2o import H2OKVCache, Profile, load_prompt_cache, make_policy, resize, save_prompt_cache
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.loading.identity import ModelIdentity
from mlx_h2o.slots.key_scaling import Frame
from tiny_models import TinyLayer

LAYER = TinyLayer(heads=2, group=2, key_width=32, value_width=32, length=200)
# A mutant may take so long, and grow the process by so much.
SECONDS, MOST_BYTES = 20, 512 * 2**20

NUMBERS = [0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32 + 1, 2**63, 10**18, 10**400, -(2**40)]
VALUES = [*NUMBERS, 0.5, -0.5, 1e308, float("nan"), float("inf"), True, False, None, "", "x"]
VALUES += [[], {}, [1], [[]], {"a": 1}, "DEEP"]
SHAPES = [[1, -5, 3], [10**12, 10**9], [0, 10**18], [2**32, 0], [2**31, 1], [], [-1], [1.5], ["3"]]
SHAPES += [[2**62, 4], [2**32 + 1, 1], None, 7, [[1]], [1] * 50]
OFFSETS = [[0, 10**12], [-8, 8], [8, 0], [0, 0], [10**18, 10**18], [2**64, 2**64], [0], None, "x"]
DTYPES = ["F32", "F16", "BF16", "I16", "I32", "U32", "F64", "I8", "BOOL", "C64", "X", 3, None]
# A depth at which parsers that recurse give up.
DEEP = "[" * 100_000 + "]" * 100_000


def families() -> dict[str, list[Any]]:
    """Lists of caches of every kind, in use and not."""
    dense = H2OKVCache(budgets=[16, 24], policy=make_policy("distinct", evict_every=3))
    options = {"k_bits": 8, "v_bits": 4, "group_size": 32, "recent_bits": 16}
    mixed = H2OKVCache(budgets=[20, 28], policy=make_policy("h2o", recent=0.3), **options)
    layered = H2OKVCache(20, policy=make_policy("paper", recent=8), remainder=False)
    plain_rows = PlainRowsKVCache(40, policy="keydiff")
    young = H2OKVCache(64, policy="ema", bits=4, group_size=32)
    frame = Frame.of(LAYER.tokens[1][:, :, :40])
    framed = H2OKVCache(budgets=[16, 24], bits=6, group_size=32, frame=frame)
    window, full = mlx_lm_cache.RotatingKVCache(max_size=16), mlx_lm_cache.KVCache()
    state = mlx_lm_cache.ArraysCache(2)
    state[0] = mx.zeros((1, 4))
    for cache in (dense, mixed, framed, layered, plain_rows, window, full):
        LAYER.feed(cache, 50, 25)
        LAYER.feed(cache, 2)
    LAYER.feed(young, 9, 9)
    return {
        "dense": [dense],
        "mixed": [mixed],
        "framed": [framed],
        "layered": [layered, layered],
        "plain rows": [plain_rows],
        "young": [young],
        "unused": [
            H2OKVCache(40),
            H2OKVCache(max_bytes=10**6),
            H2OKVCache(budgets=[16, 32]),
            H2OKVCache(40, bits=6, group_size=32, frame=frame),
        ],
        "others": [window, full, mlx_lm_cache.CacheList(state, dense)],
    }


def parts_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def whole(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).replace('"DEEP"', DEEP).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def sign(header: dict[str, Any], data: bytes) -> None:
    """Give a mutant the digest that its own header and data have, as far as they have one."""
    notes = header["__metadata__"]
    notes.pop("digest", None)
    names = {
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I16": "int16",
        "I32": "int32",
        "U32": "uint32",
    }
    digest = hashlib.sha256()
    for key in sorted(notes):
        digest.update(f"{key}={notes[key]}\n".encode())
    for name in sorted(header.keys() - {"__metadata__", "empty"}):
        array = header[name]
        try:
            shape, (start, end) = tuple(array["shape"]), array["data_offsets"]
            digest.update(f"{name} mlx.core.{names[array['dtype']]} {shape}\n".encode())
            digest.update(data[start:end])
        except (KeyError, TypeError, ValueError):
            continue
    notes["digest"] = digest.hexdigest()


def somewhere(tree: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container within a JSON tree, and a key in it."""
    places = []

    def visit(node: Any) -> None:
        keys = node if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list) and node[key]:
                visit(node[key])

    visit(tree)
    return rng.choice(places)


def mutate(tree: Any, rng: random.Random, values: list[Any]) -> str:
    """Change one place of a JSON tree; what was done."""
    node, key = somewhere(tree, rng)
    old = node[key]
    kind = rng.randrange(5)
    if kind == 0 and isinstance(node, dict):
        del node[key]
        return f"without {key}"
    if kind == 1 and type(old) in (int, float):
        node[key] = old + rng.choice([-1, 1, 0.5, 2**31])
    elif kind == 2 and isinstance(old, list):
        node[key] = rng.choice([old * 2, old[:-1], old[::-1], [old]])
    else:
        node[key] = copy.deepcopy(rng.choice(values))
    return f"{key}: {str(old)[:60]} -> {str(node[key])[:60]}"


def mutant_of_file(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A damaged file, and what was done to it."""
    kind = rng.choice(["bytes", "header", "entries", "entries", "entries", "data", "data"])
    if kind == "bytes":
        changed = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return "bytes", bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed))])])
    header, data = parts_of(content)
    notes, arrays = header["__metadata__"], [n for n in header if n != "__metadata__"]
    name = rng.choice(arrays)
    if kind == "header":
        field = rng.choice(["shape", "data_offsets", "dtype", "name"])
        if field == "name":
            other = rng.choice([*arrays, "0.slots.more", "x", "0.recent.keys"])
            header[other] = header.pop(name)
            what = f"{name} is {other}"
        else:
            choices = {"shape": SHAPES, "data_offsets": OFFSETS, "dtype": DTYPES}[field]
            header[name][field] = rng.choice(choices)
            if field == "shape" and rng.random() < 0.3:  # as many elements as there are
                shape = parts_of(content)[0][name]["shape"]
                header[name][field] = rng.choice([[-1, *shape, -1], [*shape, 1], shape[::-1]])
            what = f"{name}.{field} = {header[name][field]}"
    elif kind == "entries":
        entries = json.loads(notes["entries"])
        what = " and ".join(mutate(entries, rng, VALUES) for _ in range(rng.choice([1, 1, 2])))
        notes["entries"] = json.dumps(entries).replace('"DEEP"', DEEP)
    else:
        numbers = [n for n in arrays if n.endswith(("positions", "victims", "count"))] or [name]
        name = rng.choice(numbers)
        start, end = header[name]["data_offsets"]
        changed = bytearray(data)
        at = rng.randrange(start, max(end - 3, start + 1))
        number = rng.choice([-1, 0, 1, 60, 2**31 - 1, -(2**31), rng.randrange(2**31)])
        changed[at : at + 4] = struct.pack("<i", number)
        data, what = bytes(changed[: len(data)]), f"{name} holds {number}"
    sign(header, data)
    return f"{kind}: {what}", whole(header, data)


def run(caches: list[Any]) -> None:
    """Steps, a chunk, a look, and another size, as far as a cache takes them."""
    for cache in caches:
        members = cache.caches if isinstance(cache, mlx_lm_cache.CacheList) else [cache]
        for member in members:
            try:
                repr(member)
                for count, chunk in ((3, 1), (40, 40), (2, 1)):
                    LAYER.feed(member, count, chunk, first=0)
                if isinstance(member, BoundedKVCache):
                    member.trim(1)
                    mx.eval(member.arrays())
                    member.resize(18)
                    LAYER.feed(member, 2, first=0)
            except (ValueError, RuntimeError):
                continue  # it says that it cannot, and that is enough
            except (TypeError, AttributeError, IndexError, KeyError):
                if isinstance(member, BoundedKVCache):  # mlx-lm's own may
                    raise
    try:
        resize(caches, max_size=30)
    except ValueError:
        return


def peak() -> int:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def judge(what: str, read: Any, use: Any) -> bool:
    """Read a mutant, and run it if that is possible; whether it was."""
    print(what, flush=True)  # the last line names the one that ended this process
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    before = peak()
    try:
        mutant = read()
    except ValueError:
        return False
    else:
        use(mutant)
        return True
    finally:
        faulthandler.cancel_dump_traceback_later()
        if (grown := peak() - before) > MOST_BYTES:
            raise MemoryError(f"{what}: {grown:,} bytes")


def profile() -> Profile:
    model = ModelIdentity("llama", (2, 2), (32, 32), 128, (0.5, -0.25))
    curve = (9.0, 4.0, 1.0)
    return Profile(model, (12, 48, 96), ((curve, curve),) * 2, "by hand", {"tokens": 1})


def share_out(mutant: Profile) -> None:
    mutant.model.difference(profile().model)
    for mean in (16, 40, 1000):
        budgets = mutant.budgets(mean)
        assert sum(map(sum, budgets)) == mean * sum(map(len, budgets))


def main() -> None:
    folder, rng, count = Path(sys.argv[1]), random.Random(int(sys.argv[2])), int(sys.argv[3])
    mx.set_default_device(mx.cpu)
    path = folder / "mutant.safetensors"
    files = {}
    for name, caches in families().items():
        save_prompt_cache(path, caches)
        files[name] = path.read_bytes()
        run(load_prompt_cache(path))  # what is whole, is read and runs
    ran = 0
    for number in range(count):
        name = rng.choice(list(files))
        what, content = mutant_of_file(files[name], rng)
        path.write_bytes(content)
        ran += judge(f"{number} {name}, {what}", lambda: load_prompt_cache(path), run)
    path = folder / "mutant.json"
    profile().save(path)
    original = json.loads(path.read_text())
    for number in range(count // 4):
        tree = copy.deepcopy(original)
        what = mutate(tree, rng, VALUES)
        path.write_text(json.dumps(tree).replace('"DEEP"', DEEP))
        ran += judge(f"{number} profile, {what}", lambda: Profile.load(path), share_out)
    print(f"{ran} ran", flush=True)


if __name__ == "__main__":
    main()
