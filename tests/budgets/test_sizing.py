"""A size in bytes for a whole model: bits and slots together, and everything within it."""

import json
import re
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_h2o import Spill, describe, make_policy, make_prompt_cache
from mlx_h2o._byte_size import Share, memory_size
from mlx_h2o.budgets.cost import LayerShare, RowWidths, slots_for_bytes
from mlx_h2o.budgets.plan import NEGLIGIBLE, Plan
from mlx_h2o.budgets.profile_store import found_profile, kept_place
from mlx_h2o.calibration.scaling_build import SUFFIX
from mlx_h2o.loading.identity import identity_of
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.slots.slot_store import FEW
from mlx_h2o.spill.setting import Returns
from tiny_models import prefill, prompt_tokens, tiny_model

#: Bytes of a token in a 16-bit cache of recall-4m: layers, heads, keys and values, bytes.
TOKEN = 4 * 2 * (64 + 64) * 2


@pytest.fixture(scope="module")
def text(embedded):
    return embedded[1].encode(SAMPLE_TEXT.read_text())[:400]


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (64_000_000, 64_000_000),
        ("64MB", 64_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("2kb", 2000),
        ("777", 777),
        ("25%", Share(0.25)),
        ("12.5 %", Share(0.125)),
    ],
)
def test_sizes_as_people_write_them(given, size):
    assert memory_size("max_bytes", given) == size


@pytest.mark.parametrize(
    "given", ["", "25", "many", "-3MB", "0%", "0", "3 PB", "1e9", 0, 0.25, True]
)
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ValueError, match="max_bytes"):
        memory_size("max_bytes", given)


def test_a_number_without_a_unit_may_be_meant_as_a_share():
    for given in ("25", " 12.5 "):
        with pytest.raises(ValueError, match=f'did you mean "{given.strip()}%"'):
            memory_size("max_bytes", given)


def options_of(cache):
    """Bits, slots and expected loss of each width that was weighed, the chosen one first."""
    out = []
    for option in cache[0].choice.split("; "):
        width, slots, loss = re.fullmatch(
            r"(\d+) bits: (\d+) slots, expected loss (\S+)", option
        ).groups()
        out.append((int(width), int(slots), float(loss)))
    return out


@pytest.mark.parametrize("size", ["6%", "12.5%", "25%", "50%", "100%", "400%"])
def test_of_widths_that_lose_hardly_more_the_one_with_most_slots_is_chosen(embedded, size):
    model, _ = embedded
    cache = make_prompt_cache(model, max_bytes=size, context=1024)
    (bits, slots, loss), *others = options_of(cache)
    losses = [loss for _, _, loss in others]
    assert losses == sorted(losses)
    assert len(losses) >= 3
    assert cache[0].packing.k_bits == (None if bits == 16 else bits)
    assert cache[0].settings.frame is not None or bits == 16
    assert "expected loss" in describe(cache)[0].reason
    least = min(loss, *losses)
    # Losses are told in three digits.
    assert loss <= least + 1.01 * NEGLIGIBLE
    for _, more, other in others:
        # Slots beyond the conversation are none.
        assert other > least + 0.99 * NEGLIGIBLE or min(more, 1024) <= min(slots, 1024)
    if slots >= 1024:
        assert loss == min(one for _, n, one in [(0, slots, loss), *others] if n >= 1024)


@pytest.mark.few(4)
@pytest.mark.parametrize("size", ["8%", "25%", "60%"])
@pytest.mark.parametrize("bits", [None, 6])
@pytest.mark.parametrize("undo", [0, 4])
def test_bytes_are_never_exceeded_at_any_length(embedded, text, size, bits, undo):
    model, _ = embedded
    most = int(memory_size("", size).part * 400 * TOKEN)
    cache = make_prompt_cache(model, max_bytes=size, context=400, bits=bits, undo=undo)
    for start in range(0, 400, 50):
        prefill(model, cache, text[start : start + 50], 25 if start < 300 else 1)
        assert sum(entry.nbytes for entry in cache) <= most
    if size == "8%":  # heads have had the time to fill what they were given
        assert sum(entry.nbytes for entry in cache) > 0.85 * most


@pytest.mark.few(3)
@pytest.mark.parametrize("size", ["20%", "40%"])
@pytest.mark.parametrize("step", [1, 7, 50])
def test_bytes_are_never_exceeded_with_a_file_of_rows(embedded, text, size, step, tmp_path):
    """What waits for the file, the last queries and the credits of returned rows count, too."""
    model, _ = embedded
    most = int(memory_size("", size).part * 400 * TOKEN)
    spill = Spill(tmp_path, returns=Returns(every=8, rows=64))
    options = {"context": 400, "bits": 6, "budgets": "uniform", "spill": spill}
    cache = make_prompt_cache(model, max_bytes=size, **options)
    repeated = text[:175] * 2  # of which the second half asks for the first
    for start in range(0, 350, step):
        model(mx.array([repeated[start : start + step]]), cache=cache)
        assert sum(entry.nbytes for entry in cache) <= most
    assert sum(entry.back.returned for entry in cache if entry.back is not None) > 0
    assert not cache[0].spill.failure


@pytest.mark.parametrize("size", ["8%", "25%", "60%"])
def test_slots_are_shared_out_anew_beside_a_file_too(embedded, text, size, tmp_path):
    """One layer of four has a file's bytes; the slots that are left are shared out as without."""
    model, _ = embedded
    most = int(memory_size("", size).part * 400 * TOKEN)
    alone, cache = (
        make_prompt_cache(model, max_bytes=size, context=400, spill=spill)
        for spill in (None, tmp_path)
    )
    assert [entry.spill is not None for entry in cache] == [False, False, False, True]
    assert len(alone[0].settings.filling) > 1
    assert len(cache[0].settings.filling) > 1
    fewer = sum(map(sum, (e.budgets for e in alone))) - sum(map(sum, (e.budgets for e in cache)))
    if cache[0].packing == alone[0].packing:
        assert 0 < fewer < 150  # of the two heads with a file: 12 rows that wait, queries, leases
    for start in range(0, 400, 50):
        prefill(model, cache, text[start : start + 50], 25 if start < 300 else 1)
        assert sum(entry.nbytes for entry in cache) <= most
    if size != "60%":
        assert sum(entry.nbytes for entry in cache) > 0.8 * most


@pytest.mark.parametrize("beside", [(0, 0, 0), (0, 500, 3000), (100, 100, 90)])
@pytest.mark.parametrize("keys", [(64, 64, 64), (64, 128, 64)])
@pytest.mark.parametrize("given", [10_000, 123_457, 10**6])
def test_a_model_s_bytes_are_used_up(beside, keys, given):
    """Layers share them where a slot costs all the same; otherwise each has its part."""
    policy = make_policy("salient")
    shares = [
        LayerShare(2, RowWidths(key, 64, 2, 2, spill_bytes=more, returning=64))
        for key, more in zip(keys, beside, strict=True)
    ]
    plan = Plan(shares, policy, True, True, max_bytes=given)
    slots = plan.slots_that_fit()

    def bytes_of(slots):
        return sum(
            share.heads * share.widths.cost(policy, True).of(n)
            for n, share in zip(slots, shares, strict=True)
        )

    if min(slots) == 0:
        assert plan.bytes_of(1) > given
        return
    assert bytes_of(slots) <= given
    assert plan.bytes_of(min(slots)) <= given
    assert plan.bytes_of(min(slots) + 1) > given
    if len(set(keys)) == 1:
        assert len(set(slots)) == 1
        assert bytes_of([n + 1 for n in slots]) > given
    else:
        for n, share in zip(slots, shares, strict=True):
            assert 2 * share.widths.cost(policy, True).of(n + 1) > given // 3


def test_credits_of_returned_rows_have_room():
    """As many as come back at once, and no more than there are slots."""
    policy = make_policy("salient")
    widths = RowWidths(64, 64, 2, 2)
    for slots, rows in ((200, 32), (20, 32), (200, 0)):
        more = 3 * replace(widths, returning=rows).cost(policy, True).of(slots)
        assert more - 3 * widths.cost(policy, True).of(slots) == 3 * 8 * min(slots, rows)
        assert slots_for_bytes(more, 3, replace(widths, returning=rows), policy, True) == slots


def test_a_short_chat_is_that_of_the_packed_full_cache(embedded, text):
    """Nothing is evicted before the bytes are full, so nothing differs but the packing."""
    model, _ = embedded
    options = {"bits": 6, "policy": "h2o"}
    bounded = make_prompt_cache(model, max_bytes="25%", context=400, **options)
    slots = bounded[0].budgets[0]
    assert {b for entry in bounded for b in entry.budgets} == {slots}
    roomy = make_prompt_cache(model, max_bytes="200%", context=400, **options)
    first, second = (prefill(model, cache, text[:slots], 16) for cache in (bounded, roomy))
    assert mx.allclose(first, second, atol=1e-4)
    assert all(entry.evicted == 0 for entry in bounded)
    prefill(model, bounded, text[slots:], 1)
    profile = found_profile(model, identity_of(model, [2] * 4, [64] * 4))
    shared = profile.budgets(slots, bounded[0].policy.least_budget() + 4)
    # Before positions need more bits.
    later = [[s for s in entry.settings.filling if s.beyond < FEW][-1] for entry in bounded]
    assert [list(stage.budgets) for stage in later] == shared
    assert all(entry.evicted > 0 for entry in bounded)


def test_with_undo_shares_are_final_at_once(embedded):
    """Tokens with a draft model are those without, whenever slots would be shared out anew."""
    model, _ = embedded
    cache = make_prompt_cache(model, max_bytes="25%", context=400, undo=4)
    assert all(entry.settings.filling == () for entry in cache)
    assert len({b for entry in cache for b in entry.budgets}) > 1


def framed_tiny(**changes):
    """A model without a profile whose rows have groups."""
    return tiny_model("qwen3", head_dim=32, **changes)


class Tokenizer:
    def encode(self, text):
        return [ord(letter) % 100 for letter in text]


def test_without_a_profile_frames_are_made_once_and_kept(capsys):
    model = framed_tiny()
    model.mlx_h2o_tokenizer = Tokenizer()
    even = {"max_bytes": 100_000, "budgets": "uniform"}  # asks for no profile
    cache = make_prompt_cache(model, **even)
    assert "Making frames" in capsys.readouterr().err
    assert cache[0].packing.k_bits == 6
    assert len(set(cache[0].budgets)) == 1
    place = kept_place(identity_of(model, [2, 2], [32, 32]), SUFFIX)
    before = place.read_text()
    again = make_prompt_cache(framed_tiny(), **even)
    assert "Making frames" not in capsys.readouterr().err
    assert np.allclose(again[0].settings.frame.scale, cache[0].settings.frame.scale, rtol=1e-3)
    prefill(model, again, prompt_tokens(90), 30)
    # A damaged file is made anew.
    data = json.loads(before)
    data["frames"]["512"] = []
    place.write_text(json.dumps(data))
    make_prompt_cache(model, **even)
    assert "Making frames" in capsys.readouterr().err
    assert place.read_text() == before


def test_without_key_scaling_keys_stay_dense_and_values_are_packed(capsys):
    size = {"max_bytes": 100_000}
    cache = make_prompt_cache(framed_tiny(), **size)
    assert (cache[0].packing.k_bits, cache[0].packing.v_bits) == (None, 6)
    assert cache[0].settings.frame is None
    assert "no key scaling" in cache[0].choice
    assert capsys.readouterr().err == ""
    dense = make_prompt_cache(framed_tiny(), **size, bits=16)
    assert cache[0].budgets[0] > dense[0].budgets[0]
    # Values that no group size divides stay dense, and so do those that are parts of the keys.
    assert not make_prompt_cache(tiny_model("qwen3"), **size)[0].packing.packs
    assert not make_prompt_cache(tiny_model("deepseek_v3"), **size)[0].packing.packs


def test_groups_divide_the_width_of_the_models_rows():
    """Phi-3's heads have 96 channels, StableLM's 80."""
    for width, said, group in (
        (32, {}, 32),
        (64, {}, 64),
        (96, {}, 32),
        (128, {"group_size": 128}, 128),
    ):
        model = tiny_model("qwen3", head_dim=width)
        cache = make_prompt_cache(model, 32, bits=4, **said)
        assert cache[0].packing.group_size == group
        prefill(model, cache, prompt_tokens(90), 30)
    with pytest.raises(ValueError, match=r"keys of width 96 .* groups of 128: .* 32 does"):
        make_prompt_cache(tiny_model("qwen3", head_dim=96), 32, bits=4, group_size=128)
    with pytest.raises(ValueError, match=r"keys of width 80 .* none does, so give k_bits=16"):
        make_prompt_cache(tiny_model("qwen3", head_dim=80), 32, bits=4)
    with pytest.raises(ValueError, match=r"values of width 80 .* none does, so give v_bits=16"):
        make_prompt_cache(tiny_model("qwen3", head_dim=80), 32, v_bits=4)


def test_what_was_said_is_not_chosen(embedded):
    model, _ = embedded
    for said in ({"bits": 16}, {"bits": 8}, {"k_bits": 4}):
        cache = make_prompt_cache(model, max_bytes="25%", context=400, **said)
        assert cache[0].choice == ""
        (bits,) = said.values()
        assert cache[0].packing.k_bits == (None if bits == 16 else bits)
    assert make_prompt_cache(model, 100)[0].choice == ""
