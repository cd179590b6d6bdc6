"""Memory held while a bounded layer reads a prompt and decodes: told, held, peak and resident."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

import mlx.core as mx

from mlx_h2o._utils.byte_size import size_text
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.doctor.arms import usual_dtype
from mlx_h2o.doctor.report import Begun, Section
from mlx_h2o.storage import reserved_range

HEADS, GROUP, WIDTH = 8, 4, 128
PROMPT, CHUNK, SLOTS, STEPS = 2048, 512, 1024, 32
# Over what a cache tells; half a megabyte is for what belongs to no cache.
MOST_OVER, LOOSE = 1.05, 1 << 19


def section(begun: Begun) -> None:
    """A layer with dense and with packed rows; `begun` takes the section."""
    size = f"{HEADS} KV heads, width {WIDTH}: {PROMPT} tokens into {SLOTS} slots"
    columns = ("rows", "told", "held", "held / told", "peak of the prompt")
    found = begun(Section("memory", f"memory of a layer of {size}", columns, data={}))
    for name, bits in (("as they come", None), ("8 bits", 8), ("4 bits", 4)):
        told, held, peak = layer(bits)
        found.rows.append(
            (name, size_text(told), size_text(held), f"{held / told:.3f}", size_text(peak))
        )
        found.data[name] = {"told": told, "held": held, "peak": peak}
        if held > MOST_OVER * told + LOOSE:
            found.failures.append(f"rows {name}: {held:,} bytes are held where {told:,} are told")
    own = {"resident": resident(), "most resident": most_resident()}
    found.data["process"] = own
    found.notes.append(
        "; ".join(f"{name}: {size_text(count)}" for name, count in own.items())
        + " (of the whole process, doctor's own measurements included)"
    )


def layer(bits: int | None) -> tuple[int, int, int]:
    """Bytes that a layer tells, that MLX holds for it, and at most during its prompt."""
    cache = H2OKVCache(SLOTS, bits=bits)

    def rows(length: int) -> list[mx.array]:
        heads = (HEADS * GROUP, HEADS, HEADS)
        drawn = [mx.random.normal((1, h, length, WIDTH)).astype(usual_dtype()) for h in heads]
        mx.eval(drawn)
        return drawn

    mx.clear_cache()
    before, in_ranges = mx.get_active_memory(), reserved_range.bytes_held()
    mx.reset_peak_memory()
    for start in range(PROMPT + STEPS):
        if start < PROMPT and start % CHUNK:
            continue
        q, k, v = rows(CHUNK if start < PROMPT else 1)
        kept = cache.update_and_fetch(k, v)
        mask = "causal" if start < PROMPT else None
        mx.eval(cache.attend(q, *kept, scale=WIDTH**-0.5, mask=mask))
        del q, k, v, kept
        if start < PROMPT:
            peak = mx.get_peak_memory() - before + reserved_range.bytes_held() - in_ranges
    held = mx.get_active_memory() - before + reserved_range.bytes_held() - in_ranges
    return cache.nbytes, held, peak


def resident() -> int:
    """Bytes of this process that are in memory now, or 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def most_resident() -> int:
    """The most that ever were."""
    kilobytes = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes
