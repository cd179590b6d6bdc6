"""What each bounded model of mlx-lm does beside being bounded: packed rows, batches, the server."""

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.cli import main
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.recorder import one_budget_because
from model_configs import VOCABULARY
from model_coverage import (
    BOUNDED,
    CONSTANT,
    PARTLY,
    ROOMY,
    SMALL,
    check_memory,
    coverage_model,
    fed,
    framed,
    off_stock,
    packs,
    row_of,
)
from served_models import YES, server
from tiny_models import prompt_tokens

REFUSED, ONE_BUDGET = "refused", "one budget"
ONE_BY_ONE, NOT_STOCK = "one at a time", "nor mlx-lm's own"
# Prompts of a batch: ragged, and beyond the budget.
LENGTHS, DECODED, CHUNK = (40, 27), 6, 16
# Rows in 8 bits of weights that are random move logits by a few hundredths, in the median of steps
# (an expert chosen otherwise moves those of one step by more).
PACKED_OFF = 0.1


def packed(model: nn.Module) -> str:
    """Rows in 8 bits, in frames: near mlx-lm's own logits at first, and bounded."""
    cache = make_prompt_cache(model, max_size=ROOMY)
    if not packs(cache):
        with pytest.raises(ValueError, match=r"cannot be packed: omit bits"):
            make_prompt_cache(model, max_size=ROOMY, bits=8, group_size=32)
        return REFUSED
    list(fed(model, cache, [1], [1]))  # then the widths are known
    stored = {"bits": 8, "group_size": 32, "frames": framed(cache)}
    near = make_prompt_cache(model, max_size=ROOMY, **stored)
    off = median(off_stock(model, near))
    assert off < PACKED_OFF, f"packed in 8 bits, logits are off by {off:.1e}"
    check_memory(model, make_prompt_cache(model, max_size=2 * SMALL, **stored), 2 * SMALL, far=150)
    return YES


def batches(model: nn.Module) -> str:
    """Two ragged sequences in mlx-lm's batches: what each gives alone, evictions and all."""

    def ours() -> list[Any]:
        return make_prompt_cache(model, max_size=SMALL)

    if not all(hasattr(entry, "merge") for entry in ours()):
        with pytest.raises((AttributeError, ValueError)):
            side_by_side(model, ours)
        return ONE_BY_ONE
    wrong = what_is_wrong(model, ours)
    if wrong and what_is_wrong(model, lambda: stock_prompt_cache(model)):
        return NOT_STOCK
    assert not wrong, f"{wrong}, and mlx-lm's own does not"
    return YES


def profile(model: nn.Module) -> str:
    """`mlx_h2o calibrate` to its end: its file is read again, and caches share slots out by it."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "profile.json"
        patch.setattr("mlx_h2o.cli.calibrate.load_model", lambda _: (model, TinyTokenizer()))
        said = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            status = main(["calibrate", "--out", str(file)])
        if one_budget_because(layer_kinds(model)):
            assert status == 2, "a profile was made that would not be used"
            assert "one budget" in said.getvalue(), said.getvalue()
            assert not list(Path(folder).iterdir())
            return ONE_BUDGET
        assert status == 0, said.getvalue()
        found = mlx_h2o.Profile.load(file)
    size = {"max_bytes": "25%", "context": 96, "budgets": found}
    for stored in ({"max_size": 2 * SMALL, "budgets": found}, size):
        cache = make_prompt_cache(model, **stored)
        list(fed(model, cache, prompt_tokens(90), [40, *[1] * 50]))
        bounded = [e for _, e in entries(cache) if isinstance(e, BoundedKVCache)]
        assert [len(entry.budgets) for entry in bounded] == list(found.model.kv_heads)
        assert any(entry.evicted for entry in bounded)
    return YES


class TinyTokenizer:
    """Some tokens of whatever text: models with random weights read nothing."""

    def encode(self, text: str) -> list[int]:
        return prompt_tokens(96)


def what_is_wrong(model: nn.Module, make: Callable[[], list[Any]]) -> str:
    """Why a batch does not do what sequences do alone; empty if it does."""
    try:
        worst = off_alone(model, make)
    except Exception as error:  # of any model, about arrays where it wants numbers and the like
        return f"a batch of two fails ({type(error).__name__}: {error})"
    return f"a batch of two differs from each alone by {worst:.1e}" if worst > 1e-3 else ""


def off_alone(model: nn.Module, make: Callable[[], list[Any]]) -> float:
    """The largest relative difference between a batch's logits and those of each alone."""
    worst = 0.0
    for prompt, both in zip(prompts(), side_by_side(model, make), strict=True):
        single = list(alone(model, prompt, make()))
        for (token, expected), (other, got) in zip(single, both, strict=True):
            off = mx.abs(mx.exp(got) - mx.exp(expected)).max().item()
            worst = max(worst, off)
            if token != other:  # the next steps read other tokens
                break
    return worst


def prompts() -> list[list[int]]:
    return [prompt_tokens(length, seed) for seed, length in enumerate(LENGTHS, 5)]


def alone(
    model: nn.Module, prompt: Sequence[int], cache: list[Any]
) -> Iterator[tuple[int, mx.array]]:
    """Tokens and log-probabilities of one sequence."""
    steps = generate_step(
        mx.array(prompt), model, max_tokens=DECODED, prompt_cache=cache, prefill_step_size=CHUNK
    )
    for token, logprobs in steps:
        yield int(token), logprobs[: VOCABULARY - 1]


def side_by_side(
    model: nn.Module, make: Callable[[], list[Any]]
) -> list[list[tuple[int, mx.array]]]:
    """The same of all, by mlx-lm's own generator of batches."""
    generator = BatchGenerator(model, prefill_step_size=CHUNK, prefill_batch_size=len(LENGTHS))
    try:
        uids = generator.insert(
            prompts(), [DECODED] * len(LENGTHS), caches=[make() for _ in LENGTHS]
        )
        found: dict[int, list[tuple[int, mx.array]]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append((response.token, response.logprobs[: VOCABULARY - 1]))
    finally:
        generator.close()
    return list(found.values())


def memory(model: nn.Module) -> str:
    """Which layers are bounded, with what."""
    row = row_of(model)
    return f"{row.memory} | {row.how}"


def of_model(fill: Callable[[nn.Module], str]) -> Callable[[str], str]:
    """The same function of the model's name."""
    return lambda name: fill(coverage_model(name))


#: The columns of docs/reference/models.md behind the model's name, with what fills them.
COLUMNS: dict[str, Callable[[str], str]] = {
    "memory | layers": of_model(memory),
    "packed, keys scaled": of_model(packed),
    "batches": of_model(batches),
    "server": server,
    "profile": of_model(profile),
}


def is_filled(column: str, memory: str) -> bool:
    """Whether a column says something of a model: what is not bounded can at most be served."""
    return memory in (BOUNDED, PARTLY) or (column == "server" and memory == CONSTANT)


def line_of(name: str) -> str:
    """A model's line of the table."""
    cells = [COLUMNS["memory | layers"](name)]
    kind = cells[0].partition(" |")[0]
    for column in list(COLUMNS)[1:]:
        cells.append(COLUMNS[column](name) if is_filled(column, kind) else "")
    return f"| {name} | {' | '.join(cells)} |"
