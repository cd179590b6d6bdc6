"""Slots in reserved ranges beside slots that grow by copies: growth, shrinking and shared prefixes.

    python -m benchmarks.paged_memory --tokens 32768

Growth in time: two layers in one process, one of each kind, take the same steps in turn, so that
both meet the same disturbances. Everything else: each kind in a process of its own. Resident memory
is the process's, from /proc/self/smaps_rollup, over what it was before; a page that several
mappings share counts once (Pss).
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
from benchmarks.memory import decode, read, the_model, told
from mlx_h2o import H2OKVCache
from mlx_h2o._utils.free_memory import give_back
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.storage import reserved_range
from mlx_h2o.storage.slot_store import GROWTH_STEP, SlotStore

RANGE, COPIES = "reserved range", "copies"
MIB = 1 << 20
# Of the layer whose steps are timed: 512 bytes of keys and values a token, so that a step is short.
HEADS, WIDTH = 1, 64
# Of the store that is weighed: 8 KiB a token.
STORED_HEADS, STORED_WIDTH, ROWS = 8, 128, 64
# Steps on each side that a step is compared with.
BESIDE = 64
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


def steps_in_turn(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each step of each kind, from the first token to the last."""
    layers, taken = {}, dict[str, list[float]]()
    for kind in (RANGE, COPIES):
        layers[kind], taken[kind] = H2OKVCache(args.tokens), []
    rows = [mx.random.normal((1, heads, 1, WIDTH)) for heads in (HEADS, HEADS, HEADS)]
    mx.eval(rows)
    q, k, v = rows
    for step in range(args.tokens):
        # The range first where the other grows, whose copies would disturb it.
        order = (COPIES, RANGE) if step % 2 else (RANGE, COPIES)
        for kind in order:
            choose(kind)
            begun = time.perf_counter()
            kept = layers[kind].update_and_fetch(k, v)
            mx.eval(layers[kind].attend(q, *kept, scale=WIDTH**-0.5))
            taken[kind].append(time.perf_counter() - begun)
    return taken


def growth_in_time(args: argparse.Namespace) -> Iterator[Figure]:
    """How steps compare with those around them."""
    lives = [steps_in_turn(args) for _ in range(args.repeats)]
    for kind in (RANGE, COPIES):
        # Of several lives the fastest step each, since other programs disturb some.
        seconds = [min(same) for same in zip(*(life[kind] for life in lives), strict=True)]
        ratios = []
        for i in range(BESIDE, len(seconds) - BESIDE):
            beside = statistics.median(seconds[i - BESIDE : i + BESIDE + 1])
            ratios.append(seconds[i] / beside)
        slow = sum(ratio > 2 for ratio in ratios) / len(ratios)
        # A token takes the first slot beyond those allocated.
        growing = [ratios[i - BESIDE] for i in range(len(seconds)) if _grows(i, len(seconds))]
        others = [r for i, r in enumerate(ratios, BESIDE) if not _grows(i, len(seconds))]
        yield Figure(kind, "steps above 2 times the median around them", f"{slow:.2%}")
        slow_growing = sum(ratio > 2 for ratio in growing) / len(growing)
        name = f"of the steps that begin {GROWTH_STEP} slots, above 2 times"
        yield Figure(kind, name, f"{slow_growing:.1%}")
        yield Figure(kind, "the median of those", f"{statistics.median(growing):.2f}")
        yield Figure(kind, "the median of the others", f"{statistics.median(others):.2f}")


def _grows(step: int, steps: int) -> bool:
    return step % GROWTH_STEP == 0 and BESIDE <= step < steps - BESIDE


def growth_in_memory(kind: str, args: argparse.Namespace) -> Iterator[Figure]:
    """A store that takes rows until it has all tokens."""
    store = SlotStore([args.tokens] * STORED_HEADS, in_range=True)
    drawn = mx.random.normal((1, STORED_HEADS, ROWS, STORED_WIDTH))
    positions = mx.zeros((1, STORED_HEADS, ROWS), mx.int32)
    mx.eval(drawn, positions)
    before, most = resident(), 0
    for _ in range(args.tokens // 2 // ROWS):
        store.append({"keys": drawn, "values": drawn, "positions": positions})
        mx.eval(list(store.fields.values()))
        most = max(most, resident() - before)
    held = resident() - before
    yield Figure(kind, "growth to half of the slots: held over told", f"{held / store.nbytes:.3f}")
    yield Figure(kind, "the most resident over what is held", f"{most / held:.3f}")


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
        full, before = resident() - empty, told(cache)
        begun = time.perf_counter()
        mlx_h2o.resize(cache, args.prompt // 16)
        took.append(time.perf_counter() - begun)
        back.append((full - (resident() - empty)) / (before - told(cache)))
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
    alone, of_prefix = resident() - empty, told(prefix)
    sessions = [copy.deepcopy(prefix) for _ in range(args.sessions)]
    begun = time.perf_counter()
    for session in sessions:
        decode(model, session, 1)
    first = time.perf_counter() - begun
    for session in sessions:
        decode(model, session, GONE_ON - 1)
    give_back()
    own = args.sessions * of_prefix * GONE_ON / args.prefix
    held = resident() - empty
    yield Figure(kind, f"a prefix of {args.prefix} tokens, MiB", f"{alone / MIB:.0f}")
    name = f"{args.sessions} sessions with it, {GONE_ON} tokens later, MiB"
    yield Figure(kind, name, f"{held / MIB:.0f}")
    yield Figure(kind, "without their own tokens, in prefixes", f"{(held - own) / alone:.2f}")
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
    return [Figure(**found) for found in json.loads(done.stdout.splitlines()[-1])]


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
        found: list[Any] = [asdict(figure) for figure in measured(args)]
        print(json.dumps(found))
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
