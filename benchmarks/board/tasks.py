"""The board's tasks: prompts that are read, and continuations over which caches are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import cast

from benchmarks.board import ruler
from benchmarks.board.texts import PLAYS, TEXTS, hard_needle, play, speeches
from mlx_h2o.evaluate.measures.needles import Needle, needle_task
from mlx_h2o.evaluate.measures.perplexity import samples_of
from mlx_h2o.evaluate.reader import Reader

#: Names of the tasks: the first two have answers.
NEEDLES, HARD_NEEDLES = "needles", "hard needles"
TEXTS_TASK, SPEAKERS, GROWING = "texts", "speakers", "growing"
#: One sample of the texts, read by itself, so that the memory which that takes can be told.
MEMORY = "memory"
#: RULER's tasks are named so, with the kind behind it; they are measured with this part of the
#: bytes, with which compressed prompts are compared elsewhere, too.
RULER, RULER_SHARE = "RULER", 0.3
#: Tokens of a text that grows: the beginning that is read at once.
BEGINNING = 64
#: Facts of a hard needle's document, which is cut to the prompt's tokens.
HARD_FACTS = 3
#: Characters of a document for each token of a prompt: more than enough, since the rest is cut off.
CHARACTERS = 8
#: Depths of needles, in turn.
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Task:
    """Prompts of one length, each with a continuation that every cache reads token by token.

    The continuation's first token is given, since a prompt that is read whole predicts it alike
    with every cache that compresses afterwards. Each further token counts, up to `lengths`.

    Attributes:
        name: The task's name.
        labels: Each row's text or kind of fact.
        prompts: Token ids `[n][P]`.
        continuations: Token ids `[n][C]`, padded at the end.
        lengths: Tokens of each continuation that count.
        answers: Where each row's answer begins in its continuation; None for texts.
        least: As in `facts.Form`; used for answers.
        grows: Whether nearly everything comes token by token, so that caches evict while they
            decode. Parts of the bytes are then of the whole, not of the prompt, and rivals that
            compress prompts have no place.
        parts: Where each row's answers begin and end in its continuation, if a row has several or
            something follows them; None: one answer, from `answers` on.
    """

    name: str
    labels: tuple[str, ...]
    prompts: list[list[int]]
    continuations: list[list[int]]
    lengths: tuple[int, ...]
    answers: tuple[int, ...] | None = None
    least: float = 0.0
    grows: bool = False
    parts: tuple[tuple[tuple[int, int], ...], ...] | None = None

    @property
    def sized(self) -> int:
        """The tokens of whose full cache rivals get a part."""
        return self.context if self.grows else len(self.prompts[0])

    @property
    def context(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.prompts[0]) + len(self.continuations[0])

    def row(self, i: int) -> Task:
        """The task of one row alone."""
        return Task(
            self.name,
            self.labels[i : i + 1],
            self.prompts[i : i + 1],
            self.continuations[i : i + 1],
            self.lengths[i : i + 1],
            None if self.answers is None else self.answers[i : i + 1],
            self.least,
            self.grows,
            None if self.parts is None else self.parts[i : i + 1],
        )


def texts(
    reader: Reader, prompt: int, continuation: int, samples: int, name: str = TEXTS_TASK
) -> Task:
    """Samples of every text, evenly spaced, each cut into prompt and continuation.

    Args:
        reader: The model's tokenizer.
        prompt: Tokens of a prompt.
        continuation: Tokens of a continuation.
        samples: Samples of each text.
        name: The task's name, which says what texts: those of one writer, or plays.
    """
    of = {title: partial(play, title) for title in PLAYS} if name == SPEAKERS else TEXTS
    labels, rows = _samples(reader, prompt + continuation, samples, of)
    return Task(
        name,
        labels,
        [row[:prompt] for row in rows],
        [row[prompt:] for row in rows],
        (continuation,) * len(rows),
    )


def memory(reader: Reader, prompt: int, continuation: int) -> Task:
    """The first of `texts`' samples alone; the arguments are those of `texts`."""
    return replace(texts(reader, prompt, continuation, 1).row(0), name=MEMORY)


def growing(reader: Reader, length: int, samples: int) -> Task:
    """The same texts as if they were answers: a short beginning, then token by token.

    Args:
        reader: The model's tokenizer.
        length: Tokens of a sample.
        samples: Samples of each text.
    """
    labels, rows = _samples(reader, length, samples, TEXTS)
    return Task(
        GROWING,
        labels,
        [row[:BEGINNING] for row in rows],
        [row[BEGINNING:] for row in rows],
        (length - BEGINNING,) * len(rows),
        grows=True,
    )


def _samples(
    reader: Reader, length: int, samples: int, of: Mapping[str, Callable[[], str]]
) -> tuple[tuple[str, ...], list[list[int]]]:
    """The name of each sample's text, and its tokens."""
    labels: list[str] = []
    rows: list[list[int]] = []
    for name, text in of.items():
        bos = reader.first[0] if reader.first else None
        # One sample comes from the text's middle: beginnings are titles and comments.
        count = samples if samples > 1 else 3
        tokens = samples_of(reader.encode(text()), count, length, bos)
        of_text = cast(list[list[int]], tokens.tolist())
        rows += of_text if samples > 1 else of_text[1:2]
        labels += [name] * samples
    return tuple(labels), rows


def needles(reader: Reader, length: int, count: int, kind: str = "single") -> Task:
    """Facts in the model's own form, hidden in speeches and asked for after the prompt.

    Args:
        reader: Model and text; the text is replaced by the speeches.
        length: Tokens of a prompt with its question.
        count: The number of prompts.
        kind: As in `needles.Needle`.
    """
    hay = Reader(reader.model_name, speeches(), reader.facts, reader.chunk, reader.seed)
    hay.__dict__["_loaded"] = reader.model, reader.tokenizer
    depths = [DEPTHS[i % len(DEPTHS)] for i in range(count)]
    task = needle_task(hay, [Needle(kind, depth) for depth in depths], length, 1, reader.seed)
    rows = cast(list[list[int]], task.prompts.tolist())
    return _task_of_rows(
        NEEDLES,
        [row[:at] for row, at in zip(rows, task.questions, strict=True)],
        [row[at:] for row, at in zip(rows, task.questions, strict=True)],
        [list(answer) for answer in task.answers],
        task.least,
    )


def hard_needles(reader: Reader, length: int, count: int) -> Task:
    """Documents with several facts of one kind, from another project's generator.

    Args:
        reader: The model's tokenizer.
        length: Tokens of a prompt with its question.
        count: The number of prompts.
    """
    generate = hard_needle().generate_hard_example
    rng = random.Random(reader.seed)
    prompts: list[list[int]] = []
    questions, answers = [], []
    while len(prompts) < count:
        made = generate(
            num_needles=HARD_FACTS, ctx_chars=CHARACTERS * length, seed=rng.randrange(1 << 30)
        )
        facts = {record["sentence"]: record["value"] for record in made["needle_records"]}
        subject = next(statement for statement, value in facts.items() if value == made["target"])
        # A sentence to complete, which models that were not trained for chat can do, too.
        question = reader.encode("\n\n" + subject[: subject.index(made["target"])].rstrip())
        document = made["prompt"].partition("\n\nQuestion:")[0]
        prompts.append(_shortened(reader, document, set(facts), length - len(question)))
        questions.append(question)
        answers.append(reader.encode(f" {made['target']}"))
    return _task_of_rows(HARD_NEEDLES, prompts, questions, answers, 0.0)


def ruler_task(reader: Reader, kind: str, length: int, count: int) -> Task:
    """One of RULER's tasks.

    Args:
        reader: The model's tokenizer.
        kind: One of `ruler.KINDS`.
        length: Tokens of a prompt with its question and answers, at most.
        count: The number of prompts.
    """
    room = length - len(reader.first)
    made = ruler.samples(kind, room, count, reader.seed, reader.encode)
    pieces = [[(reader.encode(piece), right) for piece, right in one.pieces] for one in made]
    task = _task_of_rows(
        f"{RULER} {kind}",
        [[*reader.first, *reader.encode(one.text)] for one in made],
        [reader.encode(one.question) for one in made],
        [[token for piece, _ in row for token in piece] for row in pieces],
        0.0,
    )
    assert task.answers is not None
    parts = tuple(_places(row, at) for row, at in zip(pieces, task.answers, strict=True))
    return replace(task, parts=parts)


def _places(pieces: Sequence[tuple[list[int], bool]], at: int) -> tuple[tuple[int, int], ...]:
    """Where the answers among some pieces begin and end, if the first piece begins at `at`."""
    ends = [at, *(at + end for end in accumulate(len(piece) for piece, _ in pieces))]
    return tuple((ends[i], ends[i + 1]) for i, (_, right) in enumerate(pieces) if right)


def _shortened(reader: Reader, document: str, facts: set[str], room: int) -> list[int]:
    """A document's last `room` tokens, with the facts that would be cut off after the cut.

    Raises:
        ValueError: The document is too short.
    """
    sentences = [f"{part.rstrip('.')}." for part in document.split(". ")]
    pieces = [(part in facts, reader.encode(f" {part}")) for part in sentences]
    surplus = sum(len(piece) for _, piece in pieces) + len(reader.first) - room
    if surplus < 0:
        raise ValueError(f"A document of hard needles has less than {room} tokens.")
    words_left: list[int] = []
    for is_fact, piece in pieces:
        cut = 0 if is_fact else min(surplus, len(piece))
        surplus -= cut
        words_left += piece[cut:]
    return [*reader.first, *words_left]


def _task_of_rows(
    name: str,
    prompts: Sequence[list[int]],
    questions: Sequence[list[int]],
    answers: Sequence[list[int]],
    least: float,
) -> Task:
    """Rows of equal lengths: prompts end where the shortest does, and the rest is continuation."""
    shortest = min(map(len, prompts))
    rest = [p[shortest:] + q for p, q in zip(prompts, questions, strict=True)]
    whole = [r + a for r, a in zip(rest, answers, strict=True)]
    longest = max(map(len, whole))
    return Task(
        name,
        (name,) * len(whole),
        [p[:shortest] for p in prompts],
        [row + [0] * (longest - len(row)) for row in whole],
        tuple(map(len, whole)),
        tuple(map(len, rest)),
        least,
    )
