"""What bounded caches do with every model of mlx-lm: each is run, tiny and with random weights."""

import importlib
import pkgutil
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx_lm.models.cache import KVCache

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.latent import LatentKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from mlx_h2o.caches.shared import SharedKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.loaded import logits_of, restored
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.slots.key_scaling import Frame
from model_configs import VOCABULARY, config_of
from tiny_models import prompt_tokens, with_random_weights

# Slots that hold all of the first tokens, slots that do not, and tokens far beyond those.
ROOMY, SMALL, FAR = 200, 24, 400
BOUNDED, PARTLY, REFUSED, CONSTANT = "bounded", "partly", "refused", "of fixed size"
NOT_RUN = "not run"
# olmo looks for a package that only converts weights, and ends the process without it.
sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))
NO_METAL = "No Metal back-end"


@dataclass(frozen=True)
class Row:
    """What the table says of a model.

    Attributes:
        memory: "bounded", "partly", "refused", "of fixed size" without us, or "not run".
        how: Which layers, with what; or why not.
    """

    memory: str
    how: str


def model_names() -> list[str]:
    """Modules of `mlx_lm.models` that are models."""
    found = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__))
    return [name for name in found if hasattr(_module(name), "Model")]


def row_of(model: nn.Module) -> Row:
    """Run a model past its budget.

    Raises:
        AssertionError: It is not what mlx-lm's own caches give before anything is evicted, not
            bounded afterwards, or not sane.
    """
    if broken := _broken(model):
        return Row(NOT_RUN, broken)
    try:
        cache = make_prompt_cache(model, max_size=ROOMY)
    except NothingToBound:
        check_memory(model, stock_caches(model), 0)
        return Row(CONSTANT, _others(stock_caches(model)))
    except ValueError as error:
        return Row(REFUSED, str(error).partition(": leave")[0])
    check_like_stock(model, cache)
    cache = make_prompt_cache(model, max_size=SMALL)
    check_memory(model, cache, SMALL)
    grows = [line.layer for line in mlx_h2o.describe(cache) if not line.bounded]
    how = "; ".join(filter(None, [_bounded(cache), _others(cache)]))
    return Row(PARTLY if grows else BOUNDED, how)


def coverage_model(name: str, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The tiny model of a module."""
    module = _module(name)
    mx.random.seed(0)
    with fit_for_tests(name):
        model = module.Model(module.ModelArgs.from_dict(config_of(name)))
    return with_random_weights(model, dtype=dtype)


@contextmanager
def fit_for_tests(name: str) -> Iterator[None]:
    """Let a module make models that run here, tiny: without Metal, with a small vocabulary."""
    module = _module(name)
    if hasattr(module, "BitLinear"):  # bitnet's is a Metal kernel, and nothing that attention sees
        with mock.patch.object(module, "BitLinear", nn.Linear):
            yield
    elif name == "phi3small":  # it masks tokens of its own vocabulary, far outside this one
        made = module.Model.__init__

        def make(model: nn.Module, arguments: Any) -> None:
            made(model, arguments)
            model._dummy_tokenizer_ids = mx.array([VOCABULARY - 1])

        with mock.patch.object(module.Model, "__init__", make):
            yield
    else:
        yield


def check_like_stock(model: nn.Module, cache: list[Any]) -> None:
    """While nothing is evicted the logits are those of mlx-lm's own caches."""
    for step, worst in enumerate(off_stock(model, cache)):
        assert worst < 1e-3, f"step {step}: logits differ from mlx-lm's own by {worst:.1e}"


def off_stock(model: nn.Module, cache: list[Any]) -> list[float]:
    """By what part of the largest logit each step differs from mlx-lm's own caches."""
    tokens = prompt_tokens(32)
    own = list(fed(model, stock_caches(model), tokens, [7] * 3 + [1] * 11))
    ours = list(fed(model, cache, tokens, [7] * 3 + [1] * 11))
    off = []
    for expected, logits in zip(own, ours, strict=True):
        expected, logits = expected[: VOCABULARY - 1], logits[: VOCABULARY - 1]
        assert mx.all(mx.isfinite(expected)), "mlx-lm's own logits are not finite"
        off.append((mx.abs(logits - expected).max() / mx.abs(expected).max()).item())
    return off


def check_memory(model: nn.Module, cache: list[Any], size: int, far: int = FAR) -> None:
    """Far beyond the budget, memory has stopped to grow and the model still says something."""
    before: list[int] = []
    for tokens in (far // 2, far):
        seen = _offset(cache)
        new = prompt_tokens(tokens - seen, seed=2)
        sizes = [25] * (len(new) // 25 - 1) + [5] * 4 + [1] * 5
        for logits in fed(model, cache, new, sizes):
            assert mx.all(mx.isfinite(logits[: VOCABULARY - 1])), "logits are not finite"
        before, now = [bytes_of(entry) for _, entry in entries(cache)], before
    assert before == now or not now, f"memory went from {now} to {before} bytes"
    for place, entry in entries(cache):
        if isinstance(entry, BoundedKVCache):
            assert entry.offset == far, f"layer {place} counts {entry.offset} of {far} tokens"
            assert 0 < entry.size() <= size, f"layer {place} holds {entry.size()} tokens"
            assert entry.evicted >= far - size, f"layer {place} evicted {entry.evicted} tokens"


def packs(cache: Sequence[Any]) -> bool:
    """Whether a model's rows can be packed: it attends to the cached rows through us."""
    return not any(isinstance(e, LatentKVCache | PlainRowsKVCache) for _, e in entries(cache))


def framed(cache: Sequence[Any]) -> list[Frame | None]:
    """A frame for each cache of a model's list that may have one, once rows have come."""
    frames: list[Frame | None] = []
    for entry in cache:
        if isinstance(entry, BoundedKVCache):
            shape = (entry.layer.types["keys"].heads, entry.layer.types["keys"].width)
            frames.append(Frame(mx.zeros(shape), mx.full(shape, 2.0)))
        else:
            frames.append(None)
    return frames


def _broken(model: nn.Module) -> str:
    """Why mlx-lm's own caches cannot run a model here; empty if they can."""
    try:
        list(fed(model, stock_caches(model), prompt_tokens(3), [2, 1]))
    except Exception as error:
        if NO_METAL in str(error):
            return "its own kernels need Metal"
        return f"mlx-lm's own caches fail too: {error}"
    return ""


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"mlx_lm.models.{name}")


def fed(
    model: nn.Module, cache: list[Any], tokens: Sequence[int], sizes: Sequence[int]
) -> Iterator[mx.array]:
    """Logits `[V]` after each chunk of these sizes."""
    assert sum(sizes) == len(tokens)
    start = 0
    with restored(model):  # the next conversation begins without this one's M-RoPE positions
        for size in sizes:
            logits = logits_of(model, mx.array([tokens[start : start + size]]), cache)[0, -1]
            mx.eval(logits)
            start += size
            yield logits.astype(mx.float32)


def _offset(cache: list[Any]) -> int:
    return max((getattr(entry, "offset", 0) or 0 for _, entry in entries(cache)), default=0)


def bytes_of(entry: Any) -> int:
    return 0 if entry.empty() else int(entry.nbytes)


def _bounded(cache: list[Any]) -> str:
    """Which of a model's layers are bounded, by kind."""
    words = {
        LatentKVCache: "keys made of the rows",
        PlainRowsKVCache: "by keys alone",
        SharedKVCache: "shared by layers",
    }
    kinds: dict[str, list[str]] = {}
    for place, entry in entries(cache):
        if isinstance(entry, BoundedKVCache):
            kinds.setdefault(words.get(type(entry), ""), []).append(place)
    every = len(list(entries(cache)))
    parts = []
    for word, places in kinds.items():
        layers = "layer" if len(places) == 1 else "layers"
        which = "all layers" if len(places) == every else f"{layers} {', '.join(places)}"
        parts.append(f"{which} ({word})" if word else which)
    return ", ".join(parts)


def _others(cache: list[Any]) -> str:
    """What holds the other layers, in a few words."""
    words = {
        "RotatingKVCache": "sliding windows",
        "ArraysCache": "states",
        "ChunkedKVCache": "chunks",
    }
    others = {
        words.get(type(entry).__name__, type(entry).__name__)
        for _, entry in entries(cache)
        if not isinstance(entry, BoundedKVCache)
    }
    assert KVCache.__name__ not in others, "a plain KV cache was left as it is"
    return f"other layers: {' and '.join(sorted(others))}" if others else ""
