"""A model's loss of perplexity with slots shared out by each of some profiles, and evenly.

Every layer reads whole samples: its matrices take all tokens at once, its bounded cache token by
token, by decode steps. That gives the results of decoding in a tenth of the processor time or less,
so that several samples are affordable: one sample does not tell two profiles apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_h2o
from mlx_h2o._utils.cache_lists import entries
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.bit_choice import USUAL_BITS
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_data import frames_for
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.cli.options import read_text
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits, caches_in_16_bits
from mlx_h2o.evaluate.perplexity import Perplexity, samples_of
from mlx_h2o.integration import routing
from mlx_h2o.integration.recorder import LookingCache, Watcher, full_attention, looked_through
from mlx_h2o.storage.key_scaling import Frame

UNIFORM = "uniform"


class Full(LookingCache):
    """A looking cache with full attention."""

    knows_softcap = True

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        return full_attention(call.q, keys, values, call.scale, call.sinks, call.softcap)


class Stepping(LookingCache):
    """Passes a text to a bounded cache token by token, except for the prefill, given at once."""

    knows_softcap = True

    def __init__(self, cache: BoundedKVCache, prefill: int):
        self.cache, self.prefill = cache, prefill

    def look(self, call: AttentionCall, keys: mx.array, values: mx.array) -> mx.array:
        outs, length, start = [], keys.shape[2], 0
        mx.eval(call.q, keys, values)
        for end in range(self.prefill, length + 1):
            rows = [x[:, :, start:end] for x in (call.q, keys, values)]
            given = self.cache.update_and_fetch(*rows[1:])
            mask = "causal" if end - start > 1 else None
            how = {"scale": call.scale, "mask": mask, "sinks": call.sinks}
            out = self.cache.attend(rows[0], *given, **how, softcap=call.softcap)
            mx.eval(out)
            outs.append(out)
            start = end
        return mx.concatenate(outs, axis=2)


def losses(
    model: nn.Module, samples: mx.array, prefill: int, caches: list[Any] | None
) -> Perplexity:
    """Nats per token of each sample after the prefill; with the full cache if `caches` is None."""
    bounded = [c for _, c in entries(caches or []) if isinstance(c, BoundedKVCache)]

    def looking(index: int) -> LookingCache:
        return Stepping(bounded[index], prefill) if caches else Full()

    logits = looked_through(model, samples, Watcher(), looking)
    each = []
    for i in range(samples.shape[0]):
        scored = logits[i, prefill - 1 : -1].astype(mx.float32)
        each.append(nn.losses.cross_entropy(scored, samples[i, prefill:]).mean().item())
    return Perplexity(each)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("profiles", nargs="+", help=f'profiles, or "{UNIFORM}"')
    options.add_argument(
        "--frames", type=Path, metavar="FILE",
        help="a profile whose frames even shares get too, in rows of the usual bits; without, "
        "frames are made",
    )  # fmt: skip
    options.add_argument("--model", required=True, help="as in mlx_h2o.load")
    options.add_argument("--text", type=Path, required=True)
    options.add_argument("--max-kv-size", type=int, nargs="+", default=[128], metavar="N")
    options.add_argument("--samples", type=int, default=4, metavar="N")
    options.add_argument("--tokens", type=int, default=1024, metavar="N")
    options.add_argument("--prefill", type=int, default=64, metavar="N")
    return options


def settings_of(name: str, size: int, args: argparse.Namespace) -> ModelSettings:
    """Settings of caches whose slots are shared out by a profile, or evenly."""
    if name != UNIFORM or not args.frames:
        return ModelSettings.of(size, budgets=name)
    measured = Profile.load(args.frames).measured
    of_layers = frames_for(measured.frames if measured else {}, args.tokens)
    frames = [Frame(mx.array(centre), mx.array(scale)) for centre, scale in of_layers]
    return ModelSettings.of(size, budgets=UNIFORM, bits=USUAL_BITS, frames=frames)


def main(arguments: Sequence[str]) -> int:
    """Print a line for each way to share out slots and each size, as soon as it is measured."""
    args = parser().parse_args(arguments)
    model, tokenizer = mlx_h2o.load(args.model)
    text = tokenizer.encode(read_text(args.text), add_special_tokens=False)
    samples = samples_of(text, args.samples, args.tokens, tokenizer.bos_token_id)
    routing.install()
    full = losses(model, samples, args.prefill, None)
    print(f"Full cache: perplexity {full.value:.2f}, {args.samples} x {args.tokens} tokens.\n")
    print(
        "| slots shared out by | tokens' bytes | loss | each sample | KV bytes | rows | seconds |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for size in args.max_kv_size:
        for name in args.profiles:
            begun = time.process_time()
            settings = settings_of(name, size, args)
            caches = caches_in_16_bits(model, settings, size, args.tokens)
            rows = str(
                next(c for _, c in entries(caches) if hasattr(c, "settings")).settings.packing
            )
            mine = losses(model, samples, args.prefill, caches)
            pairs = zip(mine.nll, full.nll, strict=True)
            each = " ".join(f"{100 * (m - f):+.2f}" for m, f in pairs)
            error = mine.error_against(full)
            within = f" ± {100 * error:.2f}" if error is not None else ""
            held = bytes_in_16_bits(caches) // args.samples
            spent = time.process_time() - begun
            loss = f"{100 * mine.loss_against(full):+.2f}{within} %"
            cells = (Path(name).name, size, loss, each, f"{held:,}", rows, f"{spent:.0f}")
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
