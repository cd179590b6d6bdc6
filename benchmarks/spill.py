"""What a file of all rows costs a decode step, and what it writes.

    python -m benchmarks.spill

Three conversations of the same tokens decode in turns of so many steps: without a file of their
rows, with one, and with one from which evicted rows come back. Ratios are to the first.
Milliseconds are wall time over steps;
"processor" is the ratio of the process's own time, all threads with the file's included, which
others on the machine disturb less. Ratios are medians of the turns' ratios, with their quartiles.
Bytes are those of the file; for a model that is not here they are computed from its shape.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import (
    Returns,
    Spill,
    load,
    load_prompt_cache,
    make_prompt_cache,
    resume,
    save_prompt_cache,
)
from mlx_h2o._utils.blas import use_openblas
from mlx_h2o.caches.conversation import way_into_file
from mlx_h2o.spill.layout import LayerForm, Layout
from mlx_h2o.spill.page_digests import PAGE
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.state_record import paths_of

#: Settings of the arms: the dtype's own rows, and packed ones.
ARMS: dict[str, dict[str, Any]] = {"dense": {}, "8 bits": {"bits": 8}, "6 bits": {"bits": 6}}
#: Llama-3-8B: layers, KV heads, width of a head.
LLAMA = (32, 8, 128)
GROUP = 64
#: Tokens of a chunk, and lines of the table, of a long conversation.
CHUNK, LINES = 256, 10
COLUMNS = (
    *("model", "rows", "ms a step", "with a file", "processor"),
    *("rows come back", "processor", "bytes a token"),
)


COLD_COLUMNS = (
    *("model", "file MiB", "ms a step", "dropped from the page cache"),
    *("KiB read a step", "KiB read, dropped"),
)
OPEN_COLUMNS = (
    *("model", "tokens", "prompt cache MiB", "file of rows MiB", "records MiB"),
    *("opened, processor ms", "resumed, processor ms"),
)


def decode(model: nn.Module, cache: list[Any], token: mx.array, steps: int) -> mx.array:
    """Greedy decoding with one token of look-ahead, as mlx-lm's; the next token."""
    for _ in range(steps):
        after = model(token[:, None], cache=cache)[:, -1].argmax(axis=-1)
        mx.async_eval(after)
        mx.eval(token)
        token = after
    mx.eval(token)
    return token


def paired(
    model: nn.Module, settings: dict[str, Any], args: argparse.Namespace, folder: Path
) -> tuple[list[list[float]], list[list[float]], float]:
    """Milliseconds a step and processor milliseconds of each turn, and the file's bytes a token.

    Both lists have three lists: without a file, with one, and with rows that come back from it.
    """
    arms: list[list[Any]] = []
    for spill in (None, Spill(folder, returns=None), Spill(folder)):
        cache: list[Any] = make_prompt_cache(model, args.slots, spill=spill, **settings)
        prompt = mx.random.randint(0, 1000, (1, args.prompt), key=mx.random.key(0))
        token = model(prompt, cache=cache)[:, -1].argmax(axis=-1)
        arms.append([cache, decode(model, cache, token, 2 * args.steps)])
    times: list[list[float]] = [[], [], []]
    own: list[list[float]] = [[], [], []]
    for turn in range(args.turns):
        for i in (0, 1, 2) if turn % 2 else (2, 1, 0):
            start, used = time.perf_counter(), time.process_time()
            arms[i][1] = decode(model, arms[i][0], arms[i][1], args.steps)
            times[i].append((time.perf_counter() - start) / args.steps * 1e3)
            own[i].append((time.process_time() - used) / args.steps * 1e3)
    file = file_of(arms[1][0])
    if not file.flush():
        raise SystemExit(f"The file failed: {file.failure}")
    if not any(entry.back.returned for entry in arms[2][0] if entry.back is not None):
        raise SystemExit("No row came back: make --prompt longer.")
    return times, own, file.layout.block_bytes / file.layout.positions


def file_of(cache: list[Any]) -> RowFile:
    """The file of a conversation, which has not failed."""
    way = way_into_file(cache)
    if way is None or way.failure or way.conversation.file is None:
        raise SystemExit(f"The file failed: {way.failure if way else 'no layer has one'}")
    return way.conversation.file


def long_conversation(name: str, slots: int, tokens: int, folder: Path) -> None:
    """Print what a conversation of so many tokens holds in memory and in its file, as it grows."""
    model, _ = load(name)
    cache: list[Any] = make_prompt_cache(model, slots, bits=6, spill=Spill(folder))
    text = mx.random.randint(0, 1000, (1, CHUNK), key=mx.random.key(0))
    columns = "tokens | resident MiB | told MiB | file MiB | file bytes a token | rows read a token"
    print(f"| {columns} |\n|{'---:|' * 6}")
    shown = tokens // LINES
    for done in range(CHUNK, tokens + 1, CHUNK):
        mx.eval(model(text, cache=cache)[:, -1])
        text = (text + 7) % 1000  # so that no two chunks are alike
        if done % shown < CHUNK:
            file = file_of(cache)
            held, told = resident(), sum(entry.nbytes for entry in cache)
            read = sum(entry.back.rows_read for entry in cache if entry.back is not None)
            sizes = [f"{size / 2**20:.1f}" for size in (held, told, file.file_bytes)]
            cells = [f"{done:,}", *sizes, f"{file.file_bytes / done:,.0f}", f"{read / done:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def cold(name: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """A table's line: steps with the file in the system's page cache, and dropped from it.

    Turns of one conversation are by turns of either kind, each with as many returns.
    """
    model, _ = load(name)
    cache: list[Any] = make_prompt_cache(model, args.slots, bits=6, spill=Spill(folder))
    prompt = mx.random.randint(0, 1000, (1, args.prompt), key=mx.random.key(0))
    for first in range(0, args.prompt, CHUNK):
        logits = model(prompt[:, first : first + CHUNK], cache=cache)[:, -1]
        mx.eval(logits)
    token = decode(model, cache, logits.argmax(axis=-1), 2 * args.steps)
    file = file_of(cache)
    times: list[list[float]] = [[], []]
    read = [0, 0]
    for turn in range(2 * args.turns):
        arm = (turn + turn // 2) % 2  # warm cold, cold warm, ...
        if not file.flush():
            raise SystemExit(f"The file failed: {file.failure}")
        if arm:
            drop(file)
        start, before = time.perf_counter(), read_from_disk()
        token = decode(model, cache, token, args.steps)
        times[arm].append((time.perf_counter() - start) / args.steps * 1e3)
        read[arm] += read_from_disk() - before
    if not sum(entry.back.rows_read for entry in cache if entry.back is not None):
        raise SystemExit("No row was read: make --prompt longer.")
    kib = [f"{size / args.turns / args.steps / 1024:.1f}" for size in read]
    warm = f"{statistics.median(times[0]):.2f}"
    return [name, f"{file.file_bytes / 2**20:.1f}", warm, ratio_of(times, 1), *kib]


def drop(file: RowFile) -> None:
    """Have the system forget what it has of a file's pages; mapped pages would stay."""
    file._unmap()
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_from_disk() -> int:
    """Bytes that this process has had read from disks."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["read_bytes"])


def opened(name: str, tokens: int, args: argparse.Namespace, folder: Path) -> list[str]:
    """A table's line: processor time to open a conversation, as a prompt cache and as its file."""
    model, _ = load(name)
    cache: list[Any] = make_prompt_cache(model, args.slots, bits=6, spill=Spill(folder, keep=True))
    text = mx.random.randint(0, 1000, (1, CHUNK), key=mx.random.key(0))
    for _ in range(0, tokens, CHUNK):
        mx.eval(model(text, cache=cache)[:, -1])
        text = (text + 7) % 1000
    saved = folder / "saved"
    save_prompt_cache(saved, cache)
    conversation = cache[0].spill.conversation
    if not conversation.record([entry.spill for entry in cache]):
        raise SystemExit(f"No record was written: {conversation.failure}")
    path, size = conversation.file.path, conversation.file.file_bytes
    conversation.close()
    records = sum(one.stat().st_size for one in paths_of(path) if one.exists())
    times: list[list[float]] = [[], []]
    for _ in range(args.turns):
        for arm in (0, 1):
            start = time.process_time()  # of all threads; the files are in the page cache
            again: Any = resume(path) if arm else load_prompt_cache(saved)
            mx.eval([entry.state[0] for entry in again])
            times[arm].append((time.process_time() - start) * 1e3)
            if again[0].offset < tokens:
                raise SystemExit("Not all tokens are known.")
            if arm:
                again[0].spill.conversation.close()
            del again
    sizes = [f"{one / 2**20:.2f}" for one in (saved.stat().st_size, size, records)]
    return [name, f"{tokens:,}", *sizes, *(f"{statistics.median(of):.0f}" for of in times)]


def resident() -> int:
    """Bytes of memory that are the process's own; pages of mapped files can be dropped."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("The system does not tell what is resident.")


def ratio_of(times: list[list[float]], arm: int) -> str:
    """The median of the turns' ratios of an arm to the first, with the quartiles."""
    ratios = sorted(b / a for a, b in zip(times[0], times[arm], strict=True))
    quarter = len(ratios) // 4
    low, high = ratios[quarter], ratios[-1 - quarter]
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def parser() -> argparse.ArgumentParser:
    """What understands the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--models", nargs="+", default=["builtin:recall-4m", "smollm2-135m"])
    made.add_argument("--slots", type=int, default=256)
    made.add_argument("--prompt", type=int, default=300, help="tokens before the first turn")
    made.add_argument("--steps", type=int, default=32, help="steps of a turn")
    made.add_argument("--turns", type=int, default=40)
    made.add_argument("--long", type=int, help="tokens of one conversation, instead of timings")
    made.add_argument("--cold", action="store_true", help="with the file's pages dropped, instead")
    made.add_argument("--open", type=int, nargs="+", help="open so long conversations, instead")
    made.add_argument("--computed", action="store_true", help="what Llama-3-8B reads, instead")
    made.add_argument("--folder", type=Path, help="where the files lie (default: temporary)")
    return made


def main() -> None:
    """Print the tables."""
    args = parser().parse_args()
    use_openblas()
    if args.long:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            long_conversation(args.models[0], args.slots, args.long, Path(folder))
        return
    if args.computed:
        print_llama_reads()
        return
    if args.cold or args.open:
        columns = OPEN_COLUMNS if args.open else COLD_COLUMNS
        print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
        for name in args.models:
            for tokens in args.open or [0]:
                with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                    if args.open:
                        cells = opened(name, tokens, args, Path(folder))
                    else:
                        cells = cold(name, args, Path(folder))
                print(f"| {' | '.join(cells)} |", flush=True)
        return
    print(f"{args.slots} slots, {args.turns} turns of {args.steps} steps\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}")
    for name in args.models:
        model, _ = load(name)
        for arm, settings in ARMS.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                times, own, size = paired(model, settings, args, Path(folder))
            ratios = [ratio_of(of, i) for i in (1, 2) for of in (times, own)]
            alone = f"{statistics.median(times[0]):.2f}"
            cells = [name, arm, alone, *ratios, f"{size:,.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nComputed for Llama-3-8B: {LLAMA[0]} layers, {LLAMA[1]} KV heads of {LLAMA[2]}\n")
    print("| rows | bytes a token | MB/s at 50 tokens/s | GB of 100,000 tokens |")
    print("|---|---:|---:|---:|")
    for rows, bits in (("16 bits", 16), ("8 bits", 8), ("6 bits", 6), ("4 bits", 4)):
        size = llama_bytes(bits)
        print(f"| {rows} | {size:,.0f} | {size * 50 / 1e6:.1f} | {size / 1e4:.1f} |")


def print_llama_reads() -> None:
    """Print what returns read for Llama-3-8B where all of its KV heads ask, by the defaults.

    Rows are read as whole segments of a block with its record; digests are 16-bit means of pages.
    """
    layers, heads, width = LLAMA
    usual, tokens = Returns(), 100_000
    digests = layers * heads * tokens / PAGE * width * 2
    print("| rows | MB written a second | MB of rows read a second | MB of digests read a second |")
    print("|---|---:|---:|---:|")
    for rows, bits in (("16 bits", 16), ("8 bits", 8), ("6 bits", 6), ("4 bits", 4)):
        layout = llama_layout(bits)
        # Pages and as many behind them; records are read once a segment.
        _, segment = layout.segment(0, 0)
        read = 2 * usual.pages * layers * heads * (segment + layout.record_bytes)
        a_second = 50 / usual.every / 1e6
        written = layout.block_bytes / layout.positions * 50 / 1e6
        print(f"| {rows} | {written:.1f} | {read * a_second:.0f} | {digests * a_second:.0f} |")


def llama_bytes(bits: int) -> float:
    """Bytes a token of a file of Llama-3-8B's rows."""
    layout = llama_layout(bits)
    return layout.block_bytes / layout.positions


def llama_layout(bits: int) -> Layout:
    """The layout of a file of Llama-3-8B's rows."""
    layers, heads, width = LLAMA
    fields: dict[str, tuple[str, int]] = {}
    for name in ("keys", "values"):
        if bits == 16:
            fields[name] = ("float16", width)
        else:
            fields[name] = ("uint32", width * bits // 32)
            fields |= {
                f"{name}.{part}": ("float16", width // GROUP) for part in ("scales", "biases")
            }
    return Layout((LayerForm.of(heads, fields),) * layers)


if __name__ == "__main__":
    main()
