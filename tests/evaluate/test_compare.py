"""The comparison: its parts, and the command."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, QuantizedKVCache
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from rich.console import Console

import mlx_h2o
from mlx_h2o.budgets.cost import PLAIN_ELEMENT
from mlx_h2o.cli import main
from mlx_h2o.cli.compare import table
from mlx_h2o.evaluate import comparison
from mlx_h2o.evaluate.arms import FULL, PACKED, WINDOW, Arm, arms_of_sizes, default_arms
from mlx_h2o.evaluate.comparison import Measuring, Protocol, Result, compare
from mlx_h2o.evaluate.equal_bytes import bytes_in_16_bits
from mlx_h2o.evaluate.perplexity import Perplexity, perplexity, samples_of
from mlx_h2o.evaluate.recall import CLOZE, is_known, recall_task, recalled
from mlx_h2o.evaluate.side_by_side import can_share, side_by_side
from mlx_h2o.integration.layer_probe import layer_kinds
from mlx_h2o.loading.load import MODELS, SAMPLE_TEXT
from tiny_models import tiny_model

SMALL = (
    "compare --model builtin:recall-4m --max-kv-size 48 --samples 2 --tokens 72 --prefill 32 "
    "--prompts 2 --prompt-tokens 160 --policies"
).split()


@pytest.fixture(scope="module")
def embedded():
    return mlx_h2o.load("builtin:recall-4m")


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
    cache = Arm(name).make(model, 16)
    got = model(tokens, cache=cache)
    packed = [QuantizedKVCache(group_size=64, bits=bits) for _ in model.layers]
    assert (got == model(tokens, cache=packed)).all()
    assert (cache[0].keys[0] == packed[0].keys[0]).all()


def test_the_model_recalls_with_everything_in_view(embedded):
    """Whatever the batch and the prefill, the same answers are right."""
    model, tokenizer = embedded
    task = recall_task(tokenizer, SAMPLE_TEXT.read_text(), prompts=5, tokens=200)
    runs = [
        recalled(model, lambda: stock_prompt_cache(model), task, **how)
        for how in (
            {"prefill": 64, "batch": 5},
            {"prefill": 1000, "batch": 2},
            {"prefill": 30, "chunk": 16, "batch": 3},
        )
    ]
    assert runs[0] == runs[1] == runs[2]
    assert sum(runs[0][0]) >= 4


@pytest.mark.slow
def test_caches_side_by_side_are_each_as_alone(embedded):
    """The same nats and the same facts, whatever reads the other parts of the batch."""
    model, tokenizer = embedded
    mx.random.seed(5)
    samples = mx.random.randint(0, 100, (2, 120))
    arms = [Arm(FULL), Arm(WINDOW), *map(Arm, PACKED)]
    mlx_h2o.uninstall()  # as a process begins that only mlx-lm's own caches came to
    joined = side_by_side([arm.make(model, 48) for arm in arms])
    got = perplexity(model, joined, mx.tile(samples, (len(arms), 1)), prefill=40).nll
    assert len({round(nll, 4) for nll in got[::2]}) == len(arms)
    arms += default_arms(["h2o:bits=6"])[-4:]
    alone = [perplexity(model, arm.make(model, 48), samples, prefill=40).nll for arm in arms]
    joined = side_by_side([arm.make(model, 48) for arm in arms])
    got = perplexity(model, joined, mx.tile(samples, (len(arms), 1)), prefill=40).nll
    assert got == pytest.approx([nll for of_arm in alone for nll in of_arm], abs=1e-3)
    task = recall_task(tokenizer, SAMPLE_TEXT.read_text(), prompts=3, tokens=200)
    how = {"prefill": 32, "chunk": 8}
    few = arms[:2]
    facts = [recalled(model, lambda a=arm: a.make(model, 48), task, **how)[0] for arm in few]
    both = recalled(
        model, lambda: side_by_side([a.make(model, 48) for a in few]), task, copies=2, **how
    )
    assert both == facts
    assert facts[0] != facts[1]


def test_a_prompt_beyond_the_window_reads_side_by_side(embedded):
    """Masks of a first chunk that the window does not hold are each cache's own."""
    model, _ = embedded
    tokens = mx.random.randint(0, 100, (1, 90), key=mx.random.key(3))
    arms = [Arm(FULL), Arm(WINDOW), Arm("ours", "salient")]
    got = model(mx.tile(tokens, (3, 1)), cache=side_by_side([a.make(model, 48) for a in arms]))
    for i, arm in enumerate(arms):
        alone = model(tokens, cache=arm.make(model, 48))
        assert mx.allclose(got[i : i + 1], alone, atol=1e-3)


def test_what_keeps_more_than_rows_is_read_alone():
    assert can_share(Arm(WINDOW).make(tiny_model("llama"), 16))
    assert not can_share([ArraysCache(2)])


def test_bounded_caches_come_once_for_each_size():
    arms = arms_of_sizes(default_arms(), [64, 32])
    assert [arm.name for arm in arms[:3]] == [FULL, *PACKED]
    ours = [arm for arm in arms if arm.policy is None and arm.name.startswith(WINDOW)]
    assert [(arm.name, arm.size) for arm in ours] == [
        (f"{WINDOW}, {size} tokens", size) for size in (64, 32)
    ]
    model = tiny_model("llama")
    assert [arm.make(model, 1)[0].max_size for arm in ours] == [64, 32]
    assert [arm.name for arm in arms_of_sizes(default_arms(), [64])] == [
        arm.name for arm in default_arms()
    ]


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

    def held(arm):
        cache = arm.make(model, 64)
        mx.eval(model(tokens, cache=cache))
        mx.eval(model(tokens[:, :1], cache=cache))
        return bytes_in_16_bits(cache)

    specs = (
        "h2o keydiff streaming h2o:bits=8 h2o:bits=4 h2o:k_bits=8:v_bits=4 "
        "h2o:bits=4:recent_bits=16 distinct:bits=8:undo=2"
    ).split()
    arms = [arm for arm in default_arms(specs) if arm.policy is not None]
    assert len(arms) > 2 * len(specs)
    budget = held(Arm(WINDOW))
    numbers = sum(k.heads * (k.widths.key + k.widths.value) for k in layer_kinds(model))
    assert budget == 64 * numbers * PLAIN_ELEMENT
    for arm in arms:
        assert 0.9 * budget < held(arm) <= budget, arm.name


def test_several_ways_to_share_slots_out_stand_beside_each_other(embedded):
    model, _ = embedded
    profile = str(MODELS / "recall-4m" / "mlx_h2o_profile.json")
    arms = default_arms(budgets=[profile, "uniform"])
    made = {arm.name: arm for arm in arms if arm.by_bytes}
    assert list(made) == ["mlx-h2o, mlx_h2o_profile.json", "mlx-h2o, uniform"]
    assert "uniform" in made["mlx-h2o, uniform"].described()
    spread = [len(set(c.budgets)) for c in made["mlx-h2o, uniform"].make(model, 64, context=256)]
    assert spread == [1] * len(spread)
    with pytest.raises(ValueError, match="Cannot read the profile"):
        default_arms(budgets=["uniform", "none.json"])
    assert [arm.name for arm in default_arms(budgets=["uniform"])] == [
        arm.name for arm in default_arms()
    ]


def test_what_holds_everything_is_counted_in_16_bits(embedded):
    """A packed cache is not twice as small as it is because this machine computes in float32."""
    model, _ = embedded
    held = {}
    for name in (FULL, *PACKED):
        cache = Arm(name).make(model, 64)
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
        cache = Arm("mlx-lm, 4 bits").make(model, 64)
        mx.eval(model(mx.zeros((1, 8), mx.int32), cache=cache))
        assert {entry.group_size for entry in cache} == {group}
    with pytest.raises(ValueError, match=r"mlx-lm, 4 bits: .* too narrow"):
        Arm("mlx-lm, 4 bits").make(tiny_model("llama"), 64)


def test_the_command_writes_json_and_a_chart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparison, "TIMED_STEPS", 2)
    folder = tmp_path / "new" / "folder"
    assert main([*SMALL, "keydiff", "--json", "--out", str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((folder / "compare.json").read_text())
    assert report["protocol"]["max_size"] == 48
    assert [r["arm"] for r in report["results"]] == [a.name for a in default_arms(["keydiff"])]
    by_name = {r["arm"]: r for r in report["results"]}
    assert by_name[FULL]["loss"] == 0
    assert by_name[WINDOW]["loss"] != 0
    assert by_name[WINDOW]["nbytes"] == 48 * NUMBERS * PLAIN_ELEMENT
    assert all(r["tokens_per_second"] > 0 for r in report["results"])
    chart = (folder / "compare.png").read_bytes()
    assert chart.startswith(b"\x89PNG")
    assert len(chart) > 10_000


def test_a_grid_has_a_figure_for_each_cache_and_size(capsys, monkeypatch):
    """The same as the table's, in another form, without the time that speeds take."""
    monkeypatch.setattr(comparison, "cores", lambda: 0)
    monkeypatch.setattr(comparison, "TIMED_STEPS", 2)
    sizes = "--max-kv-size 64 48 --markdown --only mlx-lm sliding h2o".split()
    assert main([*SMALL, "h2o", *sizes]) == 0
    table = {cells[0]: cells[2] for cells in table_rows(capsys.readouterr().out)}
    assert main([*SMALL, "h2o", *sizes, "--grid"]) == 0
    out = capsys.readouterr().out
    head, *rows = table_rows(out.split("facts")[0])
    assert head == ["cache", "keeps all", "64 tokens' bytes", "48 tokens' bytes"]
    by_name = {name: cells for name, *cells in rows}
    for name in PACKED:
        assert by_name[name] == [table[name], "", ""]
    names = [WINDOW, "h2o, uniform", "h2o, uniform, no remainder"]
    assert [*by_name] == [*PACKED, *names]
    for name in names:
        assert by_name[name] == ["", *(table[f"{name}, {size} tokens"] for size in (64, 48))]
    assert "facts" in out
    assert main([*SMALL, "h2o", "--grid", "--json"]) == 2
    assert "--grid is another form" in capsys.readouterr().err


def table_rows(markdown):
    """Cells of a Markdown table, its heading first."""
    lines = [line for line in markdown.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_says_what_was_measured():
    protocol = Protocol("some/model", "text", 48, 1, 64, 32, 4, 100)
    result = Result(WINDOW, [1.0], 2.718, 0.0953, 3, 4, 123.4, 65536, 3.25)
    console = Console(width=120, file=io.StringIO())
    console.print(table([result], protocol))
    printed = console.file.getvalue()
    for shown in ("some/model", WINDOW, "2.72", "+9.53 %", "3/4", "123", "65,536", "3.2x"):
        assert shown in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tokens", "20"], "--prefill must leave tokens"),
        (["--policies", "h2p"], "Unknown policy"),
        (["--policies", "h2o:sonk=3"], "has no setting sonk"),
        (["--policies", "h2o:sink"], "FIELD=VALUE"),
        (["--prompts", "-1"], "--prompts must be at least 0"),
        (["--max-kv-size", "48", "0"], "--max-kv-size must be at least 1"),
        (["--only", "nothing"], "no cache's name begins so"),
        (["--max-kv-size", "3"], "with a --max-kv-size of 3 tokens' bytes: max_bytes="),
        (["--budgets", "nowhere.json"], "Cannot read the profile"),
        (["--text", "nowhere.txt"], "Cannot read the text"),
        (["--model", "builtin:nothing"], "built in: builtin:recall-4m"),
        (["--tokens", "100000"], "longer text"),
    ],
)
def test_bad_options_end_in_one_line(options, text, capsys):
    assert main([*SMALL, *options]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_what_is_broken_off_goes_on_after_what_was_measured(monkeypatch, capsys, tmp_path):
    """The same figures as in one go; nothing is measured twice, and then nothing is kept."""
    monkeypatch.setattr(comparison, "cores", lambda: 0)
    command = [*SMALL, "--only", "sliding", "--markdown", "--grid"]
    assert main(command) == 0
    whole = capsys.readouterr().out
    run, jobs = Measuring.run, []

    def until_perplexity(work, job, tell):
        if work.group(job)[0] == comparison.PERPLEXITY and stopping:
            os.kill(os.getpid(), signal.SIGTERM)
        jobs.append(work.group(job)[0])
        return run(work, job, tell)

    monkeypatch.setattr(Measuring, "run", until_perplexity)
    stopping = True
    assert main(command) == 143
    told = capsys.readouterr().err
    (file,) = (tmp_path / "unfinished" / "evaluations").iterdir()
    assert f"2 of 4 measurements are in {file}: the same command goes on" in told
    assert jobs == [comparison.FACTS]
    assert main([*command, "--samples", "3"]) == 143  # of other settings, nothing is taken up
    assert "Going on" not in capsys.readouterr().err
    stopping, jobs[:] = False, []
    assert main(command) == 0
    out, told = capsys.readouterr()
    assert "Going on after 2 of 4 measurements" in told
    assert jobs == [comparison.PERPLEXITY]
    assert out == whole
    assert not file.exists()


def test_the_first_arm_must_be_the_full_one():
    protocol = Protocol("builtin:recall-4m", "text", 48, 1, 64, 32, 1, 100)
    with pytest.raises(ValueError, match="full"):
        compare([Arm(WINDOW)], protocol)


def started(folder):
    """A long comparison whose workers are starting, in a process group of its own."""
    command = [sys.executable, "-m", "mlx_h2o", *SMALL, "--samples", "40", "--out", str(folder)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What is kept of it is for the next test no more than for the user.
        env={**os.environ, "XDG_CACHE_HOME": str(folder.parent / f"{folder.name} cache")},
        start_new_session=True,
        # Background jobs of a shell ignore the signal, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # Not any child: while MLX asks for a compiler (system(3)), a Ctrl-C is lost.
    assert any(members(process.pid, "spawn_main") or time.sleep(0.05) for _ in range(2000))
    return process


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = started(tmp_path)
    time.sleep(5)
    process.kill()
    process.wait()
    assert any(is_gone(process.pid) or time.sleep(0.1) for _ in range(200))


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0, id="workers starting", marks=pytest.mark.slow),
        pytest.param(5, id="workers at work"),
    ],
)
def test_ctrl_c_leaves_nothing_behind(seconds, tmp_path):
    """Neither files nor worker processes, and one line instead of tracebacks."""
    process = started(tmp_path)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "stopped" in err
    assert not list(tmp_path.iterdir())
    # Python's own resource tracker takes a moment to notice.
    assert any(is_gone(process.pid) or time.sleep(0.1) for _ in range(100))


def members(group, command=""):
    """Processes of a group whose command line has something in it."""
    asked = ["pgrep", "-g", str(group), "-f", command or "."]
    found = subprocess.run(asked, capture_output=True, text=True)
    return len(found.stdout.split())


def is_gone(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False
