"""Stretches that are said again, and what heads lose that no longer hold their first coming."""

import itertools
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.calibration import calibrate
from mlx_h2o.calibration.retrieval_loss import (
    ECHO,
    LEAD,
    PERIOD,
    TOTAL,
    Changes,
    Hiding,
    echoes_in,
    pages_of,
    retrieval_losses,
)
from mlx_h2o.hosts.recorder import HeadWeights, Watcher
from mlx_h2o.loading.load import CALIBRATION_TEXT
from tiny_models import tiny_model

#: Channels, and tokens of a page with two echoes.
D, T = 288, 280


@pytest.mark.parametrize("length", [128, 256, 1000, 1024, 2048, 10_000])
def test_every_stretch_is_said_twice_and_prose_fills_the_rest(length):
    text = list(range(3 * length + 17))
    pages, echoes = pages_of(text, length), echoes_in(length)
    assert pages.shape == (3, length)
    assert len(echoes) == length // PERIOD
    for page in pages.tolist():
        for echo in echoes:
            said = page[echo.first : echo.first + ECHO]
            assert page[echo.again : echo.again + ECHO] == said
            assert len(set(said)) == ECHO
            assert [page.count(token) for token in said] == [2] * ECHO
    assert sorted(set(pages.flatten().tolist())) == text[: 3 * (length - ECHO * len(echoes))]
    spans = sorted((echo.first, echo.first + ECHO) for echo in echoes)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[0][0] > 0
    if length > 1000:  # from near and far
        distances = [echo.again - echo.first for echo in echoes]
        assert min(distances) < PERIOD
        assert max(distances) > length // 4


def test_a_short_text_is_one_page_without_echoes():
    assert pages_of(list(range(100)), 1024).tolist() == [list(range(100))]
    assert echoes_in(100) == []
    assert pages_of([], 1024).shape == (0, 0)
    assert retrieval_losses(tiny_model("llama"), list(range(100))).tolist() == [0.0] * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Module()
        self.attention.o_proj = nn.Linear(4 * D, 24, bias=False)


def attended(call, keys, values, allowed):
    """The definition, one query at a time; `allowed` `[T, T]`."""
    out = np.zeros(call.q.shape)
    for h, t in itertools.product(range(4), range(T)):
        seen = np.flatnonzero(allowed[t, : t + 1])
        logits = call.scale * keys[0, h // 2, seen] @ call.q[0, h, t]
        if call.softcap:
            logits = call.softcap * np.tanh(logits / call.softcap)
        sink = [] if call.sinks is None else [call.sinks[h]]
        weights = np.exp(np.append(logits, sink))
        out[0, h, t] = weights[: len(seen)] @ values[0, h // 2, seen] / weights.sum()
    return out


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 20.0}, {"sinks": np.array([0.5, -1, 2, 0], np.float32)}]
)
def test_losses_are_those_of_attention_without_the_first_coming(options):
    """The first KV head looks at where the token was said before, the second at what it is now."""
    rng = np.random.default_rng(1)
    pages = pages_of(list(range(T)), T)
    unit = rng.normal(size=(T, D)).astype(np.float32)
    of_tokens = (unit / np.linalg.norm(unit, axis=1, keepdims=True))[pages[0]]
    q, keys = np.stack([of_tokens] * 4)[None], np.stack([of_tokens] * 2)[None]
    positions = np.eye(T, D, dtype=np.float32)
    keys[0, 1] = q[0, 2] = q[0, 3] = np.roll(positions, 3, axis=1)
    values = rng.normal(size=(1, 2, T, D)).astype(np.float32)
    numbers = AttentionCall(12 * q, 1.0, "causal", **options)
    call = AttentionCall(*(mx.array(x) if isinstance(x, np.ndarray) else x for x in numbers))
    watcher = Watcher(Block(), mx.array(rng.normal(size=(1, T, 24)).astype(np.float32)))
    echoes = echoes_in(T)
    hiding = Hiding(echoes, watcher, weigh=True)
    out = hiding.look(call, mx.array(keys), mx.array(values))
    whole = attended(numbers, keys, values, np.ones((T, T), bool))
    assert np.allclose(out, whole, atol=1e-4)
    weights, expected, change = HeadWeights.of(watcher, out, 2), np.zeros(2), np.zeros(whole.shape)
    for echo in echoes:
        allowed = np.ones((T, T), bool)
        allowed[:, echo.first : echo.first + ECHO] = False
        counted = slice(echo.again + LEAD, echo.again + ECHO)
        change[:, :, counted] = (attended(numbers, keys, values, allowed) - whole)[:, :, counted]
        of_echo = weights.errors(mx.array(change.astype(np.float32))[:, None], 0)
        expected += np.array(of_echo)[:, 0, counted].mean(axis=-1)
    assert np.allclose(hiding.change, change, atol=1e-4)
    assert np.allclose(hiding.errors, expected / len(echoes), rtol=1e-3, atol=1e-6)
    assert hiding.errors[0] > 20 * hiding.errors[1]


@pytest.fixture(scope="module")
def recall_4m(embedded):
    """recall-4m, and tokens of the text that calibrations read."""
    model, tokenizer = embedded
    return model, tokenizer.encode(CALIBRATION_TEXT.read_text(encoding="utf-8"))[:1024]


def test_the_heads_parts_add_up_to_the_divergence(recall_4m):
    """With gradients at several parts of the changes, as the integral says."""
    model, tokens = recall_4m
    changes = Changes(model, mx.array(pages_of(tokens, 256)[:1]))
    parts = [(i + 0.5) / 8 for i in range(8)]
    added = np.mean([changes.attributed(model, part) for part in parts], axis=0).sum()
    assert added == pytest.approx(changes.divergence(model, *changes.outputs).item(), rel=0.05)
    unchanged = [mx.zeros_like(change) for change in changes.outputs]
    assert changes.divergence(model, *unchanged).item() == pytest.approx(0, abs=1e-3)


def test_the_head_that_copies_has_the_loss(recall_4m):
    """recall-4m copies in one head of its last layer."""
    losses = retrieval_losses(*recall_4m)
    assert losses.sum() == pytest.approx(TOTAL)
    assert losses[7] > 0.95 * TOTAL


def test_without_gradients_errors_stand_for_the_losses(recall_4m):
    losses = retrieval_losses(*recall_4m, with_gradients=False)
    assert losses.argmax() == 7
    assert (losses > 0).all()


def test_calibration_tells_what_echoes_lose(tmp_path):
    """It stands in the profile, and the heads that lose most get more slots for it."""
    tokens = mx.random.randint(0, 100, (512,), key=mx.random.key(5)).tolist()
    told, model = [], tiny_model("llama")
    profile = calibrate.calibrate(
        model, tokens, length=256, progress=lambda *steps: told.append(steps)
    )
    assert np.allclose(profile.measured.echoes, retrieval_losses(model, tokens))
    assert profile.measured.echoes.sum() == pytest.approx(TOTAL)
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
