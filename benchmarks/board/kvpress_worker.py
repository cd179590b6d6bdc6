"""kvpress's process: it compresses prompts and decodes, in an environment of its own.

It is run by path with that environment's Python, and imports nothing of this project. The first
argument is a folder with `config.json`, `model.safetensors` in the names of transformers, and the
tokenizer's files. Each line of standard input is a request, {"press": ..., "settings": ...,
"ratio": ..., "alone": ..., "prompt": ids, "continuation": ids, "out": path}; each line of standard
output is its answer: bytes and times, after the logits `[C - 1, vocabulary]` were written to `out`
as .npy; or {"failed": why}. A prompt that is "alone" is read for this request only, and the answer
has the greatest number of bytes of tensors that this took.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
import types
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# kvpress imports these for data sets, which nothing here asks for.
for absent, names in {"datasets": ["load_dataset"], "fire": ["Fire"]}.items():
    stand_in = types.ModuleType(absent)
    for name in names:
        setattr(stand_in, name, None)
    sys.modules.setdefault(absent, stand_in)

import kvpress  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

#: Presses that look at attention weights, which only this implementation gives out.
EAGER = ("ObservedAttentionPress",)
#: Presses that hide rows behind a key which no query of a part likes: with many queries there may
#: be none, so each part has one.
MASKING = ("AdaKVPress", "CriticalAdaKVPress", "KVzipPress")
#: Tokens of a continuation that are read one by one, which tells the time that a token takes.
TIMED = 5
#: Tokens of prompts whose readings are kept; each takes some 120 kB with SmolLM2.
MOST_TOKENS = 16_384
#: A ratio above 0, which lets KVzip score.
LEAST_RATIO = 1e-6


def loaded(folder: Path) -> Any:
    """The model with this folder's weights, in float32."""
    config = AutoConfig.from_pretrained(folder)
    config.name_or_path = str(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    # KVzip's press asks for the tokenizer of this name.
    model.config.name_or_path = model.name_or_path = str(folder)
    return model.eval()


def press_of(name: str, settings: dict[str, Any], ratio: float) -> Any:
    """A press; settings that are {"press": ..., "settings": ...} are presses themselves."""
    if name == "none":
        return None
    made = {
        key: press_of(value["press"], value.get("settings", {}), ratio)
        if isinstance(value, dict)
        else value
        for key, value in settings.items()
    }
    kind = getattr(kvpress, name)
    press = kind(**made)
    press.compression_ratio = ratio
    return press


def held_by(cache: Any) -> int:
    """Bytes of a cache's tensors."""
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    )


def kept_rows(model: Any, cache: Any) -> int:
    """Rows of all heads that attention may see: those held, less those that a press masks."""
    rows = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers)
    masked = 0
    for layer in model.model.layers:
        which = getattr(layer.self_attn, "masked_key_indices", None)
        masked += 0 if which is None else len(which[2])
    return rows - masked


class Peak(TorchDispatchMode):
    """Within a block, the greatest number of bytes of tensors that were made there and alive.

    This is what MLX counts as its peak memory; what an operation takes for itself is in neither.

    Attributes:
        bytes: That number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._alive = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        # Weights are given before anything is made of them.
        before = {one.untyped_storage().data_ptr() for one in tensors}
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage(), before)
        return made

    def _count(self, storage: Any, before: set[int]) -> None:
        at = storage.data_ptr()
        if at in self._storages or at in before or not at:
            return
        self._storages.add(at)
        self._alive += storage.nbytes()
        self.bytes = max(self.bytes, self._alive)
        weakref.finalize(storage, self._gone, at, storage.nbytes())

    def _gone(self, at: int, size: int) -> None:
        self._storages.discard(at)
        self._alive -= size


def parts_of(tokens: list[int], singly: bool) -> list[tuple[int, list[int]]]:
    """A continuation's parts, with their places: some tokens one by one, and the rest at once.

    Everything that follows a compressed prompt stays, so the rest's logits are the same either way.

    Args:
        tokens: The continuation.
        singly: Whether each token is a part.
    """
    timed = len(tokens) if singly else min(TIMED, len(tokens))
    rest = [(timed, tokens[timed:])] if timed < len(tokens) else []
    return [*((i, tokens[i : i + 1]) for i in range(timed)), *rest]


@dataclass
class Prefill:
    """A prompt that was read without compression, from which every press starts.

    A press changes nothing before the prompt is read: it looks at what each layer was given, and at
    its keys and values. So one reading serves all presses and all ratios.

    Attributes:
        cache: The full cache.
        calls: Each layer's module, and the arguments and the result of its attention.
        seconds: The time of the reading.
        scores: KVzip's scores, which do not depend on the ratio, once they are known, and the
            seconds that they took.
    """

    cache: Any
    calls: list[tuple[Any, dict[str, Any], Any]]
    seconds: float
    scores: list[tuple[Any, float]] = field(default_factory=list)


_prefills: OrderedDict[tuple[int, ...], Prefill] = OrderedDict()


def prefill_of(model: Any, prompt: list[int]) -> Prefill:
    """A prompt's reading, kept for the next press."""
    key = tuple(prompt)
    if key not in _prefills:
        while sum(map(len, _prefills)) + len(key) > MOST_TOKENS and _prefills:
            _prefills.popitem(last=False)
        _prefills[key] = _prefilled(model, prompt)
    _prefills.move_to_end(key)
    return _prefills[key]


def _prefilled(model: Any, prompt: list[int]) -> Prefill:
    calls: list[tuple[Any, dict[str, Any], Any]] = []

    def note(module: Any, arguments: Any, named: dict[str, Any], result: Any) -> None:
        calls.append((module, {**named, "past_key_values": None}, result))

    hooks = [
        layer.self_attn.register_forward_hook(note, with_kwargs=True)
        for layer in model.model.layers
    ]
    cache = DynamicCache()
    start = time.perf_counter()
    try:
        model.model(input_ids=torch.tensor([prompt]), past_key_values=cache)
    finally:
        for hook in hooks:
            hook.remove()
    return Prefill(cache, calls, time.perf_counter() - start)


def compressed(model: Any, press: Any, prompt: list[int], alone: bool) -> tuple[Any, float]:
    """A cache of a prompt that a press has compressed, and the seconds that both took.

    Args:
        model: The model.
        press: A press; None compresses nothing.
        prompt: The prompt's tokens.
        alone: Whether the prompt is read for this press only, as kvpress itself would.
    """
    eager = model.config._attn_implementation == "eager"
    if alone or eager:  # eager attention's weights are too large to keep
        cache, start = DynamicCache(), time.perf_counter()
        with nullcontext() if press is None else press(model):
            model.model(input_ids=torch.tensor([prompt]), past_key_values=cache)
        return cache, time.perf_counter() - start
    read = prefill_of(model, prompt)
    cache, start = copy.deepcopy(read.cache), time.perf_counter()
    if isinstance(press, kvpress.KVzipPress):
        return cache, read.seconds + _kvzipped(model, press, prompt, cache, read)
    if press is not None:
        press.post_init_from_model(model)
        for module, named, result in read.calls:
            module.rotary_emb = model.model.rotary_emb
            press.forward_hook(module, [], {**named, "past_key_values": cache}, result)
    return cache, read.seconds + time.perf_counter() - start


def _kvzipped(model: Any, press: Any, prompt: list[int], cache: Any, read: Prefill) -> float:
    """Compress by KVzip, whose scores are computed once for a prompt; return the seconds."""
    start = time.perf_counter()
    if not read.scores:
        ratio, press.compression_ratio = press.compression_ratio, LEAST_RATIO
        finish = press.compress_post

        def note(of: Any) -> None:
            read.scores.append((press.score_val.clone(), time.perf_counter() - start))

        press.compress_post = note
        with press(model):  # it scores when the block ends
            press._context_ids, press._cache = torch.tensor([prompt]), copy.deepcopy(cache)
        press.compress_post, press.compression_ratio = finish, ratio
    press.score_val, seconds = read.scores[0][0].clone(), read.scores[0][1]
    start = time.perf_counter()
    press.compress_post(model)
    return seconds + time.perf_counter() - start


@torch.no_grad()
def answered(model: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Compress one prompt and read its continuation."""
    model.set_attn_implementation("eager" if request["press"] in EAGER else "sdpa")
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    press = press_of(request["press"], request["settings"], request["ratio"])
    torch.manual_seed(0)  # Compactor draws projections
    length = len(request["prompt"])
    if request["alone"]:
        _prefills.clear()
    with Peak() if request["alone"] else nullcontext() as peak:
        cache, prompt_seconds = compressed(model, press, request["prompt"], request["alone"])
    nbytes, rows = held_by(cache), kept_rows(model, cache)
    read = request["continuation"][:-1]
    logits, seconds = [], []
    for at, tokens in parts_of(read, request["press"] in MASKING):
        start = time.perf_counter()
        places = torch.arange(length + at, length + at + len(tokens))[None]
        input_ids = torch.tensor([tokens])
        out = model(input_ids=input_ids, past_key_values=cache, position_ids=places)
        logits.append(out.logits[0].float().numpy())
        if len(tokens) == 1:
            seconds.append(time.perf_counter() - start)
    np.save(request["out"], np.concatenate(logits))
    times = {"prompt_seconds": prompt_seconds, "token_seconds": statistics.median(seconds)}
    return {"held": nbytes, "rows": rows, "peak": peak.bytes if peak else None, **times}


def main() -> None:
    """Answer requests until standard input ends."""
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    model = loaded(Path(sys.argv[1]))
    print(json.dumps({"ready": kvpress.__name__}), file=out, flush=True)
    for line in sys.stdin:
        try:
            answer = answered(model, json.loads(line))
        except Exception as error:  # the board tells it
            answer = {"failed": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
