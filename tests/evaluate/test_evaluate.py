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
from mlx_h2o.evaluate import suite as suite_module
from mlx_h2o.evaluate.arms import FULL, PACKED
from mlx_h2o.evaluate.bootstrap import loss_interval, mean_interval
from mlx_h2o.evaluate.contenders import arm_of, contenders, label
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.figures import svg
from mlx_h2o.evaluate.grid import at_a_glance, grid_of
from mlx_h2o.evaluate.measures import (
    MEASURES,
    AgreementMeasure,
    KeptMeasure,
    NeedleMeasure,
    PerplexityMeasure,
    RulerMeasure,
    SpeedMeasure,
    TurnMeasure,
)
from mlx_h2o.evaluate.measures.agreement import compared
from mlx_h2o.evaluate.needles import Needle, kinds_of, needle_task
from mlx_h2o.evaluate.presets import measures
from mlx_h2o.evaluate.ruler import TASKS, found_in, prompt
from mlx_h2o.evaluate.sections import Curves, Maps
from mlx_h2o.evaluate.stage import Stage, read, untold
from mlx_h2o.evaluate.suite import FILE_NAME, Evaluation, Suite
from mlx_h2o.loading.load import SAMPLE_TEXT

TINY = (
    PerplexityMeasure(samples=2, length=64, prefill=16),
    NeedleMeasure(lengths=(128,), depths=(0.0, 0.9), of_each=1),
    RulerMeasure(length=160, of_each=1, answer=3),
    TurnMeasure(conversations=2, turns=2, turn=72, asked_after=(1, 2)),
    AgreementMeasure(answers=1, prompt=16, length=40),
    SpeedMeasure(prompt=96, beginning=8, steps=4),
    KeptMeasure(length=96, parts=8),
)
COMMAND = "evaluate --model builtin:recall-4m --measures perplexity --quick --shares 1/4".split()


@pytest.fixture(scope="module")
def stage():
    return Stage("builtin:recall-4m", SAMPLE_TEXT.read_text(), "questions", 64)


@pytest.fixture(scope="module")
def cloze_stage():
    return Stage("builtin:recall-4m", SAMPLE_TEXT.read_text(), "cloze", 64)


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
    low, high = loss_interval([nll + math.log(1.1) for nll in full], full)
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)


@pytest.mark.parametrize(("text", "share"), [("0.25", 0.25), ("25%", 0.25), ("1/4", 0.25)])
def test_shares_as_people_write_them(text, share):
    assert share_of(text) == share
    assert label(share) == "1/4"


@pytest.mark.parametrize("text", ["0", "1", "-1/4", "5/4", "quarter", "1/0"])
def test_no_shares(text):
    with pytest.raises(ValueError):  # noqa: PT011  its words are argparse's
        share_of(text)


def test_every_run_has_mlx_lms_own_caches_and_bounded_ones_hold_no_more_than_their_share(stage):
    made = contenders(["h2o:remainder=false"], [0.5, 0.25])
    assert [c.name for c in made[: 1 + len(PACKED)]] == [FULL, *PACKED]
    assert "sliding window, 1/4" in {c.name for c in made}
    tokens = mx.array([stage.prose(128, 0)])
    held = {}
    for contender in made:
        cache = contender.make(stage.model, 128)
        read(stage.model, cache, tokens, 64, untold)
        held[contender] = bytes_in_16_bits(cache)
    full = held[made[0]]
    for contender, nbytes in held.items():
        if contender.share is not None:
            assert nbytes <= full * contender.share + 1, contender.name


def test_a_policy_as_it_is_written():
    arm = arm_of("h2o:recent=64:remainder=false:bits=8")
    assert (arm.policy, arm.remainder, arm.budgets) == ("h2o", False, "uniform")
    assert dict(arm.settings) == {"recent": 64, "bits": 8}
    assert arm_of("salient:budgets=profile").budgets is None
    with pytest.raises(ValueError, match="nonsense"):
        arm_of("nonsense")


def test_reading_in_chunks_is_reading_at_once(stage):
    tokens = mx.array([stage.prose(50, 0), stage.prose(50, 90)])
    expected = stage.model(tokens)[:, -1]
    for chunk in (1, 7, 50, 999):
        seen = []
        cache = stock_prompt_cache(stage.model)
        got = read(stage.model, cache, tokens, chunk, seen.append)
        assert mx.allclose(got, expected, atol=1e-3)
        assert sum(seen) == 100


# -- what is asked --------------------------------------------------------------------------------


def test_needles_lie_where_they_shall(cloze_stage):
    """At the paragraph's end nearest to the depth; the answer stands there and only there."""
    needles = [Needle(kind, depth) for kind in kinds_of(cloze_stage) for depth in (0.0, 0.5, 1.0)]
    task = needle_task(cloze_stage, needles, 400, 2, seed=3)
    assert task.prompts.shape == (2 * len(needles), 400)
    decode = cloze_stage.tokenizer.decode
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
    again = needle_task(cloze_stage, needles, 400, 2, seed=3)
    assert (again.prompts == task.prompts).all()


@pytest.mark.parametrize("name", TASKS)
def test_ruler_prompts_have_their_length_and_their_answers(stage, name):
    rng = random.Random(5)
    row, task = prompt(stage, name, 400, rng)
    assert len(row) == 400
    text = stage.tokenizer.decode(row)
    assert text.endswith(task.question)
    assert all(found_in(text, task.answers))
    assert not any(found_in(task.question, task.answers))


def test_ruler_counts_words_rightly(stage):
    """The words asked for are those that come most often in the prompt itself."""
    for name in ("common words", "frequent words"):
        row, task = prompt(stage, name, 400, random.Random(7))
        words = re.findall(r"[a-z]+", stage.tokenizer.decode(row).rpartition("\n\n")[0])
        counts = sorted(words.count(word) for word in task.answers)
        listed = {word for piece in task.pieces for word in re.findall(r"[a-z]+", piece)}
        assert counts[0] >= max(words.count(word) for word in listed - set(task.answers))


def test_a_chain_of_variables_is_one():
    task = TASKS["variables"](random.Random(1), 100)
    value = None
    for piece, name in zip(task.pieces, task.answers, strict=True):
        left, right = piece.removesuffix(".").split(" = ")
        assert left == f"VAR {name}"
        assert right == (value or right)
        value = f"VAR {name}"


def test_divergence_is_none_of_itself_and_that_of_the_definition():
    p, q = mx.array([[0.5, 0.25, 0.25]]), mx.array([[0.2, 0.4, 0.4]])
    apart, agrees = compared(mx.log(p) + 7, mx.log(q))
    by_hand = 0.5 * math.log(0.5 / 0.2) + 2 * 0.25 * math.log(0.25 / 0.4)
    assert apart.item() == pytest.approx(by_hand, rel=1e-5)
    assert agrees.item() == 0
    apart, agrees = compared(mx.log(p), mx.log(p) - 3)
    assert apart.item() == pytest.approx(0, abs=1e-6)
    assert agrees.item() == 1


# -- measures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", TINY, ids=lambda measure: measure.name)
def test_a_measure_finds_json_and_says_it(stage, measure):
    """The full cache against itself loses nothing; everything found is JSON."""
    chosen = [c for c in contenders([], [0.5]) if c.name in (FULL, "mlx-h2o, 1/2")]
    told = []
    found = [json.loads(json.dumps(measure.of(stage, c, told.append))) for c in chosen]
    assert sum(told) > 0
    assert min(told) > 0
    section = measure.section(list(zip(chosen, found, strict=True)))
    for rows in section.tables:
        assert all(len(row) == len(rows.columns) for row in rows.rows)
    for chart in section.charts:
        ElementTree.fromstring(svg(chart))


@pytest.mark.slow
def test_the_full_cache_agrees_with_itself(stage):
    full = contenders([], [0.5])[0]
    found = TINY[4].of(stage, full, untold)
    assert max(found["kl"]) < 1e-5
    assert min(found["top"]) > 0.99


@pytest.mark.slow
def test_asking_leaves_no_trace(stage):
    """What is asked after turn 1 changes nothing of what is asked after turn 2."""
    ours = contenders([], [0.5])[-1]
    once = TurnMeasure(conversations=2, turns=2, turn=72, asked_after=(2,))
    both = TINY[3].of(stage, ours, untold)
    assert once.of(stage, ours, untold)["fact"]["2"] == both["fact"]["2"]


def test_a_window_keeps_the_end_and_ours_more(stage):
    """The map is of positions: everything at the very end is held."""
    ours = contenders([], [0.25])[-1]
    layers = KeptMeasure(length=256, parts=256).of(stage, ours, untold)["layers"]
    assert all(0 <= share <= 1 for layer in layers for share in layer)
    assert all(layer[-1] == pytest.approx(1) for layer in layers)
    assert sum(map(sum, layers)) / (256 * len(layers)) < 0.8


def test_charts_take_the_pages_ink():
    curves = Curves("c", [1, 2], {"a": (1.0, None)}, "x", "y", {"a": ((0.5, 1.5), None)})
    maps = Maps("m", {"one": [[0.5, None]]}, "x", "y", numbers=True)
    for chart in (curves, maps):
        text = svg(chart)
        assert "currentColor" in text
        assert "010203" not in text
        ElementTree.fromstring(text)


# -- the whole ------------------------------------------------------------------------------------


def test_a_grid_has_the_figure_of_each_cache_at_its_part_of_the_bytes():
    """Caches of few bytes may be missing; those that keep all have a column of their own."""
    made = contenders(["h2o"], [0.25, 0.5])
    losses = {c.name: 0.001 * i for i, c in enumerate(made)}
    findings = [
        (c, {"nll": [1.0 + losses[c.name]] * 2, "nbytes": 1}) for c in made if c.name != "h2o, 1/4"
    ]
    rows = grid_of(TINY[0], findings)
    assert rows.columns == ("cache", "keeps all", "1/2", "1/4")
    found = {name: dict(zip(rows.columns[1:], cells, strict=True)) for name, *cells in rows.rows}
    assert list(found) == [*PACKED, "sliding window", "mlx-h2o", "h2o"]
    assert found["h2o"]["1/4"] == found["h2o"]["keeps all"] == ""
    for contender, _ in findings[1:]:
        cell = found[contender.arm.name][label(contender.share) if contender.share else "keeps all"]
        assert cell == f"{100 * math.expm1(losses[contender.name]):+.2f} %"


def test_every_brief_figure_is_that_of_the_measures_own_table(stage):
    """What the page tells at a glance is what it tells in full, further down."""
    measured = [measure for measure in TINY if measure.briefly]
    assert len(measured) == 5
    suite = Suite(stage, contenders([], [0.5])[:4], measured)
    evaluation = Evaluation.begin(suite)
    for job in evaluation.jobs(alone=False):
        measure, _ = suite.group(job)
        evaluation.found.setdefault(measure.name, {}).update(suite.run(job, untold))
    glance = at_a_glance(evaluation.known())
    assert len(glance.tables) == len(measured)
    for grid, section in zip(glance.tables, evaluation.sections(), strict=True):
        in_full = {row[0]: row[1:] for row in section.tables[0].rows}
        for name, *cells in grid.rows:
            (cell,) = filter(None, cells)
            whole = name if name in in_full else f"{name}, 1/2"
            assert cell in in_full[whole]


def small_suite(stage):
    return Suite(stage, contenders([], [0.5])[:1], [TINY[0], TINY[6]])


def test_an_evaluation_goes_on_where_it_was_left(stage, tmp_path):
    """What is in the file is not measured again; another suite's file is refused."""
    file = tmp_path / FILE_NAME
    first = Evaluation.begin(small_suite(stage))
    first.found = {"perplexity": {FULL: {"nll": [1.0, 2.0], "nbytes": 9}}}
    first.save(file)
    again = Evaluation.begin(small_suite(stage), file, resume=True)
    assert again.found == first.found
    assert again.jobs(alone=False) == [1]
    other = Suite(stage, contenders([], [0.5])[:1], [PerplexityMeasure(samples=3)])
    with pytest.raises(ValueError, match="another measures"):
        Evaluation.begin(other, file, resume=True)
    with pytest.raises(ValueError, match="no evaluation to go on with"):
        Evaluation.begin(small_suite(stage), tmp_path / "none.json", resume=True)


def test_caches_read_side_by_side_as_each_alone(stage):
    """Sharing the model's weights changes no figure beyond rounding."""
    chosen = contenders([], [0.5])[:4]
    for measure in (TINY[0], TINY[4]):
        together = measure.of_all(stage, chosen, untold)
        for contender, found in zip(chosen, together, strict=True):
            alone = measure.of(stage, contender, untold)
            assert found.keys() == alone.keys()
            for name in found:
                assert found[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-4)


def test_an_unfinished_evaluation_is_taken_up_and_a_finished_one_is_not(stage, tmp_path):
    """Only of the same settings and versions: another's figures would be mixed in."""
    file = tmp_path / FILE_NAME
    first = Evaluation.begin(small_suite(stage))
    first.found = {"perplexity": {FULL: {"nll": [1.0, 2.0], "nbytes": 9}}}
    first.save(file)
    again = Evaluation.begin(small_suite(stage))
    assert again.take_up(file)
    assert (again.measured, again.measurements) == (1, 2)
    assert again.jobs(alone=False) == [1]
    other = Evaluation.begin(Suite(stage, contenders([], [0.5])[:1], [TINY[0]]))
    assert not other.take_up(file)
    newer = Evaluation.begin(small_suite(stage))
    newer.machine["versions"] = {"mlx": "99"}
    assert not newer.take_up(file)
    first.found["kept"] = {FULL: {"layers": []}}
    first.save(file)
    finished = Evaluation.begin(small_suite(stage))
    assert not finished.take_up(file)
    assert finished.found == {}
    file.write_text("{}")
    assert not finished.take_up(file)


def test_what_another_profile_measured_is_measured_again(stage, tmp_path, capsys):
    """A profile made anew between two runs shares slots out otherwise under the same name."""
    file = tmp_path / FILE_NAME
    full, *others = contenders([], [0.5])
    ours = next(contender for contender in others if contender.arm.by_bytes)
    suite = Suite(stage, [full, ours], [TINY[0]])
    first = Evaluation.begin(suite)
    first.run(lambda *_: None, lambda: first.save(file))
    assert first.profiles
    same = Evaluation.begin(suite, file, resume=True)
    before = same.found
    same.run(lambda *_: None, lambda: None)
    assert same.found is before
    kept = json.loads(file.read_text())
    kept["profiles"] = dict.fromkeys(kept["profiles"], "another")
    del kept["found"]["perplexity"][FULL]
    file.write_text(json.dumps(kept))
    taken_up = Evaluation.begin(suite)
    assert taken_up.take_up(file)
    taken_up.run(lambda *_: None, lambda: None)
    assert "everything is measured again" in capsys.readouterr().err
    assert taken_up.measured == taken_up.measurements
    with pytest.raises(ValueError, match="begin anew"):
        Evaluation.begin(suite, file, resume=True).run(lambda *_: None, lambda: None)


def test_only_what_the_full_cache_cannot_do_ends_a_run(stage):
    """Where it fails it is the text or a size; mlx-lm's packed caches may fail by themselves."""

    class Refusing(PerplexityMeasure):
        def of_all(self, stage, contenders, tell):
            names = [contender.name for contender in contenders]
            if refused in names:
                raise ValueError(f"not with {refused}")
            return [{"nll": [1.0], "nbytes": 1} for _ in names]

    suite = Suite(stage, contenders([], [0.5])[:2], [Refusing()])
    refused = "mlx-lm, 8 bits"
    found = suite.run(0, untold)
    assert found == {FULL: {"nll": [1.0], "nbytes": 1}, refused: f"not with {refused}"}
    refused = FULL
    with pytest.raises(ValueError, match="not with full cache"):
        suite.run(0, untold)


def test_a_cache_that_cannot_be_made_does_not_stop_the_others(stage):
    """A sixty-fourth of 64 tokens holds nothing; the report says so."""
    suite = Suite(stage, contenders([], [1 / 64]), [TINY[0]])
    evaluation = Evaluation.begin(suite)
    name = suite.contenders[-1].name
    why = suite.run(suite.jobs()[-1], untold)[name]
    assert "too small" in why
    evaluation.found = {"perplexity": {name: why}, "kept": {name: why}}
    assert evaluation.refusals() == {why: [f"perplexity, {name}", f"kept, {name}"]}
    assert evaluation.sections() == []


def test_sizes_can_be_changed_one_by_one():
    sizes = ["needles.lengths=64,128", "needles.kinds=single", "perplexity.samples=3"]
    made = {m.name: m for m in measures(True, ["needles", "perplexity"], sizes)}
    assert made["needles"].lengths == (64, 128)
    assert made["needles"].kinds == ("single",)
    assert made["perplexity"].samples == 3
    for wrong in ("needles.widths=3", "speed.steps=3", "needles", "perplexity.samples=few",
                  "needles.kinds=hidden"):  # fmt: skip
        with pytest.raises(ValueError, match=r"is no MEASURE|nothing like it|must be"):
            measures(True, ["needles", "perplexity"], [wrong])


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


def test_the_command_prints_and_writes_a_page_that_opens_offline(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlx_h2o.evaluate.presets._QUICK", (TINY[0], TINY[6]))
    monkeypatch.setattr("mlx_h2o.evaluate.suite.cores", lambda: 0)
    assert main([*COMMAND, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "sliding window, 1/4" in printed
    page = (tmp_path / "evaluation.html").read_text()
    assert "{{" not in page
    assert "<svg" in page
    # Names of XML's own are no addresses that anything is fetched from.
    fetched = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(https?:[^\"')>\s]+)", page)
    assert [at for at in fetched if "w3.org" not in at] == []
    assert "<script" not in page
    report = json.loads((tmp_path / FILE_NAME).read_text())
    assert report["machine"]["blas"]
    assert main([*COMMAND, "--out", str(tmp_path), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"] == report["found"]
    assert main([*COMMAND, "--out", str(tmp_path), "--resume", "--seed", "1"]) == 2
    assert "another seed" in capsys.readouterr().err
    assert "At a glance" in page
    assert main([*COMMAND, "--out", str(tmp_path), "--resume", "--grid"]) == 0
    printed = capsys.readouterr().out
    assert "by part of the bytes" in printed
    assert "95% interval" not in printed
    for wrong in ("--json", "--table 0", "--measures speed"):
        assert main([*COMMAND, "--grid", *wrong.split()]) == 2
        assert "--grid" in capsys.readouterr().err


def test_sigterm_keeps_what_is_done_and_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    """Without --out too: the user's cache folder has it until everything is measured."""
    run, stopping = Suite.run, True

    def one_then_sigterm(suite, job, tell):
        if stopping and suite.group(job)[0].name == "kept":
            os.kill(os.getpid(), signal.SIGTERM)
        return run(suite, job, tell)

    monkeypatch.setattr(Suite, "run", one_then_sigterm)
    monkeypatch.setattr(suite_module, "cores", lambda: 0)
    command = [*COMMAND, "--measures", "perplexity", "kept", "--size", "perplexity.length=64"]
    assert main(command) == 143
    told = capsys.readouterr().err
    (file,) = (tmp_path / "unfinished" / "evaluations").iterdir()
    assert f"5 of 10 measurements are in {file}: the same command goes on" in told
    before = json.loads(file.read_text())["found"]["perplexity"]
    stopping = False
    assert main([*command, "--json"]) == 0
    out, told = capsys.readouterr()
    assert "Going on after 5 of 10 measurements" in told
    assert json.loads(out)["found"]["perplexity"] == before
    assert not file.exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("measure", TINY, ids=lambda measure: measure.name)
def test_what_is_told_adds_up_to_the_work(stage, measure):
    """The most while it is done; of needles two of four kinds are none for this model."""
    suite, told = Suite(stage, contenders([], [0.5])[:2], [measure]), []
    job = suite.jobs()[0]
    suite.run(job, told.append)
    assert sum(told) == suite.work_of(job)
    assert min(told) >= 0
    assert told[-1] <= 0.5 * suite.work_of(job)


def test_tokens_one_by_one_are_more_work_than_in_chunks(stage):
    """As the time left says it; caches that read side by side share the calls of the model."""
    caches = contenders([], [0.5])[:4]
    chunks, one_by_one = KeptMeasure(512), PerplexityMeasure(1, 512, 16)
    works = [Suite(stage, caches, [each]).work_of(0) for each in (chunks, one_by_one)]
    told: list[int] = []
    Suite(stage, caches[:1], [PerplexityMeasure(1, 64, 48)]).run(0, told.append)
    assert told[0] < sum(told) / 3  # though it is of three quarters of the tokens
    assert works[1] / 4 > 5 * works[0]
    assert works[1] < 4 * Suite(stage, caches[:1], [one_by_one]).work_of(0)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done(tmp_path):
    """Whatever was measured is in the file and in the report, and it can be gone on with."""
    sizes = ["--size", "perplexity.length=160"]
    command = [sys.executable, "-m", "mlx_h2o", *COMMAND, *sizes, "--out", str(tmp_path)]
    file = tmp_path / FILE_NAME
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    end = time.monotonic() + 120
    while not file.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    found = json.loads(file.read_text())["found"]["perplexity"]
    assert found
    assert process.returncode in (0, 130)
    done = subprocess.run([*command, "--resume", "--json"], capture_output=True, check=True)
    assert found.items() <= json.loads(done.stdout)["found"]["perplexity"].items()
