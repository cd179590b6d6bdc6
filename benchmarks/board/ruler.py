"""RULER's synthetic tasks, by the generators and templates of lm-eval.

Source: *RULER: What's the Real Context Size of Your Long-Context Language Models?*,
https://arxiv.org/abs/2404.06654, as lm-eval 0.4.13 has it (`lm_eval/tasks/ruler`). Its generators
make the text, the question and the answers; here each text gets the most units (words, sentences,
assignments) with which it fits a number of tokens, since lm-eval's own steps suit 4,096 and more.

What differs: texts in prose are held-out speeches instead of essays that lm-eval would download,
cut into sentences at full stops. Variable tracking has no worked example before it, which takes 500
tokens itself. The two tasks with questions about documents need data sets from a network, and are
left out.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import transformers  # noqa: F401 (before `datasets` is stood in for, which it would look at)

from benchmarks.board.packages import unpacked
from benchmarks.board.texts import CODE, speeches

WORDS = "wonderwords==3.0.1"
#: The package that generates, of which the board reads some source as a text, too, and its module.
HARNESS, PACKAGE = CODE, "lm_eval.tasks.ruler"
#: The oldest nltk that the generators take; they use nothing of it but sentences.
NLTK = "3.9.1"
#: Units of a text at most: more than the longest prompt of the board has tokens.
MOST_UNITS = 4096
#: Hops of a chain of variables, and the frequencies of words, as in the generators' defaults.
HOPS = 4
COMMON, RARE_ALPHA = 10, 2.0


@dataclass(frozen=True)
class Sample:
    """One prompt of a task.

    Attributes:
        text: What is read.
        question: What is asked after the text, up to where the answer begins, without the space.
        answers: What is to be said, in this order.
        joint: What stands between an answer and the space before the next.
    """

    text: str
    question: str
    answers: tuple[str, ...]
    joint: str

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The pieces that follow the question, and whether each is an answer."""
        pieces = [(f" {answer}", True) for answer in self.answers]
        joints = [(self.joint, False)] * (len(pieces) - 1) if self.joint else []
        return [piece for pair in zip_longest(pieces, joints) for piece in pair if piece]


#: Makes a sample with so many units, or raises ValueError if these are too few.
Make = Callable[[int], Sample]

#: Tasks with needles: text, kind of key, kind of value, and how many keys, values and queries.
NEEDLES: dict[str, dict[str, Any]] = {
    "single 1": {"type_haystack": "repeat"},
    "single 2": {"type_haystack": "essay"},
    "single 3": {"type_haystack": "essay", "type_needle_v": "uuids"},
    "multikey 1": {"type_haystack": "essay", "num_needle_k": 4},
    "multikey 2": {"type_haystack": "needle"},
    "multikey 3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "multivalue": {"type_haystack": "essay", "num_needle_v": 4},
    "multiquery": {"type_haystack": "essay", "num_needle_k": 4, "num_needle_q": 4},
}
#: All tasks. The last three are variable tracking, common words and frequent words.
KINDS = (*NEEDLES, "vt", "cwe", "fwe")


def samples(
    kind: str, length: int, count: int, seed: int, encode: Callable[[str], Sequence[int]]
) -> list[Sample]:
    """Prompts of one task; equal arguments make equal prompts.

    Args:
        kind: One of `KINDS`.
        length: Tokens of text, question and answers together, at most; a unit less at least.
        count: The number of prompts.
        seed: The seed.
        encode: Makes tokens of a string.

    Raises:
        ValueError: The length is too short for the task.
        Missing: pip cannot get a package.
    """
    with_seed = _makers(length)[kind]

    def tokens(sample: Sample) -> int:
        parts = [sample.text, sample.question, *(piece for piece, _ in sample.pieces)]
        return sum(len(encode(part)) for part in parts)

    made = []
    for i in range(count):
        drawn = seed * count + i

        def make(units: int, drawn: int = drawn) -> Sample:
            with _seeded(drawn):
                return with_seed(units)

        made.append(_fitted(make, tokens, length))
    return made


def _fitted(make: Make, tokens: Callable[[Sample], int], length: int) -> Sample:
    """The sample with the most units that fits, by bisection."""
    best, low, high = None, 1, min(length, MOST_UNITS)
    while low <= high:
        units = (low + high) // 2
        try:
            sample = make(units)
        except ValueError:  # too few units for what is to be hidden in them
            low = units + 1
            continue
        if tokens(sample) <= length:
            best, low = sample, units + 1
        else:
            high = units - 1
    if best is None:
        raise ValueError(f"A prompt of RULER does not fit {length} tokens: give more.")
    return best


def _makers(length: int) -> dict[str, Make]:
    makers: dict[str, Make] = {kind: _needles(**of) for kind, of in NEEDLES.items()}
    return makers | {"vt": _variables, "cwe": _common_words(length), "fwe": _frequent_words(length)}


def _needles(
    *,
    type_haystack: str,
    type_needle_k: str = "words",
    type_needle_v: str = "numbers",
    **counts: int,
) -> Make:
    def make(units: int) -> Sample:
        module = _module("prepare_niah")
        prose = type_haystack == "essay"
        haystack = _prose() if prose else module.get_haystack(type_haystack=type_haystack)
        needed = {"num_needle_k": 1, "num_needle_v": 1} | counts
        text, answers, query = module.generate_input_output(
            units,
            haystack,
            type_haystack=type_haystack,
            type_needle_k=type_needle_k,
            type_needle_v=type_needle_v,
            template=_module("niah_utils").TEMPLATE,
            **needed,
        )
        one = len(answers) == 1
        template = f"{type_needle_v[:-1]} for" if one else f"{type_needle_v} for"
        # The words with which `generate_samples` lets an answer begin.
        prefix = f"The special magic {template} {query} mentioned in the provided text "
        return _split(text, "\nWhat ", f" {prefix}{'is' if one else 'are'}", answers, ",")

    return make


def _variables(units: int) -> Sample:
    module = _module("vt_utils")
    text, answers = module.generate_input_output(units, 1, HOPS)
    return _split(text, "\nQuestion:", "", answers, "")


def _common_words(length: int) -> Make:
    def make(units: int) -> Sample:
        module = _module("cwe_utils")
        module.RNG = random.Random(random.randrange(1 << 30))  # it keeps a state of its own
        _, text, answers = module.generate_input_output(units + COMMON, length)
        return _split(text, "\nQuestion:", "", answers, ",")

    return make


def _frequent_words(length: int) -> Make:
    def make(units: int) -> Sample:
        module = _module("fwe_utils")

        # The generator shortens a text that is too long: as if none were, since `_fitted` does.
        def nothing(text: str) -> SimpleNamespace:
            return SimpleNamespace(input_ids=[])

        text, answers, _ = module.generate_input_output(
            length, nothing, num_words=units, vocab_size=max(length // 50, 4), alpha=RARE_ALPHA
        )
        counts = [text.count(answer) for answer in answers]
        if min(counts) < 1 or len(set(counts)) < len(counts):
            raise ValueError("the three words are not told apart by how often they come")
        return _split(text, "\nQuestion:", "", answers, ",")

    return make


def _split(text: str, where: str, prefix: str, answers: Sequence[str], joint: str) -> Sample:
    """A text and its question, which begins at the last `where`."""
    before, match, question = text.rpartition(where)
    if not match or not all(answers):
        raise ValueError("too few units")
    return Sample(before, (match + question + prefix).rstrip(), tuple(answers), joint)


@cache
def _prose() -> list[str]:
    """Words of the held-out speeches."""
    return re.sub(r"\s+", " ", speeches()).split(" ")


def sentences(text: str) -> list[str]:
    """A text's sentences: each ends with a full stop, an exclamation or a question mark."""
    return [part for part in re.split(r"(?<=[.!?]) +", text) if part]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The generators draw from the shared states of `random` and numpy, which are put back."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@cache
def _module(name: str) -> Any:
    """A module of `lm_eval.tasks.ruler`, without what lm-eval needs for other things.

    Raises:
        Missing: pip cannot get a package.
    """
    harness, words = unpacked(HARNESS), unpacked(WORDS)
    stands_in = {
        package: _shell(package, path=str(harness / package.replace(".", "/")))
        for package in ("lm_eval", "lm_eval.tasks", PACKAGE)
    }
    nltk: dict[str, Any] = {"sent_tokenize": sentences, "data": SimpleNamespace(find=bool)}
    stands_in |= {"datasets": _shell("datasets"), "nltk": _shell("nltk", **nltk)}
    if importlib.util.find_spec("scipy") is None:
        scipy = "scipy", "scipy.special"
        stands_in |= {package: _shell(package, path="", zeta=_zeta) for package in scipy}
    version = importlib.metadata.version

    def version_of(package: str) -> str:
        return NLTK if package == "nltk" else version(package)

    with (
        _standing_in(stands_in),
        patch.object(sys, "path", [*sys.path, str(words)]),
        patch.object(importlib.metadata, "version", version_of),
    ):
        return importlib.import_module(f"{PACKAGE}.{name}")


@contextmanager
def _standing_in(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Modules that others import by these names meanwhile."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _shell(name: str, path: str | None = None, **members: Any) -> ModuleType:
    """A module that stands in for a package: with a path, its submodules are real."""
    spec = importlib.machinery.ModuleSpec(name, None, is_package=path is not None)
    made = importlib.util.module_from_spec(spec)
    if path is not None:
        made.__path__ = [path]
    vars(made).update(members)
    return made


def _zeta(alpha: float) -> float:
    """Riemann's zeta function at 2, which is all that is asked for."""
    if alpha != RARE_ALPHA:
        raise ValueError(f"zeta is known at {RARE_ALPHA} alone; install scipy for {alpha}.")
    return math.pi**2 / 6
