"""Calibration by the very policy: what is tried side by side, kept, and made into frames."""

import json
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_h2o import make_prompt_cache
from mlx_h2o.calibration import calibrate
from mlx_h2o.calibration.checkpoint import CalibratedLayers
from mlx_h2o.calibration.scaling_build import frames_of_keys, frames_of_text, turning
from mlx_h2o.calibration.trials import ORDERS, Rows, tried
from mlx_h2o.hosts.recorder import HeadWeights
from mlx_h2o.policies import make_policy
from tiny_models import tiny_model

D, T = 16, 70


def random_rows(batch=2):
    q, k, v = (
        mx.random.normal((batch, heads, T, D), key=mx.random.key(heads)) for heads in (4, 2, 3)
    )
    return Rows(q, k, v[:, :2], 0.3)


@pytest.mark.parametrize("policy", ["distinct", "h2o", "salient"])
def test_a_setting_beside_others_gives_what_it_gives_alone(policy):
    """Heads share nothing: whatever runs beside it, a setting's outputs are its own."""
    rows, policy = random_rows(), make_policy(policy)
    many = [out for _, out in tried(rows, policy, (12, 20, 40), ORDERS, (35,))]
    assert [out.shape[3] for out in many] == [35, 29, 6]
    together = mx.concatenate(many, axis=3)
    for i, slots in enumerate((12, 20, 40)):
        alone = mx.concatenate([o for _, o in tried(rows, policy, (slots,), ORDERS, ())], axis=3)
        for order in range(len(ORDERS)):
            mine = together[:, i * len(ORDERS) + order]
            assert mx.allclose(mine, alone[:, order], atol=1e-5)
    full = mx.fast.scaled_dot_product_attention(
        rows.q, rows.keys, rows.values, scale=rows.scale, mask="causal"
    )
    assert mx.allclose(together[:, -1, :, :40], full[:, :, :40], atol=1e-5)
    assert mx.abs(together[:, -1, :, 45:] - full[:, :, 45:]).max() > 1e-3


def test_errors_are_what_the_projection_makes_of_differences():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.Module()
            self.attention.o_proj = nn.Linear(4 * D, 24, bias=False)

    watcher = calibrate.Watcher(Block(), mx.random.normal((1, T, 24), key=mx.random.key(3)))
    out = mx.random.normal((1, 4, T, D), key=mx.random.key(4))
    d = mx.random.normal((1, 1, 4, 5, D), key=mx.random.key(5))
    got = HeadWeights.of(watcher, out, 2).errors(d, start=7)
    project = watcher.layer.attention.o_proj
    residual = watcher.residual + project(out.transpose(0, 2, 1, 3).reshape(1, T, -1))
    for head in range(2):
        alone = mx.zeros((1, 4, 5, D))
        alone[:, 2 * head : 2 * head + 2] = d[:, 0, 2 * head : 2 * head + 2]
        moved = project(alone.transpose(0, 2, 1, 3).reshape(5, -1))
        wanted = mx.square(moved).sum(axis=-1) / mx.square(residual[0, 7:12]).sum(axis=-1)
        assert mx.allclose(got[head, 0], wanted, rtol=1e-4)


def test_curves_fall_and_shorter_conversations_lose_less(monkeypatch):
    monkeypatch.setattr(calibrate, "FIRST_SPAN", 48)
    tokens = mx.random.randint(0, 100, (192,), key=mx.random.key(5)).tolist()
    profile = calibrate.calibrate(tiny_model("llama"), tokens, length=96)
    assert profile.grid == (12, 24, 48, 64, 96)
    assert profile.measured.spans == (48, 96)
    assert not profile.measured.packing  # rows of 12 have no groups
    for layer in profile.losses:
        for curve in layer:
            assert all(a >= b for a, b in pairwise(curve))
            assert curve[0] > 1e-6
            assert curve[-1] == 0
    assert (profile.measured.errors[:, :, 0, 2:] == 0).all()
    grid, short = profile.curves_upto(48)
    assert grid == (12, 24, 48)
    assert all(curve[-1] == 0 for curve in short)


def test_what_a_run_finished_is_kept_for_the_next(tmp_path):
    """A calibration that was stopped goes on where it was, and another begins anew."""
    model, path = tiny_model("llama"), tmp_path / "p.json.part"
    tokens = mx.random.randint(0, 100, (96,), key=mx.random.key(5)).tolist()

    def stop(done, whole):
        if path.exists() and len(path.read_text().splitlines()) == 2:  # a layer is done
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(model, tokens, progress=stop, checkpoint=CalibratedLayers(path))
    first, *layers = path.read_text().splitlines()
    assert len(layers) == 1
    # What is kept is believed, half a line is not.
    changed = json.loads(layers[0])
    changed[1]["data"] = changed[1]["data"].replace("A", "B")
    path.write_text("\n".join([first, json.dumps(changed), layers[0][:50]]))
    checkpoint = CalibratedLayers(path)
    gone_on = calibrate.calibrate(model, tokens, checkpoint=checkpoint)
    anew = calibrate.calibrate(model, tokens)
    assert gone_on.losses[0] != anew.losses[0]
    assert gone_on.losses[1] == anew.losses[1]
    assert len(path.read_text().splitlines()) == 3
    other = calibrate.calibrate(model, tokens[:-1], checkpoint=CalibratedLayers(path))
    assert other.losses == calibrate.calibrate(model, tokens[:-1]).losses
    checkpoint.end()
    assert not path.exists()


class Rope(nn.Module):
    """A block with a RoPE of its own."""

    def __init__(self, rope):
        super().__init__()
        self.attention = nn.Module()
        self.attention.rope = rope


class Stretched(nn.RoPE):
    """Makes keys longer, as YaRN does: two turns would do it twice."""

    def __call__(self, x, offset=0):
        return 1.1 * super().__call__(x, offset=offset)


def test_keys_are_turned_as_if_they_had_come_later():
    rope = nn.RoPE(D)
    raw = mx.random.normal((2, 3, 9, D), key=mx.random.key(0))
    keys = rope(raw, offset=4)
    turn = turning(Rope(rope), keys[:1, :, :1])
    assert mx.allclose(turn(keys, 500), rope(raw, offset=504), atol=1e-3)
    assert turning(Rope(Stretched(D)), keys[:1, :, :1]) is None
    assert turning(Rope(nn.Identity()), keys[:1, :, :1]) is None
    assert turning(nn.Module(), keys[:1, :, :1]) is None


def test_a_frame_for_a_longer_context_holds_keys_from_there():
    """Slow channels reach values there that they do not have in the first tokens."""
    rope, length = nn.RoPE(D, base=100), 64
    raw = 1 + 0.1 * mx.random.normal((4, 2, 8 * length, D), key=mx.random.key(1))
    later = rope(raw)
    keys = rope(raw[:, :, :length])
    turn = turning(Rope(rope), keys[:1, :, :1])
    frames = frames_of_keys(keys, turn, (length, 8 * length))
    outside = {}
    for context, (centre, scale) in frames.items():
        distance = np.abs(np.array(later) - centre[:, None]) / scale[:, None]
        outside[context] = (distance > 1.1).mean()
    assert outside[length] > 0.05 > 20 * outside[8 * length]
    as_they_are = frames_of_keys(keys, None, (length, 8 * length))
    assert (as_they_are[8 * length] == as_they_are[length]).all()


def test_with_attention_sinks_a_frame_has_no_centre():
    passes = mx.random.randint(0, 100, (2, 40), key=mx.random.key(2))
    frames = frames_of_text(tiny_model("gpt_oss"), passes, (512,))
    assert frames[512]
    assert all((frame[0] == 0).all() and (frame[1] > 1e-3).all() for frame in frames[512])
    plain = frames_of_text(tiny_model("qwen3"), passes, (512, 4096))
    assert all((frame[0] != 0).any() for frame in plain[512])


def test_a_calibrated_profile_shares_slots_out():
    tokens = mx.random.randint(0, 100, (96,), key=mx.random.key(6)).tolist()
    model = tiny_model("qwen3")
    profile = calibrate.calibrate(model, tokens)
    cache = make_prompt_cache(model, max_size=40, budgets=profile)
    slots = [entry.settings.filling[-1].budgets for entry in cache]  # once all is full
    assert len({b for of_layer in slots for b in of_layer}) > 1
    orders = [entry.settings.saturation for entry in cache]
    assert orders == [tuple(t) for t in profile.saturation(slots)]
    other = make_prompt_cache(model, max_size=40, budgets=profile, policy="h2o")
    assert {entry.settings.saturation for entry in other} == {4.0}
