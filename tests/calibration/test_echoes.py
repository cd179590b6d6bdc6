"""Stretches that are said again, and what heads lose that no longer hold their first coming."""

import itertools
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_h2o.attention.call import AttentionCall
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.settings import DEFAULT_POLICY
from mlx_h2o.calibration import calibrate
from mlx_h2o.calibration.retrieval_loss import (
    ECHO,
    LEAD,
    PERIOD,
    Echoing,
    echo_losses,
    echoes_in,
    pages_of,
)
from mlx_h2o.calibration.sensitivity import sensitivities
from mlx_h2o.hosts.recorder import HeadWeights, Watcher
from mlx_h2o.policies import make_policy
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
    losses = echo_losses(tiny_model("llama"), list(range(100)), 1024)
    assert losses.tolist() == [0.0] * 4


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
    echoes, found = echoes_in(T), {}
    cache = Echoing(0, echoes, watcher, found, None)
    out = cache.look(call, mx.array(keys), mx.array(values))
    whole = attended(numbers, keys, values, np.ones((T, T), bool))
    assert np.allclose(out, whole, atol=1e-4)
    weights, wanted = HeadWeights.of(watcher, out, 2), np.zeros(2)
    for echo in echoes:
        allowed = np.ones((T, T), bool)
        allowed[:, echo.first : echo.first + ECHO] = False
        lost = mx.array((whole - attended(numbers, keys, values, allowed)).astype(np.float32))
        wanted += np.array(weights.errors(lost[:, None], 0))[
            :, 0, echo.again + LEAD : echo.again + ECHO
        ].mean(axis=-1)
    assert np.allclose(found[0], wanted / len(echoes), rtol=1e-3, atol=1e-6)
    assert found[0][0] > 20 * found[0][1]


def test_calibration_tells_what_echoes_lose(tmp_path):
    """It stands in the profile, and the heads that lose most get more slots for it."""
    tokens = mx.random.randint(0, 100, (512,), key=mx.random.key(5)).tolist()
    told, model = [], tiny_model("llama")
    profile = calibrate.calibrate(
        model, tokens, length=256, progress=lambda *steps: told.append(steps)
    )
    felt = sensitivities(model, tokens, make_policy(DEFAULT_POLICY))
    assert np.allclose(profile.measured.echoes, felt * echo_losses(model, tokens, 256))
    assert (profile.measured.echoes > 0).all()
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
