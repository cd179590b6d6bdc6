"""Random-weight models of many families, and single layers, small enough for a test."""

import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from mlx_h2o import H2OKVCache

VOCABULARY = 128

COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
}

# What each family's ModelArgs wants beyond (or instead of) the common fields.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON
    | {
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    # Two sliding layers to each full one, and a window that a test's prompt exceeds.
    "gemma3_text": COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": COMMON
    | {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
    },
    "deepseek_v3": COMMON
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "rope_scaling": None,
    },
    "qwen3_next": COMMON
    | {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "head_dim": 16,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
    },
    "gemma2": COMMON | {"head_dim": 16, "query_pre_attn_scalar": 16.0},
    # Every other layer attends block-sparsely by hand; the others ask mlx-lm to.
    "phi3small": COMMON
    | {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 64,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "mup_embedding_multiplier": 1.0,
        "mup_width_multiplier": 1.0,
        "blocksparse_block_size": 32,
    },
    "plamo2": COMMON
    | {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 12,
        "mamba_num_heads": 4,
        "mamba_d_state": 8,
        "mamba_step": 2,
    },
}

# Of such a name: the family, but with attention of its own that this library does not know.
BY_ITSELF = "_by_itself"
FAMILIES |= {f"gemma2{BY_ITSELF}": FAMILIES["gemma2"]}

# Which layers of a family hold a plain KV cache (all of them where not listed).
BOUNDED_LAYERS = {"gemma3_text": [1, 3], "gpt_oss": [1, 3], "qwen3_next": [1, 3], "plamo2": [1, 3]}


def bounded_layers(family: str) -> list[int]:
    """Places in the cache list whose memory grows without this library."""
    layers = FAMILIES[family]["num_hidden_layers"]
    return BOUNDED_LAYERS.get(family, list(range(layers)))


def tiny_model(
    family: str, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes: Any
) -> nn.Module:
    """A model of mlx-lm with random weights, the same ones for the same seed."""
    name = family.removesuffix(BY_ITSELF)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    args = module.ModelArgs.from_dict({"model_type": name, **FAMILIES[family], **changes})
    mx.random.seed(seed)  # Biases and the like stay as the model's own constructor draws them.
    model = with_random_weights(module.Model(args), seed, dtype)
    return model if name == family else attending_by_itself(model)


def attending_by_itself(model: nn.Module) -> nn.Module:
    """The model, its attention a class of one's own that computes what mlx-lm's does."""
    for _, module in model.named_modules():
        known = type(module)
        if known.__name__ == "Attention":
            own = {"__call__": inspect.unwrap(known.__call__)}
            module.__class__ = type("Attention", (known,), own)
    return model


def with_random_weights(model: nn.Module, seed: int = 0, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The model, with weights that make every layer matter; the same ones for the same seed."""
    keys = mx.random.key(seed)

    def drawn(path: str, weight: mx.array) -> mx.array:
        nonlocal keys
        if weight.dtype == mx.uint32 or (weight.ndim < 2 and not path.endswith("sinks")):
            return weight
        keys, key = mx.random.split(keys)
        # Large layers and small embeddings: otherwise the residual stream echoes the last token.
        deviation = 2.0 * weight.shape[-1] ** -0.5
        if "embed_tokens" in path:
            deviation = 0.05
        elif "conv1d" in path:
            deviation = 0.5
        elif path.endswith("sinks"):
            deviation = 1.0
        return deviation * mx.random.normal(weight.shape, key=key)

    model.update(tree_map_with_path(drawn, model.parameters()))
    model.set_dtype(dtype)
    if hasattr(model, "_dummy_tokenizer_ids"):
        # phi3small masks token ids of its own tokenizer, far outside this vocabulary.
        model._dummy_tokenizer_ids = mx.array([VOCABULARY - 1])
    model.eval()
    mx.eval(model.parameters())
    return model


class Characters:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids below 95, of which models of `FAMILIES` have all."""
        return [ord(c) % 90 + 5 for c in text]


def prompt_tokens(count: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    return mx.random.randint(0, VOCABULARY, (count,), key=mx.random.key(seed)).tolist()


def prefill(model: nn.Module, cache: list[Any], tokens: Sequence[int], chunk: int) -> mx.array:
    """Feed tokens in chunks; the logits of the last one, `[V]`."""
    logits = mx.zeros(VOCABULARY)
    for start in range(0, len(tokens), chunk):
        logits = model(mx.array([tokens[start : start + chunk]]), cache=cache)[0, -1]
        mx.eval(logits)
    return logits


def greedy_steps(
    model: nn.Module, cache: list[Any], logits: mx.array, steps: int
) -> Iterator[tuple[int, mx.array]]:
    """Decode greedily from the last token's logits: each token with the logits that follow it."""
    for _ in range(steps):
        token = mx.argmax(logits).item()
        logits = model(mx.array([[token]]), cache=cache)[0, -1]
        mx.eval(logits)
        yield token, logits


def greedy_tokens(
    model: nn.Module, cache: list[Any], tokens: Sequence[int], steps: int, chunk: int = 7
) -> list[int]:
    """Prefill in chunks, then decode greedily."""
    logits = prefill(model, cache, tokens, chunk)
    return [token for token, _ in greedy_steps(model, cache, logits, steps)]


@dataclass(frozen=True)
class TinyLayer:
    """One attention layer without a model: what it asks and stores at each position is fixed.

    Attributes:
        heads: Hk.
        group: G.
        key_width: D.
        value_width: Dv.
        batch: B.
        dtype: Of queries, keys and values.
        seed: Layers with other seeds see other tokens.
        length: Positions there are.
    """

    heads: int = 2
    group: int = 2
    key_width: int = 8
    value_width: int = 6
    batch: int = 1
    dtype: mx.Dtype = mx.float32
    seed: int = 0
    length: int = 512

    @property
    def scale(self) -> float:
        return self.key_width**-0.5

    @cached_property
    def tokens(self) -> tuple[mx.array, mx.array, mx.array]:
        """Queries `[B, Hq, T, D]`, keys `[B, Hk, T, D]`, values `[B, Hk, T, Dv]` of all T."""
        keys = mx.random.split(mx.random.key(self.seed), 3)
        B, H, T, D = self.batch, self.heads, self.length, self.key_width
        shapes = (B, H * self.group, T, D), (B, H, T, D), (B, H, T, self.value_width)
        # Sharper than chance, so that tokens receive very different masses.
        drawn = (
            1.5 * mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)
        )
        rows = tuple(x.astype(self.dtype) for x in drawn)
        mx.eval(rows)
        return rows

    def at(self, first: int, count: int = 1) -> tuple[mx.array, mx.array, mx.array]:
        """Queries, keys and values of `count` positions."""
        return tuple(x[:, :, first : first + count] for x in self.tokens)

    def feed(self, cache: Any, count: int, chunk: int = 1, first: int | None = None) -> mx.array:
        """Send the next `count` tokens through a cache as a model would; their outputs.

        Args:
            cache: Any cache with mlx-lm's protocol.
            count: How many tokens.
            chunk: Tokens at a time.
            first: Which tokens of this layer; those at the cache's own position if not given.
        """
        first = cache.offset if first is None else first
        outs = []
        for start in range(first, first + count, chunk):
            q, k, v = self.at(start, min(chunk, first + count - start))
            mask = cache.make_mask(q.shape[2], return_array=False, window_size=None)
            k, v = cache.update_and_fetch(k, v)
            attend = cache.attend if getattr(cache, "attending", False) else stock_attention
            outs.append(attend(q, k, v, scale=self.scale, mask=mask))
            mx.eval(outs[-1])
        return mx.concatenate(outs, axis=2)


stock_attention = mx.fast.scaled_dot_product_attention


def kept_positions(cache: H2OKVCache) -> list[list[int]]:
    """Logical positions held by each KV head of the first sequence, ascending."""
    return [
        sorted(head) for run in cache.store.runs for head in cache.slots(run).positions[0].tolist()
    ]
