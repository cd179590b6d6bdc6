"""RULER's tasks, generated here: needles, chains of variables, and words to count.

After Hsieh et al. 2024, arXiv 2404.06654, in words of our own: the hidden content, its amount and
the question are that paper's; figures are not comparable with its own. Answers are free; each
expected string that occurs in them counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_h2o.evaluate.facts import paragraphs_of
from mlx_h2o.evaluate.measures.base import Measure, Result, Results, fraction, part_of
from mlx_h2o.evaluate.methods import Method
from mlx_h2o.evaluate.reader import Reader, Tell, greedy_tokens, in_batches, step
from mlx_h2o.evaluate.report import Rows, Section

_WORDS = (
    "anchor apple arrow basket beacon bottle branch bridge bucket button candle canvas carpet "
    "castle cherry circle cloud copper corner cotton cradle dagger desert dragon eagle engine "
    "falcon feather fiddle forest garden ginger hammer harbor helmet hollow island jacket kettle "
    "ladder lantern lemon marble meadow mirror needle orange oyster palace pebble pepper pillow "
    "planet pocket rabbit ribbon saddle shadow silver spider sugar temple thunder ticket tunnel "
    "turtle valley velvet violet walnut window winter yellow"
).split()
_LETTERS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"

#: Values of a key, queries of a prompt, and links of a chain, as in RULER (a chain is one link
#: shorter, for models of this project's size).
VALUES, QUERIES, HOPS = 4, 4, 3
#: Distractors of the task with many keys.
KEYS = 4
#: How often common and other words occur, and how many are asked for.
COMMON_TIMES, RARE_TIMES, COMMON = 12, 2, 5
#: The frequency of word i is 1 / i^2 of all words; this many are asked for.
FREQUENT = 3


@dataclass(frozen=True)
class Task:
    """One prompt's content.

    Attributes:
        pieces: Sentences to hide in prose, or the words of a list that fills the whole prompt.
        question: The question after the pieces.
        answers: Strings expected in a correct answer; each counts.
        fills: Whether the pieces are the whole text, with no prose between them.
    """

    pieces: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    fills: bool = False


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def _ask(keys: Sequence[str]) -> str:
    one = len(keys) == 1
    of = keys[0] if one else f"{', '.join(keys[:-1])} and {keys[-1]}"
    return f"The special magic numbers for {of} that the text mentions are:"


def single(rng: random.Random, room: int) -> Task:
    """One key with one value."""
    key, value = rng.choice(_WORDS), _number(rng)
    return Task((_needle(key, value),), _ask([key]), (value,))


def multi_key(rng: random.Random, room: int) -> Task:
    """Several keys with a value each; one of them is asked for."""
    keys = rng.sample(_WORDS, KEYS)
    values = [_number(rng) for _ in keys]
    needles = tuple(map(_needle, keys, values))
    return Task(needles, _ask(keys[:1]), (values[0],))


def multi_value(rng: random.Random, room: int) -> Task:
    """One key with several values; all are asked for."""
    key, values = rng.choice(_WORDS), [_number(rng) for _ in range(VALUES)]
    return Task(tuple(_needle(key, value) for value in values), _ask([key]), tuple(values))


def multi_query(rng: random.Random, room: int) -> Task:
    """Several keys with a value each; all are asked for."""
    keys = rng.sample(_WORDS, QUERIES)
    values = [_number(rng) for _ in keys]
    return Task(tuple(map(_needle, keys, values)), _ask(keys), tuple(values))


def variables(rng: random.Random, room: int) -> Task:
    """A chain of assignments; all names with the first one's value are asked for."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(4))
        names += [name] if name not in names else []
    value = _number(rng)
    values = [value, *(f"VAR {name}" for name in names)]
    pieces = tuple(f"VAR {name} = {of}." for name, of in zip(names, values, strict=False))
    question = f"The variables that have the value {value} in the text above are:"
    return Task(pieces, question, tuple(names))


def common_words(rng: random.Random, room: int) -> Task:
    """A numbered list in which a few words occur often, and all others seldom."""
    words = rng.sample(_WORDS, len(_WORDS))
    common, rare = words[:COMMON], words[COMMON:]
    listed = common * COMMON_TIMES
    # A line takes about four tokens; the list is cut to the room when it is encoded.
    listed += rare[: max(room // (4 * RARE_TIMES) - len(listed) // RARE_TIMES, 4)] * RARE_TIMES
    rng.shuffle(listed)
    pieces = tuple(f"{i + 1}. {word}" for i, word in enumerate(listed))
    return Task(pieces, f"The {COMMON} words that come most often are:", tuple(common), True)


def frequent_words(rng: random.Random, room: int) -> Task:
    """Invented words by Zipf's law; the most frequent are asked for."""
    count = 40
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choice(_LETTERS) + rng.choice(_VOWELS) for _ in range(3))
        words += [word] if word not in words else []
    weights = [1 / (i + 1) ** 2 for i in range(count)]
    drawn = rng.choices(words, weights, k=max(room // 5, 12))
    by_count = sorted(set(drawn), key=lambda word: (-drawn.count(word), word))
    question = f"The {FREQUENT} words that come most often in the text above are:"
    return Task(tuple(drawn), question, tuple(by_count[:FREQUENT]), True)


TASKS: dict[str, Callable[[random.Random, int], Task]] = {
    "single": single,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "variables": variables,
    "common words": common_words,
    "frequent words": frequent_words,
}


def prompt(reader: Reader, name: str, length: int, rng: random.Random) -> tuple[list[int], Task]:
    """A task's prompt of exactly `length` tokens.

    Args:
        reader: Model and text; the text's prose is the hay.
        name: The task's name.
        length: Tokens, the question included.
        rng: The random source.

    Raises:
        ValueError: The task does not fit, or the text is too short.
    """
    task = TASKS[name](rng, length)
    question = reader.encode(f"\n\n{task.question}")
    room = length - len(reader.first) - len(question)
    body = _filled(reader, task, room) if task.fills else _hidden(reader, task, room, rng)
    return [*reader.first, *body, *question], task


def _filled(reader: Reader, task: Task, room: int) -> list[int]:
    """The pieces one after the other, up to the room; prose before them if they are too few."""
    tokens = reader.encode(" ".join(task.pieces))[: max(room, 0)]
    return reader.prose(room - len(tokens), 0) + tokens if len(tokens) < room else tokens


def _hidden(reader: Reader, task: Task, room: int, rng: random.Random) -> list[int]:
    """The pieces in their order between paragraphs of prose."""
    pieces = [reader.encode(piece + "\n\n") for piece in task.pieces]
    left = room - sum(map(len, pieces))
    if left < 0:
        raise ValueError(f"The task's {len(pieces)} sentences do not fit into {room} tokens.")
    if sum(map(len, reader.paragraphs)) < left:
        raise ValueError(f"The text is too short to hide anything in: it needs {left} tokens.")
    prose = paragraphs_of(reader.paragraphs, left, rng)
    places = sorted(rng.randrange(len(prose) + 1) for _ in pieces)
    row: list[int] = []
    for i in range(len(prose) + 1):
        for place, piece in zip(places, pieces, strict=True):
            row += piece if place == i else []
        row += prose[i] if i < len(prose) else []
    return row


def strings_in(text: str, answers: Sequence[str]) -> list[bool]:
    """Whether each answer occurs in a text, in any case: RULER's string match."""
    low = text.lower()
    return [answer.lower() in low for answer in answers]


@dataclass(frozen=True)
class RulerMeasure(Measure):
    """Some prompts of each task.

    Attributes:
        length: Tokens of a prompt.
        of_each: Prompts of each task.
        answer: Tokens of an answer.
        batch: Prompts side by side.
    """

    length: int = 1024
    of_each: int = 4
    answer: int = 32
    batch: int = 7

    name = "ruler"
    briefly = "strings of RULER's tasks answered"

    def tokens(self) -> int:
        return self.length

    def work(self) -> int:
        return len(TASKS) * self.of_each * (self.length + self.answer)

    def passes(self) -> int:
        return -(-len(TASKS) * self.of_each // self.batch) * (self.answer + 2)

    def of(self, reader: Reader, method: Method, tell: Tell) -> Result:
        rng = random.Random(reader.seed)
        made = [
            (name, *prompt(reader, name, self.length, rng))
            for _ in range(self.of_each)
            for name in TASKS
        ]
        tokens = mx.array([row for _, row, _ in made])
        strings: dict[str, list[list[bool]]] = {name: [] for name in TASKS}
        for rows in in_batches(len(made), self.batch):
            prompts = tokens[rows]
            cache = method.after(reader, prompts[:, :-1], self.length + self.answer, tell)
            logits = step(reader.model, cache, prompts[:, -1], tell)
            answers = greedy_tokens(reader.model, cache, logits, self.answer, tell)
            for (name, _, task), ids in zip(made[rows], answers, strict=True):
                strings[name].append(strings_in(reader.tokenizer.decode(ids), task.answers))
        return {"strings": strings}

    def brief(self, result: Result, full: Result) -> str:
        counts = [_part(result["strings"][name], full["strings"][name]) for name in TASKS]
        known, asked = map(sum, zip(*counts, strict=True))
        return fraction(known, asked)

    def section(self, results: Results) -> Section:
        full = results[0][1]["strings"]
        rows = []
        for method, result in results:
            counts = [_part(result["strings"][name], full[name]) for name in TASKS]
            cells = [fraction(*of_task) for of_task in counts]
            rows.append((method.name, self.brief(result, results[0][1]), *cells))
        asked_for = {name: sum(map(len, full[name])) for name in TASKS}
        caption = "Strings asked for in all: " + ", ".join(
            f"{name} {count}" for name, count in asked_for.items()
        )
        return Section(
            "RULER's tasks",
            f"Prompts of {self.length} tokens read in chunks, the question with the last, and "
            f"{self.answer} tokens of free answer. Only strings that the full cache gives count.",
            [Rows("", ("cache", "all", *TASKS), rows, caption)],
        )


def _part(ours: list[list[bool]], full: list[list[bool]]) -> tuple[int, int]:
    """Strings given, among those that the full cache gives."""
    pairs = [part_of(a, b) for a, b in zip(ours, full, strict=True)]
    return sum(known for known, _ in pairs), sum(asked for _, asked in pairs)
