"""`python -m benchmarks`: turns and statistics by property, and the command."""

import json
import os
import statistics
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import attention, figures, machine, model, products
from benchmarks.__main__ import DTYPES, cases_of, main
from benchmarks.layers import full_layer
from benchmarks.measuring import Samples, in_turns, summary, timed
from benchmarks.report import Report, meaning
from mlx_h2o.attention.backends import choice
from mlx_h2o.attention.ops import scaled_dot_product_attention_with_scores
from mlx_h2o.cli.tables import show
from mlx_h2o.evaluate import machine as described
from mlx_h2o.policies import make_policy

needs_kernels = pytest.mark.skipif(choice.cpu() is None, reason="the extension is not built")

TINY = attention.Shape(4, 2, 32, 32)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- turns and statistics -------------------------------------------------------------------------


@given(arms=st.integers(1, 6), rounds=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_arm_has_one_turn_in_every_round(arms, rounds, seed):
    visits: list[str] = []
    told: list[tuple[int, int]] = []

    def arm(name: str) -> Any:
        return lambda: visits.append(name) or float(len(visits))  # type: ignore[func-returns-value]

    samples = in_turns(
        {f"{i}": arm(f"{i}") for i in range(arms)},
        rounds,
        seed=seed,
        progress=lambda done, whole: told.append((done, whole)),
    )
    for turn in range(rounds):
        assert sorted(visits[turn * arms : (turn + 1) * arms]) == [f"{i}" for i in range(arms)]
    for name, seconds in samples.seconds.items():
        assert seconds == [i + 1.0 for i, visited in enumerate(visits) if visited == name]
    assert told == [(n, rounds * arms) for n in range(1, rounds * arms + 1)]


def test_no_arm_always_comes_after_the_same():
    visits: list[str] = []
    arms = {name: lambda name=name: visits.append(name) or 1.0 for name in "abcd"}
    in_turns(arms, 50)
    before = {a for a, b in pairwise(visits) if b == "a"}
    assert before >= {"b", "c", "d"}


def test_nothing_to_measure_is_an_error():
    for arms, rounds in (({}, 3), ({"a": lambda: 1.0}, 0)):
        with pytest.raises(ValueError, match="an arm and a round"):
            in_turns(arms, rounds)


@given(
    base=st.lists(st.floats(1e-6, 1e2), min_size=1, max_size=15),
    factor=st.floats(0.01, 100),
    noise=st.floats(1, 1000),
)
def test_a_ratio_survives_noise_that_hits_whole_rounds(base, factor, noise):
    """Each round may be as slow as it likes."""
    rounds = [seconds * (noise if i % 2 else 1) for i, seconds in enumerate(base)]
    samples = Samples({"a": [factor * s for s in rounds], "b": rounds})
    assert samples.ratio("a", "b") == pytest.approx(factor)
    assert samples.speed("b", "a") == pytest.approx(factor)
    assert samples.ratio("b", "b") == 1
    assert samples.median("b") == statistics.median(rounds)


@given(
    factor=st.floats(0.01, 100),
    disturbed=st.tuples(*[st.sets(st.integers(0, 11), max_size=8)] * 2),
    by=st.floats(1, 1000),
)
def test_the_quiet_ratio_survives_noise_in_most_rounds(factor, disturbed, by):
    """Each arm may lose two rounds of three, whichever they are."""
    a, b = ([by if i in rounds else 1.0 for i in range(12)] for rounds in disturbed)
    samples = Samples({"a": [factor * seconds for seconds in a], "b": b})
    assert samples.quiet_ratio("a", "b") == pytest.approx(factor)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_summaries_are_ordered_and_within_the_samples(seconds):
    found = summary(seconds)
    low, middle, high = (found[k] for k in ("lower_quartile", "seconds", "upper_quartile"))
    assert middle == pytest.approx(statistics.median(seconds))
    slack = 1e-9 * max(seconds)
    assert min(seconds) - slack <= low <= middle + slack
    assert middle - slack <= high <= max(seconds) + slack


@given(takes=st.floats(1e-4, 10), shortest=st.floats(0, 1))
def test_work_is_timed_after_one_untimed_call(takes, shortest):
    clock = Clock()
    calls: list[float] = []

    def work() -> None:
        clock.now += takes if calls else 1000  # the first is a cold one
        calls.append(clock.now)

    assert timed(work, shortest, clock)() == pytest.approx(takes, rel=1e-6)
    assert (len(calls) - 1) * takes >= shortest * (1 - 1e-6)
    assert (len(calls) - 2) * takes <= shortest * (1 + 1e-6)


# -- what is measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", [attention.Case(s, 256, "float32") for s in attention.SHAPES])
def test_ragged_heads_share_the_same_slots(case):
    lengths = case.ragged_lengths()
    assert len(lengths) == case.shape.kv_heads
    assert sum(lengths) == case.shape.kv_heads * case.slots
    assert all(lengths[0] >= attention.RAGGEDNESS * n for n in lengths[1:])
    assert attention.ranges_of([3, 4])[1] == (3, 4)


@needs_kernels
def test_every_form_of_a_case_is_measured():
    told: list[int] = []
    case = attention.Case(TINY, 40, "float16")
    found = attention.measure(case, 2, lambda done, whole: told.append(done))
    assert set(found.samples.arms) == {
        attention.READ, attention.MLX, attention.OFF, attention.SCORES, attention.MASS,
        attention.UNIFORM, attention.RAGGED, attention.STEP_RAGGED, *attention.STEPS,
    }  # fmt: skip
    assert all(len(s) == 2 and min(s) > 0 for s in found.samples.seconds.values())
    assert told[-1] == 2 * len(found.samples.arms)
    assert found.case.nbytes == 2 * 40 * 64 * 2
    assert found.bandwidth == pytest.approx(case.nbytes / found.samples.median(attention.READ))
    as_json = found.as_json()
    assert as_json["price"].keys() == attention.PRICES.keys()
    assert as_json["arms"][attention.MLX]["over_mlx"] == 1
    json.dumps(as_json)


@needs_kernels
def test_one_kv_head_has_no_ragged_form():
    case = attention.Case(attention.Shape(4, 1, 24, 16), 33, "float32")
    found = attention.measure(case, 1)
    assert attention.RAGGED not in found.samples.arms
    assert found.as_json()["price"].keys() == {"scores", "mass", "h2o", "distinct"}


@needs_kernels
@pytest.mark.parametrize("policy", ["streaming", "h2o", "distinct"])
@pytest.mark.parametrize("lengths", [[40, 40], [64, 16]])
def test_a_full_layer_goes_on_for_ever(policy, lengths):
    with mx.stream(mx.cpu):
        keys, values = mx.random.normal((2, 1, 80, 16))
        q = mx.random.normal((1, 4, 1, 16))
        step = full_layer(make_policy(policy), keys, values, lengths, q)
        outs = [step() for _ in range(100)]
        mx.eval(outs)
        assert all(mx.isfinite(out).all() and out.shape == (1, 4, 1, 16) for out in outs)
        # Every step writes a row, so no two outputs are the same.
        assert not mx.array_equal(outs[0], outs[-1])


def test_figures_know_their_direction():
    pairs = [(Samples({"a": [x], "b": [1.0]}), "a", "b") for x in (3.0, 1.0, 2.0)]
    (fast,) = figures.figure("speed", pairs, more_is_better=True)
    assert (fast.value, fast.worst) == (2, 1)
    (slow,) = figures.figure("price", pairs, more_is_better=False)
    assert (slow.value, slow.worst) == (2, 3)
    assert figures.figure("nothing", [], more_is_better=True) == []


@needs_kernels
def test_packed_rows_are_told_apart_by_their_bytes_alone():
    """Ours and mlx-lm's composite attend to the same, and neither changes the queries."""
    with mx.stream(mx.cpu):
        q, k, v = (mx.random.normal((1, heads, n, 128)) for heads, n in ((4, 1), (2, 50), (2, 50)))
        before = mx.array(q)
        seen = set()
        for packing in attention.PACKED.values():
            (keys, values), (others, _) = islice(attention.packed_copies(k, v, packing), 2)
            seen.add(keys.nbytes + values.nbytes)
            assert mx.array_equal(keys.words, others.words)
            ours, _, _ = scaled_dot_product_attention_with_scores(q, keys, values, scale=0.1)
            theirs = mx.fast.scaled_dot_product_attention(
                q, keys.dequantized(), values.dequantized(), scale=0.1
            )
            assert mx.allclose(ours, theirs, atol=1e-5)
            if packing == attention.PACKINGS[attention.COMPOSITE]:
                theirs = attention.composite(q, keys, values, scale=0.1)
                assert mx.allclose(ours, theirs, atol=1e-5)
        assert mx.array_equal(q, before)
    case = attention.Case(attention.Shape(4, 2, 128, 128), 50, "float32")
    assert seen == {case.packed_bytes(packing) for packing in attention.PACKED.values()}
    assert len(seen) == 3


def test_figures_stand_in_tables(capsys):
    case = attention.Case(attention.LARGE, 4096, "float32")
    seconds = dict.fromkeys((*attention.STEPS, attention.STEP_RAGGED), 2.0)
    seconds |= {
        attention.READ: 1.3, attention.MLX: 26.0, attention.OFF: 2.0, attention.SCORES: 2.1,
        attention.MASS: 2.02, attention.UNIFORM: 2.0, attention.RAGGED: 2.1,
        attention.EIGHT: 1.0, attention.FOUR: 0.9, attention.MIXED: 1.0, attention.COMPOSITE: 100.0,
    }  # fmt: skip
    result = attention.Result(case, Samples({arm: [1e-3 * s] for arm, s in seconds.items()}))
    found = {f.name: f for f in figures.attention_figures([result])}
    assert found["speed over MLX, float32, 4096 slots"].value == pytest.approx(13)
    assert found["share of read bandwidth, float32, 4096 slots"].value == pytest.approx(0.65)
    assert found["time of scores over no scores, from 4096 slots"].value == pytest.approx(1.05)

    for table in Report({}, {}, [result]).tables():
        show(table)
    printed = capsys.readouterr().out
    for shown in ("(32, 8, 128)", "26.000", "13.0x, 65%", "+5.0%", "better is", "1.000, 2.10x"):
        assert shown in printed
    (line,) = meaning(Report({}, {}, [result]))
    assert line.endswith("is 12.4 to 12.4 times as fast as MLX's without them.")


def test_the_machine_is_described():
    assert described.cpu_model()
    assert machine.cache_bytes() > 1 << 16
    assert machine.is_busy() == (described.load_average() > machine.BUSY * (os.cpu_count() or 1))


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
@needs_kernels
def test_a_quick_run_writes_everything(tmp_path, monkeypatch, capsys):
    tiny = model.Sizes(
        128, decode_from=160, slice_tokens=2, slices=1, prompt=200, chunk=64, prompt_rounds=1
    )
    monkeypatch.setattr("benchmarks.__main__.QUICK_SIZES", tiny)
    folder = tmp_path / "new" / "folder"
    options = "--model builtin:recall-4m --quick --rounds 1 --dtype float32 --json --out".split()
    assert main([*options, str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((folder / "bench.json").read_text())
    assert [path.name for path in folder.iterdir()] == ["bench.json"]

    assert report["machine"].keys() == {
        "cpu", "cores", "threads", "isa", "blas", "cache_bytes", "load", "system", "versions",
        "date",
    }  # fmt: skip
    assert report["settings"] == {
        "parts": [*("attention", "model"), *["products"] * products.can_be_measured()],
        "quick": True,
        "rounds": 1,
        "dtypes": ["float32"],
        "model": "builtin:recall-4m",
    }
    assert [(case["kv_heads"], case["slots"]) for case in report["attention"]] == [
        (8, 256), (8, 4096), (2, 1024),
    ]  # fmt: skip
    for case in report["attention"]:
        assert case["arms"][attention.MLX]["seconds"] > 0
        assert case["bandwidth"] > 0
    assert set(report["decoding"]) == {
        *(model.DEFAULT, f"{model.DEFAULT}, evict_every 16", model.FRAMED, model.DISTINCT),
        *(model.H2O, model.H2O_PACKED, model.STREAMING, model.WINDOW),
    }
    assert set(report["prompt"]) == {model.DEFAULT, model.H2O, model.PLAIN}
    assert len(report["products"]) in (0, len(products.SHAPES))
    # Two dtypes' speeds are missing.
    assert len(report["figures"]) == 2 + 4 + 2 + 6 + 1 + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--only", "model", "--model", "builtin:nothing"], "built in: builtin:recall-4m"),
    ],
)
@needs_kernels
def test_bad_options_end_in_one_line(options, text, capsys):
    assert main(options) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err
    assert not Path("somewhere").exists()


def test_without_the_kernels_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(choice, "cpu", lambda: None)
    assert main([]) == 2
    assert "the extension is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--only", "mlx"], ["--dtype", "int8"]])
def test_unknown_choices_are_refused(options):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2


@needs_kernels
def test_ctrl_c_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "measure", interrupted)
    assert main(["--model", "builtin:recall-4m", "--quick", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("stopped\n")
    assert not list(tmp_path.iterdir())


@needs_kernels
def test_parts_that_are_done_are_on_disk(tmp_path, monkeypatch):
    """What follows may take long, and may be broken off."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    case = attention.Case(attention.Shape(4, 2, 64, 64), 256, "float32")
    arms = (attention.READ, attention.MLX, attention.OFF, attention.SCORES, attention.MASS)
    result = attention.Result(case, Samples({arm: [1e-3] for arm in arms}))
    monkeypatch.setattr(attention, "measure", lambda *_: result)
    monkeypatch.setattr(model, "measure_decoding", interrupted)
    assert main(["--model", "builtin:recall-4m", "--quick", "--out", str(tmp_path)]) == 130
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert len(kept["attention"]) == len(cases_of({"quick": True, "dtypes": list(DTYPES)}))
    assert kept["decoding"] is None
