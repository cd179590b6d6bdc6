"""RULER's tasks on the board: what their generators make, and how their answers are scored."""

import random

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.board import packages, ruler, tasks, texts
from benchmarks.board.cells import Cell
from benchmarks.board.reading import Reading
from benchmarks.board.rivals import FULL, OURS, Rival
from benchmarks.board.ruler import KINDS, Sample
from benchmarks.board.scores import scores_of
from benchmarks.board.tables import lost, ruler_tables
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT

LENGTH = 640
#: Tokens of the largest unit, by which a prompt may be too short: here a needle of two uuids.
UNIT = 110


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(EMBEDDED_MODEL, SAMPLE_TEXT.read_text(), "questions", 128)


def fetched() -> bool:
    """Whether the packages of the generators are there."""
    needed = (ruler.HARNESS, ruler.WORDS, texts.SPEECHES)
    return all((packages.folder() / "packages" / one / ".complete").exists() for one in needed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_holds_its_answers_and_has_its_length(kind, reader):
    if not fetched():
        pytest.skip("lm-eval's generators are not in the cache folder: run `make board` once")
    state = random.getstate()
    made = ruler.samples(kind, LENGTH, 2, 3, reader.encode)
    assert random.getstate() == state
    assert made == ruler.samples(kind, LENGTH, 2, 3, reader.encode)
    assert made[0] != made[1]
    assert made != ruler.samples(kind, LENGTH, 2, 4, reader.encode)
    for sample in made:
        assert all(answer in sample.text for answer in sample.answers)
        assert not any(answer in sample.question for answer in sample.answers)
    task = tasks.ruler_task(reader, kind, LENGTH, 2)
    assert task.parts is not None
    for i, length in enumerate(task.lengths):
        whole = len(task.prompts[i]) + length
        assert LENGTH - UNIT <= whole <= LENGTH
        said = [reader.tokenizer.decode(task.continuations[i][a:b]) for a, b in task.parts[i]]
        drawn = ruler.samples(kind, LENGTH - len(reader.first), 2, reader.seed, reader.encode)
        assert [one.strip() for one in said] == list(drawn[i].answers)


def test_the_most_units_that_fit_are_taken():
    """Units of four tokens, the first three too few for the generator."""

    def make(units: int) -> Sample:
        if units < 3:
            raise ValueError("too few")
        return Sample("word " * units, "?", ("a",), ",")

    def tokens(sample: Sample) -> int:
        return 4 * sample.text.count("word")

    assert [ruler._fitted(make, tokens, at).text.count("word") for at in (12, 15, 16, 999)] == [
        3, 3, 4, 249,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="does not fit 11 tokens"):
        ruler._fitted(make, tokens, 11)


def test_seeds_leave_the_shared_states_as_they_were():
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    with ruler._seeded(1):
        first = random.random(), np.random.random()
    assert (random.random(), np.random.random()) == expected
    with ruler._seeded(1):
        assert (random.random(), np.random.random()) == first


def test_sentences_end_at_full_stops():
    assert ruler.sentences("One is. Two? It costs 1.5. Four") == [
        "One is.", "Two?", "It costs 1.5.", "Four",
    ]  # fmt: skip


def test_a_questions_words_are_no_answer():
    sample = ruler._split("A text.\nWhat is a?\nWhat is b?", "\nWhat ", " It is ", ["7", "8"], ",")
    assert (sample.text, sample.question) == ("A text.\nWhat is a?", "\nWhat is b? It is")
    assert sample.pieces == [(" 7", True), (",", False), (" 8", True)]
    assert Sample("", "", ("7", "8"), "").pieces == [(" 7", True), (" 8", True)]
    with pytest.raises(ValueError, match="too few units"):
        ruler._split("no question", "\nWhat ", "", ["7"], ",")


def test_each_answer_is_scored_by_its_own_tokens():
    places = tasks._places([([1, 2], True), ([9], False), ([3], True)], 2)
    assert places == ((2, 4), (5, 6))
    continuation = [5, 6, 1, 2, 9, 3]
    task = tasks.Task("t", ("t",), [[4]], [continuation], (6,), (2,), parts=(places,))
    logits = mx.zeros((1, 5, 10))
    for i, token in enumerate(continuation[1:]):
        logits[0, i, token] = 5.0
    assert task.row(0).parts == (places,)

    def known(logits: mx.array) -> list[bool]:
        return scores_of(task, logits, Reading(logits, 1, 1, 1.0, 1.0)).known

    assert known(logits) == [True, True]
    for wrong, expected in {2: [False, True], 3: [True, True], 4: [True, False]}.items():
        other = mx.array(logits)
        other[0, wrong, 0] = 9.0
        assert known(other) == expected


def cell_of(known: list[bool]) -> dict[str, object]:
    return {"known": known}


def test_only_answers_that_the_full_cache_gives_count():
    def never(*_: object) -> Reading:
        raise AssertionError

    rivals = [Rival(OURS, "", "", never), Rival("better", "", "", never, prompts_only=True)]
    rivals.append(Rival("keeps", "", "", never, keeps_all=True))
    first, second = (f"{tasks.RULER} {kind}" for kind in ("single 1", "multivalue"))
    found: dict[Cell, dict[str, object]] = {
        Cell("m", first, FULL, None): cell_of([True, False]),
        Cell("m", second, FULL, None): cell_of([True, True, True]),
        Cell("m", f"{tasks.RULER} vt", FULL, None): cell_of([False, False]),
        Cell("m", f"{tasks.RULER} cwe", FULL, None): cell_of([True]),  # no rival yet
        Cell("m", first, OURS, tasks.RULER_SHARE): cell_of([False, True]),
        Cell("m", second, OURS, tasks.RULER_SHARE): cell_of([True, True, False]),
        Cell("m", first, "better", tasks.RULER_SHARE): cell_of([True, True]),
        Cell("m", second, "better", tasks.RULER_SHARE): cell_of([True, True, True]),
        Cell("m", first, "keeps", None): cell_of([True, True]),
    }
    (text,) = ruler_tables(found, "m", rivals)
    lines = text.splitlines()
    assert lines[2] == "| rival | single 1 | multivalue | all |"
    assert lines[4:] == [
        "| better † | 1/1 | 3/3 | 4/4 |",
        f"| **{OURS}** | 0/1 | 2/3 | 2/4 |",
        "| keeps | 1/1 | - | - |",
    ]
    assert lost(found, "m", rivals, (0.25,)) == [["better", "m", "30%", "RULER", "4/4", "2/4", "-"]]
