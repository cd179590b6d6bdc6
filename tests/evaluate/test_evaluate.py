"""The evaluation: its parts, how it goes on, and the command with its page."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_h2o.cli import main
from mlx_h2o.cli.evaluate import plain_text, share_of
from mlx_h2o.evaluate.charts import svg
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.evaluation import Evaluation, work_of
from mlx_h2o.evaluate.measures import MEASURES, NeedleMeasure, PerplexityMeasure, TurnMeasure
from mlx_h2o.evaluate.measures.needles import Needle, kinds_of, needle_task
from mlx_h2o.evaluate.measures.perplexity import Perplexity, mean_interval
from mlx_h2o.evaluate.methods import FULL, OURS, PACKED, Method, default_methods, sized
from mlx_h2o.evaluate.presets import PRESETS, chosen_measures
from mlx_h2o.evaluate.reader import Reader, no_progress, read
from mlx_h2o.evaluate.report import Curves
from mlx_h2o.evaluate.summary import answer_of
from mlx_h2o.loading.load import SAMPLE_TEXT

TINY = (
    PerplexityMeasure(samples=2, length=64, prefill=16),
    NeedleMeasure(lengths=(128,), depths=(0.0, 0.9), of_each=1),
    TurnMeasure(conversations=2, turns=2, turn=72, asked_after=(1, 2)),
)
FILE_NAME = "evaluation.json"
COMMAND = "evaluate --model builtin:recall-4m --measures perplexity --quick --shares 1/4".split()


def methods_of(policies=(), shares=(0.5,)):
    return sized(default_methods(policies), shares)


@pytest.fixture(scope="module")
def reader():
    return Reader("builtin:recall-4m", SAMPLE_TEXT.read_text(), "questions", 64)


@pytest.fixture(scope="module")
def evaluations(reader):
    """Of each measure by itself: the evaluation that has run, and what it told of its progress."""
    names = (FULL, next(iter(PACKED)), "mlx-h2o, 1/2")
    made = {}
    for measure in TINY:
        chosen = [method for method in methods_of() if method.name in names]
        evaluation, steps = Evaluation(reader, chosen, [measure]), []
        evaluation.run(lambda done, whole, steps=steps: steps.append((done, whole)))
        made[measure.name] = evaluation, steps
    return made


@pytest.fixture(scope="module")
def cloze_reader():
    return Reader("builtin:recall-4m", SAMPLE_TEXT.read_text(), "cloze", 64)


# -- parts ----------------------------------------------------------------------------------------


def test_an_interval_holds_the_mean_and_narrows_with_samples():
    rng = random.Random(1)
    few = [rng.gauss(3, 1) for _ in range(10)]
    many = few + [rng.gauss(3, 1) for _ in range(390)]
    (low, high), (low_many, high_many) = mean_interval(few), mean_interval(many)
    assert low < sum(few) / 10 < high
    assert high_many - low_many < (high - low) / 3
    # A normal mean's interval is 3.92 standard errors wide.
    assert high_many - low_many == pytest.approx(3.92 / math.sqrt(400), rel=0.15)
    assert mean_interval([2.0]) == (2.0, 2.0)


def test_the_same_difference_everywhere_has_no_interval():
    """Pairs: samples may differ as they like, if the loss is the same in all."""
    full = [1.0, 5.0, 2.0]
    low, high = Perplexity([nll + math.log(1.1) for nll in full]).interval_against(Perplexity(full))
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)


@pytest.mark.parametrize(("text", "share"), [("0.25", 0.25), ("25%", 0.25), ("1/4", 0.25)])
def test_shares_as_people_write_them(text, share):
    assert share_of(text) == share


@pytest.mark.parametrize("text", ["0", "1", "-1/4", "5/4", "quarter", "1/0"])
def test_no_shares(text):
    with pytest.raises(ValueError):  # noqa: PT011  its words are argparse's
        share_of(text)


def test_every_run_has_mlx_lms_own_caches_and_bounded_ones_hold_no_more_than_their_share(reader):
    methods = methods_of(["h2o:remainder=false"], [0.5, 0.25])
    assert [method.name for method in methods[: 1 + len(PACKED)]] == [FULL, *PACKED]
    assert "sliding window, 1/4" in {method.name for method in methods}
    tokens = mx.array([reader.prose(128, 0)])
    nbytes = {}
    for method in methods:
        cache = method.make(reader.model, 128)
        read(reader.model, cache, tokens, 64, no_progress)
        nbytes[method] = bytes_in_16_bits(cache)
    for method in methods[1 + len(PACKED) :]:
        assert nbytes[method] <= nbytes[methods[0]] * method.share + 1, method.name


def test_reading_in_chunks_is_reading_at_once(reader):
    tokens = mx.array([reader.prose(50, 0), reader.prose(50, 90)])
    expected = reader.model(tokens)[:, -1]
    for chunk in (1, 7, 50, 999):
        seen = []
        cache = stock_prompt_cache(reader.model)
        got = read(reader.model, cache, tokens, chunk, seen.append)
        assert mx.allclose(got, expected, atol=1e-3)
        assert sum(seen) == 100


# -- what is asked --------------------------------------------------------------------------------


def test_needles_lie_where_they_shall(cloze_reader):
    """At the paragraph's end nearest to the depth; the answer stands there and only there."""
    needles = [Needle(kind, depth) for kind in kinds_of(cloze_reader) for depth in (0.0, 0.5, 1.0)]
    task = needle_task(cloze_reader, needles, 400, 2, seed=3)
    assert task.prompts.shape == (2 * len(needles), 400)
    decode = cloze_reader.tokenizer.decode
    for i, (row, at, answer, distance) in enumerate(
        zip(task.prompts.tolist(), task.questions, task.answers, task.distances, strict=True)
    ):
        needle = needles[i // 2]
        number = decode(list(answer)).strip()
        fact = decode(row[at - distance :]).split("\n")[0]
        assert fact.endswith(f"{number}.")
        assert decode(row).count(number) == 1
        begins = (at - distance) / at
        assert abs(begins - needle.depth * (1 - distance / at if needle.depth == 1 else 1)) < 0.3
        others = len(re.findall(r"number of \w+ \w+ (?:is|was) \d", decode(row[:at]))) - 1
        assert others == (3 if needle.kind in ("multi", "decoys") else 0)
    again = needle_task(cloze_reader, needles, 400, 2, seed=3)
    assert (again.prompts == task.prompts).all()


# -- measures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", TINY, ids=lambda measure: measure.name)
def test_a_measure_gives_json_and_its_words(evaluations, measure):
    """The full cache against itself loses nothing; every result is JSON."""
    ((_, pairs),) = evaluations[measure.name][0].by_measure()
    assert len(pairs) == 3
    section = measure.section([(m, json.loads(json.dumps(result))) for m, result in pairs])
    for rows in section.tables:
        assert all(len(row) == len(rows.columns) for row in rows.rows)
    for chart in section.charts:
        ElementTree.fromstring(svg(chart))


@pytest.mark.slow
def test_asking_leaves_no_trace(reader):
    """What is asked after turn 1 changes nothing of what is asked after turn 2."""
    ours = methods_of()[-1]
    once = TurnMeasure(conversations=2, turns=2, turn=72, asked_after=(2,))
    both = TINY[2].of(reader, ours, no_progress)
    result = once.of(reader, ours, no_progress)["carry 1"]["fact"]["2"]
    assert result == both["carry 1"]["fact"]["2"]


def test_charts_take_the_pages_ink():
    curves = Curves("c", [1, 2], {"a": (1.0, None)}, "x", "y", {"a": ((0.5, 1.5), None)})
    text = svg(curves)
    assert "currentColor" in text
    assert "010203" not in text
    ElementTree.fromstring(text)


# -- the whole ------------------------------------------------------------------------------------


def test_the_answer_is_a_sentence(reader):
    methods = methods_of([], [0.5, 0.25])
    evaluation = Evaluation(reader, methods, [TINY[0]])
    assert answer_of(evaluation) == ""
    nll = {FULL: [1.0, 2.0], "mlx-h2o, 1/4": [1.004, 2.002], "sliding window, 1/4": [1.1, 2.1]}
    evaluation.results = {"perplexity": {n: {"nll": x, "nbytes": 1} for n, x in nll.items()}}
    assert answer_of(evaluation) == (
        "On your text a quarter of the bytes costs +0.30 ± 0.10 % of perplexity with mlx-h2o; the "
        "sliding window in the same bytes: +10.52 %."
    )
    by_tokens = Evaluation(reader, [Method(FULL), Method(OURS, "salient", tokens=64)], [TINY[0]])
    two = {name: {"nll": [1.0], "nbytes": 1} for name in (FULL, "mlx-h2o, 64 tokens")}
    by_tokens.results = {"perplexity": two}
    assert "the bytes of 64 tokens costs +0.00 %" in answer_of(by_tokens, "the bundled text")


def small(reader, measures=TINY[:2]):
    return Evaluation(reader, methods_of()[:1], measures)


def test_caches_read_side_by_side_as_each_alone(reader):
    """Sharing the model's weights changes no figure beyond rounding."""
    methods = methods_of()[:4]
    together = TINY[0].of_all(reader, methods, no_progress)
    for method, result in zip(methods, together, strict=True):
        alone = TINY[0].of(reader, method, no_progress)
        assert result.keys() == alone.keys()
        for name in result:
            assert result[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-4)


def test_an_evaluation_goes_on_where_it_was_left(reader, tmp_path):
    """Only of the same settings and versions: another's figures would be mixed in."""
    file = tmp_path / FILE_NAME
    first = small(reader)
    first.results = {"perplexity": {FULL: {"nll": [1.0, 2.0], "nbytes": 9}}}
    first.save(file)
    again = small(reader)
    assert again.take_up(file)
    assert again.results == first.results
    assert (again.count, again.total) == (1, 2)
    assert [measure.name for measure, _ in again.jobs()] == ["needles"]
    assert not small(reader, [PerplexityMeasure(samples=3)]).take_up(file)
    assert not small(reader).take_up(tmp_path / "none.json")
    newer = small(reader)
    newer.machine["versions"] = {"mlx": "99"}
    assert not newer.take_up(file)
    first.results["needles"] = {FULL: {"records": []}}
    first.save(file)
    finished = small(reader)
    assert finished.take_up(file)
    assert list(finished.jobs()) == []
    file.write_text("{}")
    assert not small(reader).take_up(file)


def test_what_another_profile_measured_is_measured_again(reader, tmp_path, capsys):
    """A profile made anew between two runs shares slots out otherwise under the same name."""
    file = tmp_path / FILE_NAME
    methods = [method for method in methods_of() if method.label in (FULL, OURS)]

    def begun():
        return Evaluation(reader, methods, TINY[:1])

    first = begun()
    first.run(keep=lambda: first.save(file))
    assert first.profiles
    same = begun()
    assert same.take_up(file)
    before = same.results
    same.run()
    assert same.results is before
    kept = json.loads(file.read_text())
    kept["profiles"] = dict.fromkeys(kept["profiles"], "another")
    del kept["results"]["perplexity"][FULL]
    file.write_text(json.dumps(kept))
    taken_up = begun()
    assert taken_up.take_up(file)
    taken_up.run()
    assert "everything is measured again" in capsys.readouterr().err
    assert taken_up.count == taken_up.total


def test_only_what_the_full_cache_cannot_do_ends_a_run(reader):
    """Where it fails it is the text or a size; mlx-lm's packed caches may fail by themselves."""

    class Refusing(PerplexityMeasure):
        def of_all(self, reader, methods, tell):
            names = [method.name for method in methods]
            if refused in names:
                raise ValueError(f"not with {refused}")
            return [{"nll": [1.0], "nbytes": 1} for _ in names]

    evaluation = Evaluation(reader, methods_of()[:2], [Refusing()])
    (job,) = evaluation.jobs()
    refused = "mlx-lm, 8 bits"
    results = evaluation.measure_group(job, no_progress)
    assert results == {FULL: {"nll": [1.0], "nbytes": 1}, refused: f"not with {refused}"}
    refused = FULL
    with pytest.raises(ValueError, match="not with full cache"):
        evaluation.measure_group(job, no_progress)
    with pytest.raises(ValueError, match="must be the full cache"):
        Evaluation(reader, methods_of()[1:], [Refusing()])


def test_a_cache_that_cannot_be_made_does_not_stop_the_others(reader):
    """A sixty-fourth of 64 tokens holds nothing; the report says so."""
    evaluation = Evaluation(reader, methods_of([], [1 / 64]), TINY[:1])
    *_, job = evaluation.jobs()
    name = evaluation.methods[-1].name
    why = evaluation.measure_group(job, no_progress)[name]
    assert "too small" in why
    evaluation.results = {"perplexity": {name: why}, "needles": {name: why}}
    assert evaluation.refusals() == [f"{why} (perplexity, {name}; needles, {name})"]
    assert evaluation.sections() == []


def test_sizes_can_be_changed_one_by_one():
    sizes = ["needles.lengths=64,128", "needles.kinds=single", "perplexity.samples=3",
             "perplexity.length=64", "perplexity.prefill=8"]  # fmt: skip
    quick = PRESETS["quick"]
    made = {m.name: m for m in chosen_measures(quick, ["needles", "perplexity"], sizes)}
    assert made["needles"].lengths == (64, 128)
    assert made["needles"].kinds == ("single",)
    assert made["perplexity"] == PerplexityMeasure(3, 64, 8)
    (turns,) = chosen_measures(PRESETS["turns"], (), ["turns.pinned=false", "turns.carries=0.5"])
    assert (turns.pinned, turns.carries) == (False, (0.5,))
    for wrong in ("needles.widths=3", "turns.turn=3", "needles", "perplexity.samples=few",
                  "needles.kinds=hidden", "perplexity.prefill=256"):  # fmt: skip
        with pytest.raises(ValueError, match=r"is no MEASURE|nothing like it|must be|must leave"):
            chosen_measures(quick, ["needles", "perplexity"], [wrong])
    assert [m.name for m in chosen_measures(PRESETS["turns"], ["needles"])] == ["needles"]


def test_json_lines_are_texts(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n"two"\n')
    assert plain_text(file) == "one\n\ntwo"
    file.write_text('{"words": "one"}\n')
    with pytest.raises(ValueError, match="line 1"):
        plain_text(file)


def test_measures_have_names_and_sizes_of_their_own():
    assert all(kind.name == name for name, kind in MEASURES.items())
    for measure in TINY:
        assert measure.work() >= measure.tokens() > 0


def test_the_command_prints_and_writes_a_page_that_opens_offline(tmp_path, capsys):
    sizes = "--size perplexity.samples=2 --size perplexity.length=64 --size perplexity.prefill=16"
    command = [*COMMAND, *sizes.split(), "--out", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("On the bundled text a quarter of the bytes costs ")
    assert "sliding window, 1/4" in printed
    page = (tmp_path / "evaluation.html").read_text()
    assert "{{" not in page
    assert printed.partition(" of perplexity")[0] in page
    assert "<svg" in page
    # Names of XML's own are no addresses that anything is fetched from.
    fetched = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(https?:[^\"')>\s]+)", page)
    assert [at for at in fetched if "w3.org" not in at] == []
    assert "<script" not in page
    report = json.loads((tmp_path / FILE_NAME).read_text())
    assert report["machine"]["blas"]
    assert main([*command, "--json"]) == 0  # nothing is left to measure
    told = capsys.readouterr()
    assert json.loads(told.out)["results"] == report["results"]
    assert "Going on after" in told.err


def test_presets_of_one_command_agree_on_the_same_text(capsys):
    """`compare` is `evaluate` with other defaults: the same sizes give the same figures."""
    sizes = "--measures perplexity --size perplexity.samples=2 --size perplexity.length=72 " \
        "--size perplexity.prefill=32 --json --model builtin:recall-4m"  # fmt: skip
    reports = []
    for preset in ("compare --max-kv-size 48 --policies", "full --max-kv-size 48"):
        assert main(f"evaluate --preset {preset} {sizes} --only sliding mlx-h2o".split()) == 0
        reports.append(json.loads(capsys.readouterr().out)["results"])
    assert reports[0] == reports[1]
    assert list(reports[0]["perplexity"]) == [
        FULL,
        "sliding window, 48 tokens",
        "mlx-h2o, 48 tokens",
    ]
    window = reports[0]["perplexity"]["sliding window, 48 tokens"]
    # 4 layers of 2 heads of 64.
    assert window["nbytes"] == 48 * 4 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--size perplexity.length=20", "prefill must leave tokens"),
        ("--policies h2p", "Unknown policy"),
        ("--policies h2o:sonk=3", "has no field sonk"),
        ("--policies h2o:sink", "FIELD=VALUE"),
        ("--max-kv-size 48 0", "--max-kv-size must be at least 1"),
        ("--only nothing", "no cache's name begins so"),
        ("--profile nowhere.json", "Cannot read the profile"),
        ("--text nowhere.txt", "Cannot read the text"),
        ("--model builtin:nothing", "built in: builtin:recall-4m"),
        ("--size perplexity.length=100000", "longer text"),
    ],
)
def test_bad_options_end_in_one_line(options, text, capsys):
    command = "evaluate --model builtin:recall-4m --preset compare --measures perplexity"
    assert main([*command.split(), *options.split()]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_sigterm_keeps_what_is_done_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    """Without --out too: the user's cache folder has it until everything is measured."""
    measure, stopping = Evaluation.measure_group, True

    def one_then_sigterm(evaluation, job, tell):
        if stopping and job[0].name == "needles":
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(evaluation, job, tell)

    monkeypatch.setattr(Evaluation, "measure_group", one_then_sigterm)
    sizes = "--size perplexity.length=64 --size perplexity.prefill=32 --size needles.lengths=160"
    command = [*COMMAND, "--measures", "perplexity", "needles", *sizes.split(), "--only", OURS]
    assert main(command) == 143
    err = capsys.readouterr().err
    (file,) = (tmp_path / "unfinished" / "evaluations").iterdir()
    assert f"2 of 4 measurements are in {file}: the same command goes on" in err
    before = json.loads(file.read_text())["results"]["perplexity"]
    assert main([*command, "--seed", "3"]) == 143  # of other settings, nothing is taken up
    assert "Going on" not in capsys.readouterr().err
    stopping = False
    assert main([*command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "Going on after 2 of 4 measurements" in err
    assert json.loads(out)["results"]["perplexity"] == before
    assert not file.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("measure", TINY, ids=lambda measure: measure.name)
def test_progress_ends_at_the_whole(reader, evaluations, measure):
    """It rises while work is done, the most of it before the end, and reaches 100 %."""
    evaluation, steps = evaluations[measure.name]
    amounts = [done for done, _ in steps]
    assert amounts == sorted(amounts)
    assert amounts[0] > 0
    again = Evaluation(reader, evaluation.methods, [measure])
    assert steps[-1][0] == steps[-1][1] == sum(map(work_of, again.jobs()))
    assert amounts[-2] >= 0.5 * amounts[-1]


def test_tokens_one_by_one_are_more_work_than_in_chunks():
    """As the time left says it; caches that read side by side share the calls of the model."""
    methods = methods_of()[:4]
    one_by_one = PerplexityMeasure(1, 512, 16)
    chunks = NeedleMeasure((512,), (0.5,), 1, ("single",), ("unseen",))
    assert work_of((one_by_one, methods)) > 5 * work_of((chunks, methods[:1]))
    assert work_of((one_by_one, methods)) < 4 * work_of((one_by_one, methods[:1]))


def test_ctrl_c_keeps_what_is_done(tmp_path, capsys):
    """Whatever was measured is in the file and in the report, and it can be gone on with."""
    sizes = "--size perplexity.length=160 --only mlx-lm"
    command = [*COMMAND, *sizes.split(), "--out", str(tmp_path)]
    file = tmp_path / FILE_NAME
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_h2o", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Background jobs of a shell ignore the signal, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    end = time.monotonic() + 120
    while not file.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    results = json.loads(file.read_text())["results"]["perplexity"]
    assert results
    assert process.returncode in (0, 130)
    assert "Traceback" not in err
    assert main([*command, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert results.items() <= done["results"]["perplexity"].items()
