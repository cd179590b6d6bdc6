"""Which decode steps are fused, and by which decoder: the default device's."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.attention.backends.decoder import Decoder, DecodeStep, Lent, PlannedToken
from mlx_h2o.attention.backends.gpu_decoder import GPUDecoder
from mlx_h2o.attention.backends.self_check_variants import Proof
from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.settings import CacheSettings

# Most query heads of one KV head in a kernel call (kMaxRows in kernels.h).
MOST_QUERY_HEADS = 32


def accepts(
    settings: CacheSettings, call: AttentionCall, k: mx.array, v: mx.array, proof: Proof
) -> bool:
    """Whether the default device has a fused step for this call; else it goes op by op.

    Args:
        settings: The layer's settings.
        call: The call's queries and mask.
        k: `[B, Hk, L, D]`, the new keys.
        v: `[B, Hk, L, Dv]`, the new values.
        proof: The function that compares small steps like these with the definition, if this GPU
            has not done so yet.
    """
    one_token = k.shape[2] == 1 and call.mask is None and not call.softcap
    if not one_token or k.dtype != v.dtype or settings.rope is not None:
        return False
    if settings.ranks > 1 and settings.policy.unit == "layer":
        return False  # kernels have only this rank's heads
    if call.q.shape[1] > MOST_QUERY_HEADS * k.shape[1]:
        return False
    gpu = choice.gpu()
    if gpu is not None:
        # Only the CPU kernel handles two kinds of rows in one step.
        return settings.packing.recent_bits is None and gpu.can_decode(settings, call, k, v, proof)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return on_cpu and settings.kernel_policy is not None and choice.backend() is not reference


def step_together(
    decoders: Sequence[Decoder],
    tokens: Sequence[PlannedToken],
    call: AttentionCall,
    k: mx.array,
    v: mx.array,
) -> mx.array:
    """One token in each of several layers, whose decoders belong to one device.

    Args:
        decoders: The decoders that hold the layers, of one sequence each.
        tokens: The tokens' plans.
        call: Queries `[B, Hq, 1, D]`, one sequence for each layer.
        k: `[B, H, 1, D]`.
        v: `[B, H, 1, Dv]`.

    Returns:
        `[B, Hq, 1, Dv]`.
    """
    if choice.gpu() is None and not any(token.before for token in tokens):
        from mlx_h2o.attention.backends.cpu_decoder import CPUDecoder

        of_cpu = [decoder for decoder in decoders if isinstance(decoder, CPUDecoder)]
        return CPUDecoder.step_together(of_cpu, tokens, call.q, k, v, call.scale, call.sinks)
    q, k, v = (mx.split(rows, len(decoders)) for rows in (call.q, k, v))
    outs = [
        decoder.step(DecodeStep(q[i], k[i], v[i], call.scale, call.sinks, token))
        for i, (decoder, token) in enumerate(zip(decoders, tokens, strict=True))
    ]
    return mx.concatenate(outs, axis=0)


def fits_device(decoder: Decoder) -> bool:
    """Whether a decoder is the default device's."""
    return isinstance(decoder, GPUDecoder) == (choice.gpu() is not None)


def decoder_for(lent: Lent, settings: CacheSettings) -> Decoder:
    """Give a layer's arrays to the kernels of the default device."""
    gpu = choice.gpu()
    if gpu is not None:
        return gpu.decoder(lent, settings)
    from mlx_h2o.attention.backends.cpu_decoder import CPUDecoder  # the extension may be missing

    return CPUDecoder(lent, settings)
