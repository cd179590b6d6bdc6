"""Slots in reserved ranges beside slots that grow by copies: growth, shrinking and shared prefixes.

    python -m benchmarks.paged_memory --tokens 32768

Growth in time: two layers in one process, one of each kind, take the same steps in turn, so that
both meet the same disturbances. A step's time is divided by the median of the steps around it.
Everything else: each kind in a process of its own. Resident memory is the process's, from
/proc/self/smaps_rollup, over what it was before; a page that several mappings share counts once
(Pss).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlx_h2o
from benchmarks.memory import decode, read, reported_bytes, the_model
from mlx_h2o import H2OKVCache
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.models.free_memory import give_back
from mlx_h2o.slots import reserved_range
from mlx_h2o.slots.paged_slots import PagedSlotStore
from mlx_h2o.slots.slot_store import GROWTH_STEP

RANGE, COPIES = "reserved range", "copies"
MIB = 1 << 20
# Of the layer whose steps are timed: 512 bytes of keys and values a token, so that a step is short.
HEADS, WIDTH = 1, 64
# Of the store that is weighed: 8 KiB a token.
STORED_HEADS, STORED_WIDTH, ROWS = 8, 128, 64
# Steps on each side that a step is compared with, and those after a prompt that are not counted.
BESIDE, UNCOUNTED = 16, 4
GONE_ON = 100
COLUMNS = ("slots", "what", "figure")


@dataclass(frozen=True)
class Figure:
    """One figure of one kind of slots."""

    slots: str
    what: str
    figure: str


def choose(kind: str) -> None:
    """Let stores that are made from now on be of a kind."""
    reserved_range.FEWEST_BYTES = 0 if kind == RANGE else sys.maxsize


def resident() -> int:
    """Bytes of this process in memory; shared ones by their share."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise OSError("This system does not tell what is resident.")


def steps_in_turn(args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Seconds of the steps around each begin of GROWTH_STEP slots, of each kind.

    What lies between is read as prompts.
    """
    layers = {kind: H2OKVCache(args.tokens) for kind in (RANGE, COPIES)}
    times: dict[str, list[list[float]]] = {kind: [] for kind in layers}
    token, chunk = rows_of(1), rows_of(GROWTH_STEP - 2 * BESIDE)
    for first in range(0, args.tokens, GROWTH_STEP):
        for kind, layer in layers.items():
            took(kind, layer, chunk if first else rows_of(GROWTH_STEP - BESIDE))
            times[kind].append([])
        for step in range(2 * BESIDE):
            if first + GROWTH_STEP - BESIDE + step == args.tokens:
                break
            # The range first where the other grows, whose copies would disturb it.
            order = (COPIES, RANGE) if step % 2 else (RANGE, COPIES)
            for kind in order:
                times[kind][-1].append(took(kind, layers[kind], token))
    return times


def rows_of(length: int) -> list[mx.array]:
    """Queries, keys and values."""
    rows = [mx.random.normal((1, HEADS, length, WIDTH)) for _ in range(3)]
    mx.eval(rows)
    return rows


def took(kind: str, layer: H2OKVCache, rows: list[mx.array]) -> float:
    """Seconds that a layer of a kind takes for rows."""
    choose(kind)
    q, k, v = rows
    begun = time.perf_counter()
    result = layer.update_and_fetch(k, v)
    mask = None if k.shape[2] == 1 else "causal"
    mx.eval(layer.attend(q, *result, scale=WIDTH**-0.5, mask=mask))
    return time.perf_counter() - begun


def growth_in_time(args: argparse.Namespace) -> Iterator[Figure]:
    """How steps compare with those around them; of several lives the fastest one of each step.

    Other programs disturb some steps of each life, and seldom the same one of all.
    """
    lives = [steps_in_turn(args) for _ in range(args.repeats)]
    for kind in (RANGE, COPIES):
        growing, others = list[float](), list[float]()
        for same in zip(*(life[kind] for life in lives), strict=True):
            steps = [min(seconds) for seconds in zip(*same, strict=True)]
            # The first steps after a prompt lend the slots to a decoder.
            ratios = [s / statistics.median(steps) for s in steps[UNCOUNTED:]]
            others += [ratio for i, ratio in enumerate(ratios, UNCOUNTED) if i != BESIDE]
            growing += ratios[BESIDE - UNCOUNTED : BESIDE - UNCOUNTED + 1]
        for name, times in ((f"first steps of {GROWTH_STEP} slots", growing), ("others", others)):
            slow = sum(ratio > 2 for ratio in times) / len(times)
            cells = f"{statistics.median(times):.2f}, {max(times):.2f}; {slow:.1%}"
            yield Figure(kind, f"{name}: median, most; above 2", cells)


def growth_in_memory(kind: str, args: argparse.Namespace) -> Iterator[Figure]:
    """A store that takes rows until it has all tokens."""
    store = PagedSlotStore([args.tokens] * STORED_HEADS)
    drawn = mx.random.normal((1, STORED_HEADS, ROWS, STORED_WIDTH))
    positions = mx.zeros((1, STORED_HEADS, ROWS), mx.int32)
    mx.eval(drawn, positions)
    before, most = resident(), 0
    for _ in range(args.tokens // 2 // ROWS):
        store.append({"keys": drawn, "values": drawn, "positions": positions})
        mx.eval(list(store.fields.values()))
        most = max(most, resident() - before)
    nbytes = resident() - before
    yield Figure(
        kind, "growth to half of the slots: held over told", f"{nbytes / store.nbytes:.3f}"
    )
    yield Figure(kind, "the most resident over what is held", f"{most / nbytes:.3f}")


def shrinking(kind: str, args: argparse.Namespace) -> Iterator[Figure]:
    """A conversation that gets a sixteenth of its memory."""
    model = the_model()
    read(model, mlx_h2o.make_prompt_cache(model, 512), 1024, 256)
    give_back()
    empty = resident()
    took, back = [], []
    for _ in range(args.repeats):
        cache = mlx_h2o.make_prompt_cache(model, args.prompt)
        read(model, cache, args.prompt - 64, 256)
        decode(model, cache, 8)
        give_back()
        full, before = resident() - empty, reported_bytes(cache)
        begun = time.perf_counter()
        mlx_h2o.resize(cache, args.prompt // 16)
        took.append(time.perf_counter() - begun)
        back.append((full - (resident() - empty)) / (before - reported_bytes(cache)))
        del cache
    name = f"shrinking {full / MIB:.0f} MiB to a sixteenth, ms"
    yield Figure(kind, name, f"{min(took) * 1e3:.0f} to {max(took) * 1e3:.0f}")
    yield Figure(kind, "given back by then, at least", f"{min(back):.1%}")


def sharing(kind: str, args: argparse.Namespace) -> Iterator[Figure]:
    """Conversations that have one prefix, and go on alone."""
    model = the_model()
    read(model, mlx_h2o.make_prompt_cache(model, 512), 1024, 256)
    give_back()
    empty = resident()
    prefix = mlx_h2o.make_prompt_cache(model, 2 * args.prefix)
    read(model, prefix, args.prefix, 250)
    give_back()
    alone, of_prefix = resident() - empty, reported_bytes(prefix)
    sessions = [copy.deepcopy(prefix) for _ in range(args.sessions)]
    begun = time.perf_counter()
    for session in sessions:
        decode(model, session, 1)
    first = time.perf_counter() - begun
    for session in sessions:
        decode(model, session, GONE_ON - 1)
    give_back()
    own = args.sessions * of_prefix * GONE_ON / args.prefix
    nbytes = resident() - empty
    yield Figure(kind, f"a prefix of {args.prefix} tokens, MiB", f"{alone / MIB:.0f}")
    name = f"{args.sessions} sessions with it, {GONE_ON} tokens later, MiB"
    yield Figure(kind, name, f"{nbytes / MIB:.0f}")
    yield Figure(kind, "without their own tokens, in prefixes", f"{(nbytes - own) / alone:.2f}")
    name = "a session's first step, ms"
    yield Figure(kind, name, f"{first / args.sessions * 1e3:.1f}")
    last = bounded_entries(sessions[-1])[0]
    assert last.offset == args.prefix + GONE_ON


#: What is measured of one kind in a process of its own.
ALONE: dict[str, Callable[[str, argparse.Namespace], Iterator[Figure]]] = {
    "growth": growth_in_memory,
    "shrinking": shrinking,
    "sharing": sharing,
}


#: All that is measured.
PARTS = ("steps", *ALONE)


def in_own_process(*of: str) -> list[Figure]:
    """What is measured in a process of its own, with this one's options."""
    command = [sys.executable, "-m", "benchmarks.paged_memory", *sys.argv[1:], "--arm", *of]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Figure(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def measured(args: argparse.Namespace) -> list[Figure]:
    """An arm's figures, in this process."""
    mx.set_default_device(mx.Device(mx.cpu))
    if args.arm == ["steps"]:
        return list(growth_in_time(args))
    part, kind = args.arm
    choose(kind)
    return list(ALONE[part](kind, args))


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--tokens", type=int, default=32768, help="that slots grow to")
    made.add_argument("--repeats", type=int, default=3, help="of what is timed")
    made.add_argument("--prompt", type=int, default=4096, help="tokens of what shrinks")
    made.add_argument("--prefix", type=int, default=2000, help="tokens that sessions share")
    made.add_argument("--sessions", type=int, default=64, help="that share them")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    made.add_argument("--json", type=Path, help="write the figures there, too")
    made.add_argument("--arm", nargs="+", help=argparse.SUPPRESS)
    return made


def main() -> None:
    args = parser().parse_args()
    if args.arm:
        rows: list[Any] = [asdict(figure) for figure in measured(args)]
        print(json.dumps(rows))
        return
    figures = in_own_process("steps") if "steps" in args.parts else []
    for part in ALONE:
        if part in args.parts:
            figures += [f for kind in (RANGE, COPIES) for f in in_own_process(part, kind)]
    print(f"Slots for {args.tokens} tokens, float32\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|---|---:|")
    for figure in figures:
        print(f"| {figure.slots} | {figure.what} | {figure.figure} |")
    if args.json:
        args.json.write_text(json.dumps([asdict(f) for f in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
