"""Caches of an evaluation: mlx-lm's own and ours at equal bytes, side by side; facts asked for."""

import math
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

import mlx_h2o
from mlx_h2o.budgets.cost import PLAIN_ELEMENT
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.facts import CLOZE, is_known, recall_task
from mlx_h2o.evaluate.measures.needles import NeedleMeasure
from mlx_h2o.evaluate.measures.perplexity import Perplexity, perplexity, samples_of
from mlx_h2o.evaluate.methods import (
    FULL,
    PACKED,
    WINDOW,
    Method,
    default_methods,
    parse_method,
    share_label,
    sized,
)
from mlx_h2o.evaluate.reader import Reader, no_progress, read
from mlx_h2o.evaluate.side_by_side import can_share, side_by_side
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.loading.load import MODELS, SAMPLE_TEXT
from tiny_models import tiny_model


def test_perplexity_through_a_full_cache_is_that_of_one_pass():
    """Token by token or whole: the same numbers, and only tokens after the prefill count."""
    model = tiny_model("llama")
    mx.random.seed(3)
    samples = mx.random.randint(0, 100, (3, 40))
    got = perplexity(model, stock_prompt_cache(model), samples, prefill=10)
    logits = model(samples)
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    of_next = mx.take_along_axis(logp[:, 9:-1], samples[:, 10:, None], axis=-1)
    for nll, expected in zip(got.nll, (-of_next.mean(axis=(1, 2))).tolist(), strict=True):
        assert nll == pytest.approx(expected, abs=1e-4)
    assert got.value == pytest.approx(math.exp(sum(got.nll) / 3))


def test_loss_is_relative():
    assert Perplexity([math.log(11)]).loss_against(Perplexity([math.log(10)])) == pytest.approx(0.1)


def test_samples_cover_the_text_from_end_to_end():
    samples = samples_of(range(100, 200), 3, 21, bos=7)
    assert samples[:, 0].tolist() == [7, 7, 7]
    assert samples[:, 1].tolist() == [100, 140, 180]
    assert samples[-1, -1].item() == 199
    with pytest.raises(ValueError, match="longer text"):
        samples_of(range(10), 1, 12, bos=7)


def test_recall_prompts_are_what_they_say(embedded):
    """All of one length, ending in the question; the asked fact stands where it is said to."""
    _, tokenizer = embedded
    task = recall_task(tokenizer, SAMPLE_TEXT.read_text(), prompts=6, tokens=300, seed=5)
    assert task.prompts.shape == (6, 300)
    for row, at, answer, distance in zip(
        task.prompts.tolist(), task.questions, task.answers, task.distances, strict=True
    ):
        assert tokenizer.decode(row[at:]).startswith("Question:")
        assert tokenizer.decode(row).endswith("Answer:")
        fact = tokenizer.decode(row[at - distance :]).split("\n")[0]
        assert tokenizer.decode(list(answer)).strip() in fact
    again = recall_task(tokenizer, SAMPLE_TEXT.read_text(), prompts=6, tokens=300, seed=5)
    assert (again.prompts == task.prompts).all()
    other = recall_task(tokenizer, SAMPLE_TEXT.read_text(), prompts=6, tokens=300, seed=6)
    assert not (other.prompts == task.prompts).all()


def test_a_cloze_asks_in_the_statements_own_words(embedded):
    """The fact's sentence is to be completed, after other words; its number comes only once."""
    _, tokenizer = embedded
    task = recall_task(tokenizer, SAMPLE_TEXT.read_text(), prompts=4, tokens=300, form=CLOZE)
    assert task.least == 0.5
    for row, at, answer in zip(task.prompts.tolist(), task.questions, task.answers, strict=True):
        prose, cue = tokenizer.decode(row[:at]), tokenizer.decode(row[at:])
        sentence = cue.split(". ")[1]
        number = tokenizer.decode(list(answer))
        assert f"{sentence}{number}." in prose
        assert number not in cue
        assert not cue.startswith(sentence)
        assert prose.count("The secret number of") == CLOZE.planted == 1


def test_known_is_the_likeliest_or_more_likely_than_half():
    logits = mx.log(mx.array([[0.4, 0.3, 0.3], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6]]))
    right = mx.array([0, 1, 1])
    assert is_known(logits, right, 0.0).tolist() == [True, True, False]
    assert is_known(logits, right, 0.5).tolist() == [False, True, False]


@pytest.mark.parametrize(("name", "bits"), PACKED.items())
def test_mlx_lms_packed_caches_are_its_own(name, bits):
    model = tiny_model("llama", hidden_size=256)
    tokens = mx.random.randint(0, 100, (2, 40), key=mx.random.key(1))
    cache = Method(name).make(model, 16)
    got = model(tokens, cache=cache)
    packed = [QuantizedKVCache(group_size=64, bits=bits) for _ in model.layers]
    assert (got == model(tokens, cache=packed)).all()
    assert (cache[0].keys[0] == packed[0].keys[0]).all()


def test_the_model_recalls_with_everything_in_view():
    """Whatever the batch and the chunk, the same answers are right."""
    text = SAMPLE_TEXT.read_text()
    runs = []
    for batch, chunk in ((5, 64), (2, 1000), (3, 16)):
        reader = Reader("builtin:recall-4m", text, "questions", chunk)
        measure = NeedleMeasure((200,), of_each=1, kinds=("single",), batch=batch)
        runs.append(measure.of(reader, Method(FULL), no_progress)["records"])
    assert runs[0] == runs[1] == runs[2]
    assert sum(record["known"][0] for record in runs[0]) >= 8


@pytest.mark.slow
def test_caches_side_by_side_are_each_as_alone(embedded):
    """The same nats, whatever reads the other parts of the batch."""
    model, _ = embedded
    mx.random.seed(5)
    samples = mx.random.randint(0, 100, (2, 120))
    methods = [Method(FULL), Method(WINDOW, tokens=48), *map(Method, PACKED)]
    mlx_h2o.uninstall()  # as a process begins that only mlx-lm's own caches came to
    joined = side_by_side([method.make(model, 120) for method in methods])
    got = perplexity(model, joined, mx.tile(samples, (len(methods), 1)), prefill=40).nll
    assert len({round(nll, 4) for nll in got[::2]}) == len(methods)
    added = default_methods(["mlx-h2o:bits=16", "h2o:bits=6", "h2o:bits=6:remainder=false"])[4:]
    methods += sized(added, tokens=[48])
    alone = [perplexity(model, m.make(model, 120), samples, prefill=40).nll for m in methods]
    joined = side_by_side([method.make(model, 120) for method in methods])
    got = perplexity(model, joined, mx.tile(samples, (len(methods), 1)), prefill=40).nll
    assert got == pytest.approx([nll for of_method in alone for nll in of_method], abs=1e-3)


def test_a_prompt_beyond_the_window_reads_side_by_side(embedded):
    """Masks of a first chunk that the window does not hold are each cache's own."""
    model, _ = embedded
    tokens = mx.random.randint(0, 100, (1, 90), key=mx.random.key(3))
    methods = [
        Method(FULL),
        Method(WINDOW, tokens=48),
        replace(parse_method("mlx-h2o:bits=16"), tokens=48),
    ]
    caches = [method.make(model, 90) for method in methods]
    got = model(mx.tile(tokens, (3, 1)), cache=side_by_side(caches))
    for i, method in enumerate(methods):
        alone = model(tokens, cache=method.make(model, 90))
        assert mx.allclose(got[i : i + 1], alone, atol=1e-3)


def test_what_keeps_more_than_rows_is_read_alone():
    assert can_share(Method(WINDOW).make(tiny_model("llama"), 16))
    assert not can_share([ArraysCache(2)])


def test_bounded_caches_come_once_for_each_size():
    methods = sized(default_methods(["h2o"]), [0.5, 0.125], [64])
    assert [method.name for method in methods[:3]] == [FULL, *PACKED]
    windows = [method for method in methods if method.label == WINDOW]
    assert [method.name for method in windows] == [
        f"{WINDOW}, {size}" for size in ("1/2", "1/8", "64 tokens")
    ]
    model = tiny_model("llama")
    assert [method.make(model, 96)[0].max_size for method in windows] == [48, 12, 64]
    assert len({method.name for method in methods}) == len(methods) == 3 + 3 * 3
    for wrong in ({"shares": [1.0]}, {"shares": [0]}, {"tokens": [48, 0]}):
        with pytest.raises(ValueError, match=r"between 0 and 1|at least 1"):
            sized(methods, **wrong)


def test_a_method_as_it_is_written():
    method = parse_method("h2o:recent=64:remainder=false:bits=8")
    assert (method.policy, method.remainder, method.budgets) == ("h2o:recent=64", False, "uniform")
    assert dict(method.settings) == {"bits": 8}
    assert parse_method("mlx-h2o:recent=64").policy == "salient:recent=64"
    assert parse_method("salient:budgets=profile").budgets is None
    assert "bits by bytes" in parse_method("mlx-h2o:budgets=uniform").described()
    assert "bits" not in parse_method("mlx-h2o:bits=16").described()
    for wrong in ("nonsense", "h2o:sonk=3", "h2o:sink"):
        with pytest.raises(ValueError, match=r"nonsense|no field sonk|FIELD=VALUE"):
            parse_method(wrong)
    assert [share_label(share) for share in (0.25, 1 / 3, 0.3)] == ["1/4", "1/3", "30%"]


def test_the_losss_error_is_that_of_paired_samples():
    full, worse = Perplexity([1.0, 2.0, 3.0]), Perplexity([1.1, 2.1, 3.4])
    assert worse.error_against(full) == pytest.approx(0.1)
    assert Perplexity([1.0]).error_against(Perplexity([1.0])) is None


# Keys and values of a token in the embedded model: 4 layers of 2 heads of 64.
NUMBERS = 4 * 2 * 2 * 64


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_every_bounded_cache_gets_the_windows_bytes(dtype):
    """Those that a 16-bit model has, in whatever this one computes."""
    model = tiny_model("llama", dtype=dtype, hidden_size=256)
    tokens = mx.zeros((1, 150), dtype=mx.int32)

    def nbytes(method):
        cache = replace(method, tokens=64).make(model, 151)
        mx.eval(model(tokens, cache=cache))
        mx.eval(model(tokens[:, :1], cache=cache))
        return bytes_in_16_bits(cache)

    specs = (
        "h2o keydiff streaming h2o:bits=8 h2o:bits=4 h2o:k_bits=8:v_bits=4 h2o:remainder=false "
        "h2o:bits=4:recent_bits=16 distinct:bits=8:undo=2 mlx-h2o:bits=16"
    ).split()
    methods = [method for method in default_methods(specs) if method.policy is not None]
    assert len(methods) == 1 + len(specs)
    budget = nbytes(Method(WINDOW))
    numbers = sum(k.heads * (k.widths.key + k.widths.value) for k in layer_kinds(model))
    assert budget == 64 * numbers * PLAIN_ELEMENT
    for method in methods:
        assert 0.9 * budget < nbytes(method) <= budget, method.name


@pytest.mark.parametrize("sequences", [1, 3])
def test_pages_of_reserved_memory_are_counted_as_they_are_used(embedded, sequences):
    """Dense rows of 32 bits count half, and of a range of pages only those in use count at all."""
    model, _ = embedded
    method = parse_method("salient:budgets=profile")
    tokens = mx.random.randint(0, 100, (sequences, 512), key=mx.random.key(1))
    cache = replace(method, share=0.5).make(model, 512)
    read(model, cache, tokens, 128, no_progress)
    nbytes = bytes_in_16_bits(cache, sequences)
    rows = sum(entry.store.nbytes_of(of) for entry in cache for of in ("keys", "values"))
    assert nbytes == pytest.approx(
        (sum(entry.nbytes for entry in cache) - rows / 2) / sequences, rel=0.01
    )
    assert 0.35 < nbytes / (512 * NUMBERS * PLAIN_ELEMENT) <= 0.5


def test_several_ways_to_share_slots_out_stand_beside_each_other(embedded):
    model, _ = embedded
    profile = str(MODELS / "recall-4m" / "mlx_h2o_profile.json")
    by_profile, even = map(parse_method, (f"mlx-h2o:budgets={profile}", "mlx-h2o:budgets=uniform"))
    assert "mlx_h2o_profile.json" in by_profile.described()
    assert "uniform" in even.described()
    made = replace(even, tokens=64).make(model, 256)
    assert [len(set(entry.budgets)) for entry in made] == [1] * len(made)
    with pytest.raises(ValueError, match="Cannot read the profile"):
        default_methods(budgets="none.json")
    with pytest.raises(ValueError, match="Cannot read the profile"):
        parse_method("mlx-h2o:budgets=none.json")


def test_what_holds_everything_is_counted_in_16_bits(embedded):
    """A packed cache is not twice as small as it is because this machine computes in float32."""
    model, _ = embedded
    held = {}
    for name in (FULL, *PACKED):
        cache = Method(name).make(model, 64)
        mx.eval(model(mx.zeros((1, 256), mx.int32), cache=cache))
        held[name] = bytes_in_16_bits(cache)
    assert held[FULL] == 256 * NUMBERS * PLAIN_ELEMENT
    # A scale and a bias of 16 bits for each 64 numbers.
    of_16 = {name: (bits + 32 / 64) / 16 for name, bits in PACKED.items()}
    assert {name: held[name] / held[FULL] for name in PACKED} == pytest.approx(of_16)


def test_mlx_lms_packed_caches_have_groups_that_fit_the_heads():
    """Of 64 where they can; heads of 96 have 32, and heads of 12 none."""
    for hidden, group in ((256, 64), (384, 32)):
        model = tiny_model("llama", hidden_size=hidden)
        cache = Method("mlx-lm, 4 bits").make(model, 64)
        mx.eval(model(mx.zeros((1, 8), mx.int32), cache=cache))
        assert {entry.group_size for entry in cache} == {group}
    with pytest.raises(ValueError, match=r"mlx-lm, 4 bits: .* too narrow"):
        Method("mlx-lm, 4 bits").make(tiny_model("llama"), 64)
