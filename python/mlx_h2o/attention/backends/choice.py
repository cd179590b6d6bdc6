"""The choice of kernels, for attention and for fused steps: those of the default device at the time
of the call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_h2o.attention.backends import reference
from mlx_h2o.attention.backends.decoder import Decoder, DecodeStep, Lent, TokenPlan
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings
from mlx_h2o.loading.tested_versions import is_newer, warn_if_newer
from mlx_h2o.slots import reserved_range
from mlx_h2o.slots.packed import PackedRows

if TYPE_CHECKING:
    from mlx_h2o.attention.backends.gpu import Gpu
    from mlx_h2o.attention.backends.self_check_variants import Proof

# Most query heads of one KV head in a kernel call (kMaxRows in kernels.h).
MOST_QUERY_HEADS = 32

_reference_only = False


@contextmanager
def only_reference(on: mx.Device | None = None) -> Iterator[None]:
    """Within this context the definition computes everything, on a device: the CPU by default."""
    global _reference_only
    before, device = _reference_only, mx.default_device()
    _reference_only = True
    mx.set_default_device(on or mx.Device(mx.cpu))
    try:
        yield
    finally:
        _reference_only = before
        mx.set_default_device(device)


def backend() -> ModuleType | Gpu:
    """The backend whose functions compute on the default device."""
    if _reference_only:
        return reference
    if mx.default_device().type == mx.DeviceType.cpu:
        return cpu() or reference
    return gpu() or reference


def pack(rows: mx.array, bits: int, group_size: int) -> PackedRows:
    """See `PackedRows.of`; the result is the same bit for bit on every backend."""
    packed: PackedRows = backend().pack(rows, bits, group_size)
    return packed


def has_ranges() -> bool:
    """Whether slots can lie in reserved ranges: where the CPU's kernels compute."""
    chosen = backend()
    return chosen is not reference and chosen is cpu() and reserved_range.is_available()


def gpu() -> Gpu | None:
    """The kernels of the GPU that is the default device, or None."""
    if _reference_only or mx.default_device().type != mx.DeviceType.gpu:
        return None
    from mlx_h2o.attention.backends.gpu import CUDA, METAL  # takes long to load

    return METAL if mx.metal.is_available() else CUDA


@functools.cache
def cpu() -> ModuleType | None:
    """The compiled CPU kernels, or None; the reason is told once."""
    try:
        from mlx_h2o.attention.backends import cpu as module
    except ImportError as error:
        warn_if_newer("mlx")
        if is_newer("mlx"):
            return None
        warnings.warn(
            f"mlx-h2o runs on its reference backend, which is right and slow: {error}. To build "
            "the CPU kernels, install a C++20 compiler and reinstall with "
            "`pip install --force-reinstall --no-deps mlx-h2o`.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    return module


def accepts(
    settings: CacheSettings, call: AttentionCall, k: mx.array, v: mx.array, proof: Proof
) -> bool:
    """Whether the default device has fused steps for this call; else it goes op by op.

    Args:
        settings: The layer's settings.
        call: The call's queries and mask; each query attends to the rows before it and its own.
        k: `[B, Hk, L, D]`, the new keys.
        v: `[B, Hk, L, Dv]`, the new values.
        proof: The function that compares small steps like these with the definition, if this GPU
            has not done so yet.
    """
    one_by_one = call.mask is None and not call.softcap
    if not one_by_one or k.dtype != v.dtype or settings.rope is not None:
        return False
    if settings.ranks > 1 and settings.policy.unit == "layer":
        return False  # kernels have only this rank's heads
    if call.q.shape[1] > MOST_QUERY_HEADS * k.shape[1]:
        return False
    of_gpu = gpu()
    if of_gpu is not None:
        # Only the CPU kernel handles several tokens at once, or two kinds of rows.
        cpus_alone = k.shape[2] > 1 or settings.packing.recent_bits is not None
        return not cpus_alone and of_gpu.can_decode(settings, call, k, v, proof)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and settings.kernel_policy is not None and backend() is not reference


def step_together(
    decoders: Sequence[Decoder],
    tokens: Sequence[Sequence[TokenPlan]],
    call: AttentionCall,
    k: mx.array,
    v: mx.array,
) -> mx.array:
    """One token in each of several layers, whose decoders belong to one device.

    Args:
        decoders: The decoders that hold the layers, of one sequence each.
        tokens: Each layer's plan for its token, in a sequence of one.
        call: Queries `[B, Hq, 1, D]`, one sequence for each layer.
        k: `[B, H, 1, D]`.
        v: `[B, H, 1, Dv]`.

    Returns:
        `[B, Hq, 1, Dv]`.
    """
    if gpu() is None:
        from mlx_h2o.attention.backends.cpu_decoder import CPUDecoder

        of_cpu = [decoder for decoder in decoders if isinstance(decoder, CPUDecoder)]
        return CPUDecoder.step_together(of_cpu, tokens, call.q, k, v, call.scale, call.sinks)
    q, k, v = (mx.split(rows, len(decoders)) for rows in (call.q, k, v))
    outs = [
        decoder.step(DecodeStep(q[i], k[i], v[i], call.scale, call.sinks, of_layer))
        for i, (decoder, of_layer) in enumerate(zip(decoders, tokens, strict=True))
    ]
    return mx.concatenate(outs, axis=0)


def is_on_device(decoder: Decoder) -> bool:
    """Whether a decoder is the default device's."""
    return decoder.on_gpu == (gpu() is not None)


def decoder_for(lent: Lent, settings: CacheSettings) -> Decoder:
    """Give a layer's arrays to the kernels of the default device."""
    of_gpu = gpu()
    if of_gpu is not None:
        return of_gpu.decoder(lent, settings)
    from mlx_h2o.attention.backends.cpu_decoder import CPUDecoder  # the extension may be missing

    return CPUDecoder(lent, settings)
