"""What a file of all rows costs a decode step, and what it writes.

    python -m benchmarks.spill

Two conversations of the same tokens decode in turns of so many steps: without a file of their rows,
and with one from which evicted rows come back. Ratios are to the first.
Milliseconds are wall time over steps;
"processor" is the ratio of the process's own time, all threads with the file's included, which
others on the machine disturb less. Ratios are medians of the turns' ratios, with their quartiles.
Bytes are those of the file; for a model that is not here they are computed from its shape.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_h2o import Spill, load, make_prompt_cache
from mlx_h2o._blas import use_openblas
from mlx_h2o.spill.layout import POSITIONS, LayerForm
from mlx_h2o.spill.page_digests import PAGE
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import Returns

#: Settings of the arms: the dtype's own rows, and packed ones.
ARMS: dict[str, dict[str, Any]] = {"dense": {}, "8 bits": {"bits": 8}, "6 bits": {"bits": 6}}
#: Llama-3-8B: layers, KV heads, width of a head.
LLAMA = (32, 8, 128)
GROUP = 64
#: Tokens of a chunk, and lines of the table, of a long conversation.
CHUNK, LINES = 256, 10
COLUMNS = (*("model", "rows", "ms a step", "with a file", "processor", "bytes a token"),)


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

    Both lists have two lists: without a file, and with one.
    """
    arms: list[list[Any]] = []
    for spill in (None, Spill(folder)):
        cache: list[Any] = make_prompt_cache(model, args.slots, spill=spill, **settings)
        prompt = mx.random.randint(0, 1000, (1, args.prompt), key=mx.random.key(0))
        token = model(prompt, cache=cache)[:, -1].argmax(axis=-1)
        arms.append([cache, decode(model, cache, token, 2 * args.steps)])
    times: list[list[float]] = [[], []]
    own: list[list[float]] = [[], []]
    for turn in range(args.turns):
        for i in (0, 1) if turn % 2 else (1, 0):
            start, used = time.perf_counter(), time.process_time()
            arms[i][1] = decode(model, arms[i][0], arms[i][1], args.steps)
            times[i].append((time.perf_counter() - start) / args.steps * 1e3)
            own[i].append((time.process_time() - used) / args.steps * 1e3)
    file = file_of(arms[1][0])
    if not file.flush():
        raise SystemExit(f"The file failed: {file.failure}")
    if not any(entry.back.returned for entry in arms[1][0] if entry.back is not None):
        raise SystemExit("No row came back: make --prompt longer.")
    return times, own, file.layout.block_bytes / POSITIONS


def file_of(cache: list[Any]) -> RowFile:
    """The file of a conversation, which has not failed."""
    way = next(entry.spill for entry in cache if entry.spill is not None)
    if way.failure or way.conversation.file is None:
        raise SystemExit(f"The file failed: {way.failure}")
    file: RowFile = way.conversation.file
    return file


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
            in_memory, reported = resident(), sum(entry.nbytes for entry in cache)
            read = sum(entry.back.rows_read for entry in cache if entry.back is not None)
            sizes = [f"{size / 2**20:.1f}" for size in (in_memory, reported, file.file_bytes)]
            cells = [f"{done:,}", *sizes, f"{file.file_bytes / done:,.0f}", f"{read / done:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def resident() -> int:
    """Bytes of memory that are the process's own."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("The system does not tell what is resident.")


def ratio_of(times: list[list[float]]) -> str:
    """The median of the turns' ratios of the second arm to the first, with the quartiles."""
    ratios = sorted(b / a for a, b in zip(*times, strict=True))
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
    print(f"{args.slots} slots, {args.turns} turns of {args.steps} steps\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}")
    for name in args.models:
        model, _ = load(name)
        for arm, settings in ARMS.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                times, own, size = paired(model, settings, args, Path(folder))
            ratios = [ratio_of(of) for of in (times, own)]
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

    Rows are read as whole segments of a block; digests are 16-bit means of pages.
    """
    layers, heads, width = LLAMA
    usual, tokens = Returns(), 100_000
    digests = layers * heads * tokens / PAGE * width * 2
    print("| rows | MB written a second | MB of rows read a second | MB of digests read a second |")
    print("|---|---:|---:|---:|")
    for rows, bits in (("16 bits", 16), ("8 bits", 8), ("6 bits", 6), ("4 bits", 4)):
        # Pages and as many behind them.
        read = 2 * usual.pages * layers * heads * llama_form(bits).segment_bytes
        a_second = 50 / usual.every / 1e6
        written = llama_bytes(bits) * 50 / 1e6
        print(f"| {rows} | {written:.1f} | {read * a_second:.0f} | {digests * a_second:.0f} |")


def llama_bytes(bits: int) -> int:
    """Bytes a token of a file of Llama-3-8B's rows."""
    return LLAMA[0] * LLAMA[1] * llama_form(bits).row_bytes


def llama_form(bits: int) -> LayerForm:
    """The form of a layer's rows of Llama-3-8B."""
    _, heads, width = LLAMA
    fields: dict[str, tuple[str, int]] = {}
    for name in ("keys", "values"):
        if bits == 16:
            fields[name] = ("float16", width)
        else:
            fields[name] = ("uint32", width * bits // 32)
            fields |= {
                f"{name}.{part}": ("float16", width // GROUP) for part in ("scales", "biases")
            }
    return LayerForm.of(heads, fields)


if __name__ == "__main__":
    main()
