"""A model that is served: loaded, probed and given caches in one thread."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters, sharded_load

from mlx_h2o._byte_size import USUAL_CONTEXT, Share
from mlx_h2o.budgets.plan import plain_bytes
from mlx_h2o.budgets.settings import ModelSettings
from mlx_h2o.caches.conversation import bounded_members
from mlx_h2o.calibration.first_use import profile_at_load
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.recorder import trained_context
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.fingerprint import fingerprint
from mlx_h2o.loading.load import load
from mlx_h2o.models.make import bounded_caches
from mlx_h2o.serve.grammar import GrammarCompiler
from mlx_h2o.serve.memory import LARGEST_CHUNK, most_bytes
from mlx_h2o.serve.protocol import label_of
from mlx_h2o.serve.ranks import any_failed, is_own, processes, shared

#: The most different settings whose empty caches are kept.
MAX_PLANS = 64
#: Tokens that each of the two sequences reads that show whether caches can be batched.
PROBE = ([0, 0, 0], [0, 0])
#: Parameters times tokens that slow devices compute in half a second: two operations each, at 10^11
#: a second on two CPU cores and 8 * 10^12 on a GPU.
CHUNK_WORK = {mx.cpu: 25e9, mx.gpu: 2e12}
LEAST_CHUNK = 32


class TooLarge(ValueError):
    """A conversation may take more bytes than all of them together.

    Attributes:
        need: The bytes that it may take.
    """

    def __init__(self, need: int, bound: int):
        self.need = need
        super().__init__(
            f"A conversation with these settings may take {need:,} bytes, and the server has "
            f"{bound:,} for all: send a smaller max_size."
        )


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The caches of one conversation with some settings.

    Attributes:
        label: The settings as text: caches with another label never serve.
        empty: Empty caches, one for each layer; they are copied.
        need: The most bytes that they may take; 0 if the server has no bound.
        batches: Whether several conversations can be computed together.
        rolls: Whether positions roll, so that a prompt may be longer than those of training.
    """

    label: str
    empty: list[Any]
    need: int
    batches: bool
    rolls: bool


class ServedModel:
    """The model with its tokenizer; all of it belongs to the thread that makes it.

    Args:
        name: A folder, an id on the hub, a built-in model or a GGUF file.
        chunk: Prompt tokens that are read at once; None: as many as suit the model (`chunk_of`).
        measures: Whether a model without a profile is measured now.

    Attributes:
        name, chunk: As above.
        model: The model.
        tokenizer: The model's tokenizer.
        grammars: Grammars of answers for this tokenizer.
        fingerprint: A digest of its weights, settings and tokenizer.
        trained: The tokens that it was trained to see at once; 0 if it does not say.
        bound: Bytes of all caches of the server, or None.
    """

    bound: int | None = None

    def __init__(self, name: str, chunk: int | None = None, measures: bool = False):
        self.name = name
        self.model, self.tokenizer = _loaded(name)
        self.chunk = chunk or chunk_of(get_total_parameters(self.model))
        mx.eval(self.model.parameters())
        self.grammars = GrammarCompiler(self.tokenizer)
        self.fingerprint = fingerprint(self.model, self.tokenizer)
        self.trained = trained_context(self.model, 0)
        if measures:
            profile_at_load(self.model)
        self._plans: dict[str, CachePlan] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        weights: Any = tree_flatten(self.model.parameters())
        return sum(array.nbytes for _, array in weights)

    def in_bytes(self, share: Share, context: int | None) -> int:
        """A share of this model's 16-bit cache.

        Args:
            share: The share.
            context: The tokens that the cache holds; None: as many as the model was trained to see.
        """
        rows = sum(map(plain_bytes, layer_kinds(self.model)))
        tokens = context or trained_context(self.model, USUAL_CONTEXT)
        return int(share.part * tokens * rows)

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model knows."""
        args = getattr(self.model, "args", None)
        return int(getattr(args, "vocab_size", None) or self.tokenizer.vocab_size)

    def plan(self, settings: Mapping[str, Any]) -> CachePlan:
        """The caches that a conversation has with these settings, made once for each.

        Args:
            settings: As `ModelSettings.of` takes them.

        Raises:
            ValueError: The model cannot have such caches, or they exceed the bound.
        """
        label = label_of(settings)
        if label not in self._plans:
            if len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[label] = self._make_plan(label, settings)
        return self._plans[label]

    def _make_plan(self, label: str, settings: Mapping[str, Any]) -> CachePlan:
        empty, error = list[Any](), None
        try:
            # If the model is measured at all, it is measured when it is loaded.
            own = ModelSettings.of(**{**settings, "profile": "never"})
            empty = bounded_caches(self.model, own)
        except NothingToBound:
            empty = stock_caches(self.model)
        except ValueError as raised:
            error = raised
        if any_failed(error is not None):
            raise error or ValueError("Another process has no room for its heads: ask for more.")
        need = 0
        if self.bound is not None:
            need = most_bytes(empty, self.model, self.chunk)
            if need > self.bound:
                raise TooLarge(need, self.bound)
        bounded = bounded_members(empty)
        rolls = bool(bounded) and all(entry.settings.rope for entry in bounded)
        return CachePlan(label, empty, need, self._batches(empty), rolls)

    def _batches(self, empty: Sequence[Any]) -> bool:
        """Whether two conversations with such caches can take a step together.

        They are tried: many caches of mlx-lm have no `merge`, or raise in it once they hold rows.
        """
        try:
            lists = [copy.deepcopy(list(empty)) for _ in PROBE]
            for cache, tokens in zip(lists, PROBE, strict=True):
                self.model(mx.array([tokens]), cache=cache)
                mx.eval([entry.state for entry in cache])
            batch = [entry.merge([entry]) for entry in lists[0]]
            for entry, other in zip(batch, lists[1], strict=True):
                entry.extend(other.merge([other]))
            mx.eval(self.model(mx.array([[0], [0]]), cache=batch))
            for entry in batch:
                entry.extract(0)
                entry.filter([1])
            mx.eval(self.model(mx.array([[0]]), cache=batch))
        except Exception as error:  # of any kind of cache
            logging.info("Conversations are computed one by one: %s", error)
            if processes() > 1:
                raise ValueError(
                    "Several processes share the model (mlx.launch), and its caches cannot be "
                    "batched, which serving it together needs: run one process."
                ) from error
            return False
        return True


def chunk_of(parameters: int) -> int:
    """Prompt tokens that are read at once: others wait for them, so they take half a second.

    The number depends on the model and the kind of device alone, so that a server that is started
    again reads prompts in the same chunks: which tokens are evicted depends on them.

    Args:
        parameters: The number of the model's parameters.
    """
    tokens = int(CHUNK_WORK[mx.default_device().type] / parameters)
    return max(LEAST_CHUNK, min(LARGEST_CHUNK, 1 << tokens.bit_length() >> 1))


def _loaded(name: str) -> tuple[nn.Module, Any]:
    """The model and its tokenizer, shared out among the processes if there are several."""
    if processes() == 1:
        return load(name)
    group = mx.distributed.init()
    if is_own(name):
        return shared(name, group)
    model, tokenizer = sharded_load(name, tensor_group=group)[:2]
    # For the search for its profile, as after `mlx_h2o.load`.
    if Path(name).is_dir():
        model.mlx_h2o_folder = str(Path(name))
    model.mlx_h2o_tokenizer = tokenizer
    return model, tokenizer
