"""Compressed prompts: what a second reading looks at is kept, and everything fits its bytes."""

import json
import re
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.chat.dialogue import Dialogue
from mlx_h2o.chat.pin_rules import PinRules, spans_for
from mlx_h2o.cli import main
from mlx_h2o.compression import reading, twice
from mlx_h2o.compression.compress import compress_into
from mlx_h2o.compression.reading import read_prompt
from mlx_h2o.compression.second_reading import SecondReading, looking_caches
from mlx_h2o.compression.twice import Reading, own_slots, shared_out
from mlx_h2o.loading.load import SAMPLE_TEXT
from tiny_models import Characters, kept_positions, tiny_model

EMBEDDED = ["--model", "builtin:recall-4m"]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompt():
    return mx.random.randint(0, 100, (2, 70), key=mx.random.key(4))


def second_reading(model, prompt, repeat, chunk):
    """A bounded cache that has read a prompt, and what a second reading gives in each layer."""
    cache = make_prompt_cache(model, 80, budgets="uniform", policy="h2o")
    model(prompt, cache=cache)
    looks = [SecondReading(entry.layer, 0) for entry in cache]
    request = mx.broadcast_to(mx.array([repeat]), (prompt.shape[0], len(repeat)))
    for first in range(0, prompt.shape[1], chunk):
        again = mx.concatenate([request, prompt[:, first : first + chunk]], axis=1)
        mx.eval(model(again, cache=looking_caches(cache, looks)))
    return cache, looks


@pytest.mark.parametrize("chunk", [9, 70])
def test_a_second_reading_changes_nothing(model, prompt, chunk):
    cache, looks = second_reading(model, prompt, [3, 1, 4], chunk)
    plain = stock_prompt_cache(model)
    model(prompt, cache=plain)
    for entry, full, look in zip(cache, plain, looks, strict=True):
        assert entry.offset == 70
        (run,) = entry.store.runs
        assert mx.allclose(entry.store.view(run, "keys"), full.keys[..., :70, :], atol=1e-4)
        (worth,) = look.worths
        assert worth.shape == (2, 2, 70)
        assert mx.all((worth > 0) & (worth <= 1))


def test_worths_are_those_of_one_pass_over_everything(prompt):
    """The first layer's, by hand: its queries and keys do not depend on what is attended to."""
    model, repeat = tiny_model("llama", num_hidden_layers=1), [3, 1, 4]
    _, (look,) = second_reading(model, prompt, repeat, 70)
    whole = mx.concatenate([prompt, mx.broadcast_to(mx.array([repeat]), (2, 3)), prompt], axis=1)
    attention = model.layers[0].self_attn
    x = model.layers[0].input_layernorm(model.model.embed_tokens(whole))
    B, L, _ = x.shape
    heads, groups = attention.n_kv_heads, attention.n_heads // attention.n_kv_heads
    q = attention.q_proj(x).reshape(B, L, attention.n_heads, -1).transpose(0, 2, 1, 3)
    k = attention.k_proj(x).reshape(B, L, heads, -1).transpose(0, 2, 1, 3)
    q, k = np.array(attention.rope(q)), np.array(attention.rope(k))
    for h in range(heads):
        of_head = q[:, h * groups : (h + 1) * groups]
        logits = np.einsum("bgld,bnd->bgln", of_head, k[:, h]) * attention.scale
        logits[:, :, ~np.tri(L, dtype=bool)] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = weights[:, :, 70:, :70].max(axis=(1, 2))
        assert np.allclose(np.array(look.worths[0][:, h]), expected, atol=1e-4)


@pytest.mark.parametrize("fitted", [True, False])
def test_queries_are_kept_only_to_fit_values_by(prompt, fitted, monkeypatch, tmp_path):
    model, looks = tiny_model("llama"), []

    class Noted(SecondReading):
        def __init__(self, *given):
            super().__init__(*given)
            looks.append(self)

    monkeypatch.setattr(twice, "SecondReading", Noted)
    for spill in (None, tmp_path):
        cache = make_prompt_cache(model, 40, budgets="uniform", spill=spill)
        compress_into(cache, model, Characters(), prompt[:1], Reading(fitted=fitted))
    assert [look.fits for look in looks] == [fitted] * 2 + [False] * 2


def test_slots_beyond_a_heads_own_go_to_the_best_rows_of_all():
    rng = np.random.default_rng(2)
    worths = [rng.random((2, 30)) * scale for scale in (1.0, 5.0, 0.1)]
    worths = [-np.sort(-of_layer, axis=1) for of_layer in worths]
    counts = shared_out(worths, 60, np.full(6, 4))
    assert sum(map(sum, counts)) == 60
    assert min(map(min, counts)) == 4
    # Where no head has its own slots it is a plain choice of the best sixty.
    counts = shared_out(worths, 60, np.zeros(6, int))
    best = np.sort(np.concatenate(worths), axis=None)[-60]
    assert counts == [[int((row >= best).sum()) for row in layer] for layer in worths]
    assert shared_out(worths, 10**6, np.full(6, 4)) == [[30, 30]] * 3


@pytest.mark.parametrize("least", [0, 4, 9])
def test_a_head_keeps_half_of_its_planned_slots(least):
    planned = [40, 12, 4, 4]
    own = own_slots(planned, 60, least)
    assert own.sum() <= 60
    assert own.min() >= least
    beyond = np.maximum(np.array(planned) - least, 0)
    ideal = least + (60 - 4 * least) / 2 * beyond / beyond.sum()
    assert np.all((own <= ideal) & (own > ideal - 1))
    # Rows that nothing attends to do not take a head's own slots away, nor give it more.
    worths = [np.zeros((1, 50)), np.full((3, 50), 0.5)]
    counts = shared_out(worths, 60, own)
    assert counts[0] == [own[0]]
    assert sum(map(sum, counts)) == 60


def test_what_is_worth_most_is_kept_and_the_rest_goes_on_answering(prompt):
    model, request = tiny_model("llama"), mx.array([Characters().encode(twice.REPEAT)])
    # Read as the compressor reads it: packed rows, before any is dropped.
    whole = make_prompt_cache(model, max_bytes="60%", context=70)
    for entry in whole:
        entry.resize([80] * 2)
    model(prompt, cache=whole)
    looks = [SecondReading(entry.layer, 0) for entry in whole]
    again = mx.concatenate([mx.broadcast_to(request, (2, request.shape[1])), prompt], axis=1)
    mx.eval(model(again, cache=looking_caches(whole, looks)))
    cache = mlx_h2o.compress_prompt(model, Characters(), prompt, "60%", room=5)
    for entry, look in zip(cache, looks, strict=True):
        assert entry.offset == 70
        worth = mx.concatenate(look.worths, axis=1)
        for run in entry.store.runs:
            positions = np.array(entry.slots(run).positions)
            for h in range(run.heads):
                count = positions.shape[2]
                assert run.budget == count + 5
                for b in range(2):
                    of_head = np.array(worth[b, run.first + h])
                    best = set(range(4)) | set(
                        (4 + np.argsort(-of_head[4:], kind="stable"))[: count - 4].tolist()
                    )
                    assert set(positions[b, h].tolist()) == best
                lost = entry.remainder.count[:, run.first + h]
                assert lost.tolist() == [70 - count] * 2


def test_nothing_cut_is_the_full_cache(model, prompt):
    """With room for every row the model goes on as from a full cache."""
    plain = stock_prompt_cache(model)
    model(prompt, cache=plain)
    cache = mlx_h2o.compress_prompt(
        model, Characters(), prompt, 10**7, bits=16, room=8, policy="h2o"
    )
    for token in range(4):
        ids = mx.array([[token + 1], [token + 2]])
        assert mx.allclose(model(ids, cache=cache), model(ids, cache=plain), atol=1e-3)


@pytest.mark.parametrize("bits", [16, 6])
def test_it_takes_no_more_than_it_may(bits):
    model, tokenizer = mlx_h2o.load("builtin:recall-4m")
    text = SAMPLE_TEXT.read_text()[:1600]
    full = stock_prompt_cache(model)
    tokens = tokenizer.encode(text)
    model(mx.array([tokens]), cache=full)
    # The embedded model computes in float32 on a CPU: twice what a 16-bit cache takes.
    element = 2 if full[0].keys.dtype == mx.float32 else 1
    rows = len(tokens) * full[0].keys.shape[1] * 2 * full[0].keys.shape[3] * full[0].keys.dtype.size
    held = len(full) * rows
    cache = mlx_h2o.compress_prompt(model, tokenizer, text, "40%", bits=bits)
    assert sum(entry.nbytes for entry in cache) <= 0.4 * held / element
    assert sum(entry.evicted for entry in cache) > 0


def test_a_compressed_cache_is_saved_as_any_other(model, prompt, tmp_path):
    """C and Swift read what they read of caches that were filled token by token."""
    compressed = mlx_h2o.compress_prompt(model, Characters(), prompt, "60%", room=4)
    usual = mlx_h2o.make_prompt_cache(model, max_bytes="60%", context=70)
    model(prompt, cache=usual)
    for one, other in zip(compressed, usual, strict=True):
        assert one.config().keys() == other.config().keys()
        assert one.config()["policy"] == other.config()["policy"]
        assert one.arrays().keys() - other.arrays().keys() == set()
    file = tmp_path / "compressed.safetensors"
    mlx_h2o.save_prompt_cache(file, compressed)
    again = mlx_h2o.load_prompt_cache(file)
    ids = mx.array([[1], [2]])
    for _ in range(8):  # beyond the room
        assert mx.allclose(model(ids, cache=compressed), model(ids, cache=again), atol=1e-5)


def test_a_later_turn_is_read_twice_too(model, prompt):
    """What was there stays in proportion, and goes on answering."""
    cache = make_prompt_cache(model, 40, budgets="uniform")
    first, later = prompt[:1, :30], prompt[:1, 30:]
    compress_into(cache, model, Characters(), first, Reading(room=4, within=True))
    compress_into(cache, model, Characters(), later, Reading(room=4, within=True))
    for entry in cache:
        assert entry.offset == 70
        for head in kept_positions(entry):
            older = [position for position in head if position < 30]
            assert set(range(4)) <= set(older)
            assert 5 < len(older) < 25
            assert len(head) > len(older) + 5
    assert sum(map(sum, (entry.budgets for entry in cache))) <= 40 * 4
    model(mx.array([[5]]), cache=cache)


def test_a_reading_that_stops_leaves_the_cache_within_its_bound(prompt):
    """The client went away, or the second reading would take too long."""
    model, tokens = tiny_model("llama"), prompt[:1]
    usual = make_prompt_cache(model, 30, budgets="uniform")
    model(tokens, cache=usual)
    slow, stopped = (make_prompt_cache(model, 30, budgets="uniform") for _ in range(2))
    limited = Reading(seconds=0.0)
    done = list(twice.read_twice(model, Characters(), tokens, slow, limited))
    assert sum(done) == 2 * 70
    reader = twice.read_twice(model, Characters(), tokens, stopped, Reading(chunk=8))
    for _ in range(5):
        next(reader)
    reader.close()
    for entry, other, short in zip(slow, usual, stopped, strict=True):
        assert entry.budgets == other.budgets == short.budgets
        assert entry.offset == 70
        assert short.offset == 40
        assert entry.size() == other.size() >= short.size()
    ids = mx.array([[5]])
    assert mx.all(mx.isfinite(model(ids, cache=slow))) & mx.all(
        mx.isfinite(model(ids, cache=stopped))
    )


def test_only_what_the_memory_does_not_hold_is_read_twice(prompt):
    model, tokens = tiny_model("llama"), prompt[0].tolist()
    for how, slots, count in (
        ("twice", 40, 54), ("auto", 40, 54), ("once", 40, 0), ("twice", 80, 0),
    ):  # fmt: skip
        cache = make_prompt_cache(model, slots, budgets="uniform")
        done = list[tuple[int, int]]()
        progress = partial(lambda told, *at: told.append(at), done)
        read = read_prompt(model, Characters(), tokens, cache, how, progress)
        assert read == ((count, 2) if count else (0, 1))
        assert count == cache[0].offset
        assert not count or done[-1] == (2 * count, 2 * count)
        assert sum(map(sum, (entry.budgets for entry in cache))) <= slots * 4
    rolling = make_prompt_cache(model, 40, budgets="uniform", positions="rolling")
    small = make_prompt_cache(model, 18, budgets="uniform")
    for cache, why in ((rolling, "omit positions"), (small, "too few to keep")):
        assert read_prompt(model, Characters(), tokens, cache, "auto") == (0, 1)
        with pytest.raises(ValueError, match=why):
            read_prompt(model, Characters(), tokens, cache, "twice")
        assert cache[0].offset == 0


def test_auto_stops_before_a_second_reading_that_takes_too_long(model, prompt, monkeypatch):
    monkeypatch.setattr(reading, "SECONDS", 0.0)
    cache = make_prompt_cache(model, 40, budgets="uniform")
    assert read_prompt(model, Characters(), prompt[0].tolist(), cache, "auto") == (54, 1)
    assert cache[0].offset == 54


def test_commands_read_long_prompts_twice(capsys):
    """What one reading forgets is known after two."""
    fact = "The secret number of Mary Lane is"
    prompt = f"It was no longer a secret to us. {fact} 5231.\n\n{SAMPLE_TEXT.read_text()[:2000]}"
    prompt += f"\n\nNow I shall say what I remember. {fact}"
    told = {}
    for how in ("once", "twice", "auto"):
        assert main(["generate", *EMBEDDED, "-p", prompt, "-m", "6", "--max-kv-size", "80",
                     "--reading", how, "--json"]) == 0  # fmt: skip
        told[how] = json.loads(capsys.readouterr().out)
    assert [report["prompt_readings"] for report in told.values()] == [1, 2, 2]
    assert told["twice"]["tokens"] == told["auto"]["tokens"]
    assert told["once"]["prompt_tokens"] == told["twice"]["prompt_tokens"] > 300
    assert "5231" in told["twice"]["text"]
    assert "5231" not in told["once"]["text"]


def test_room_within_is_taken_off_the_size(model, prompt):
    sizes = []
    for room, within in ((0, False), (6, True), (6, False)):
        cache = mlx_h2o.make_prompt_cache(model, max_bytes="60%", context=70)
        reading = Reading(room=room, within=within)
        compress_into(cache, model, Characters(), prompt, reading)
        sizes.append(sum(sum(entry.budgets) for entry in cache))
    heads = sum(len(entry.budgets) for entry in cache)
    assert sizes == [sizes[0], sizes[0], sizes[0] + 6 * heads]
    empty = mlx_h2o.make_prompt_cache(model, max_bytes="60%", context=70)
    reading = Reading(room=60, within=True)
    with pytest.raises(ValueError, match="too few to keep"):
        compress_into(empty, model, Characters(), prompt, reading)


def test_room_is_used_before_anything_goes(model, prompt):
    cache = mlx_h2o.compress_prompt(model, Characters(), prompt, "60%", room=6)
    before = [entry.evicted for entry in cache]
    for token in range(6):
        model(mx.array([[token], [token]]), cache=cache)
    assert [entry.evicted for entry in cache] == before
    model(mx.array([[1], [1]]), cache=cache)
    model(mx.array([[1], [1]]), cache=cache)
    assert [entry.evicted for entry in cache] > before


def test_models_that_attend_by_themselves_are_refused(prompt):
    model, settings = tiny_model("gemma2_by_itself"), {"budgets": "uniform", "policy": "keydiff"}
    with pytest.raises(ValueError, match=r"read twice or compressed|attends by itself"):
        mlx_h2o.compress_prompt(model, Characters(), prompt, 10**6, **settings)


@pytest.mark.parametrize(
    ("prompt", "settings", "text"),
    [
        ("", {}, "prompt is empty"),
        ("some words", {"room": -1}, "room"),
        ("some words", {"chunk": 0}, "chunk"),
        ("some words", {"max_bytes": 10**6, "positions": "rolling"}, "positions"),
        ("some words of a prompt", {"max_bytes": 10}, "too small"),
    ],
)
def test_what_cannot_be_is_refused(prompt, settings, text):
    with pytest.raises(ValueError, match=text):
        mlx_h2o.compress_prompt(tiny_model("llama"), Characters(), prompt, **settings)


def compressed(folder, text, *options):
    """The exit code of `mlx_h2o compress`, which writes doc.safetensors of a text."""
    (folder / "text.txt").write_text(text)
    files = [str(folder / "text.txt"), "--out", str(folder / "doc.safetensors")]
    return main(["compress", *EMBEDDED, *files, *options])


def test_the_command_writes_a_cache_that_generate_goes_on_from(tmp_path, capsys):
    out, text = tmp_path / "doc.safetensors", SAMPLE_TEXT.read_text()[:1500]
    assert compressed(tmp_path, text, "--to", "50%", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kv_bytes"] < told["full_bytes"]
    cache, metadata = mlx_h2o.load_prompt_cache(out, return_metadata=True)
    assert metadata["compressed"] == "50%"
    # A chat goes on with it, here and in Swift.
    model, tokenizer = mlx_h2o.load("builtin:recall-4m")
    dialogue = Dialogue(model, tokenizer, lambda: mlx_h2o.make_prompt_cache(model, max_size=64))
    dialogue.load(out, "builtin:recall-4m")
    assert len(dialogue.tokens) == told["tokens"]
    assert cache[0].offset == told["tokens"]
    resumed = ["generate", *EMBEDDED, "--prompt-cache-file", str(out), "--prompt", "The"]
    assert main([*resumed, "-m", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context_tokens"] > told["tokens"]
    assert compressed(tmp_path, " ") == 2
    assert compressed(tmp_path, text, "--system") == 2
    assert "chat template" in capsys.readouterr().err


def test_the_command_keeps_what_is_pinned(tmp_path, capsys):
    """By text, pattern and tokens; counted against --to, in the file, and while it is gone on."""
    out = tmp_path / "doc.safetensors"
    text = SAMPLE_TEXT.read_text()[:1500] + ". The Fee shall mean ten ducats."
    rules = PinRules(patterns=("shall mean",), spans=((30, 40),))
    model, tokenizer = mlx_h2o.load("builtin:recall-4m")
    tokens = tokenizer.encode(text)
    spans = spans_for(rules, tokenizer, tokens)
    wanted = {p for span in spans for p in range(*span)}

    def kept(*options):
        assert compressed(tmp_path, text, "--to", "25%", "--json", *options) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["kv_bytes"] <= 0.25 * told["full_bytes"]
        return told, mlx_h2o.load_prompt_cache(out)

    def holds(cache):
        return all(wanted <= set(head) for entry in cache for head in kept_positions(entry))

    told, cache = kept("--pin-pattern", "shall mean", "--pin-span", "30:40")
    assert told["pinned"] == len(wanted) > 18
    assert holds(cache)
    assert all(entry.pins == spans for entry in cache)
    before = sum(entry.evicted for entry in cache)
    model(mx.array([tokens[:300]]), cache=cache)
    mlx_h2o.save_prompt_cache(out, cache)
    again = mlx_h2o.load_prompt_cache(out)
    assert sum(entry.evicted for entry in again) > before
    assert holds(again)
    told, cache = kept()
    assert told["pinned"] == 0
    assert not holds(cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pin-span", "0:400"], r"396 pinned tokens are too many.* Pin at most \d+ to.*--to"),
        (["--pin-span", "3:9999"], r"3:9999 cannot be pinned: the prompt has \d+ tokens"),
        (["--pin", "no such words"], "does not contain 'no such words'"),
        (["--pin-role", "system"], "no system message"),
        (["--pin-pattern", "("], "no regular expression"),
    ],
)
def test_pins_that_cannot_be_are_refused_and_write_nothing(options, message, tmp_path, capsys):
    assert compressed(tmp_path, SAMPLE_TEXT.read_text()[:1500], *options) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "doc.safetensors").exists()


def test_a_system_prompt_can_be_pinned_whole(tmp_path, monkeypatch):
    """By its role, which --system gives it."""
    model, tokenizer = mlx_h2o.load("builtin:recall-4m")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    )
    tokenizer.has_chat_template = True
    monkeypatch.setattr("mlx_h2o.cli.options.load", lambda *_: (model, tokenizer))
    options = ["--system", "--pin-role", "system", "--to", "500KB"]
    assert compressed(tmp_path, "Anne and Toby went home.", *options) == 0
    (span,) = mlx_h2o.load_prompt_cache(tmp_path / "doc.safetensors")[0].pins
    assert span[0] == 0
    assert span[1] > len(tokenizer.encode("Anne and Toby went home.")) - 1
