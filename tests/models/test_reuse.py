"""A fact in a prefix that is packed, saved, shared, speculated over and continued in a batch."""

import copy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, speculative_generate_step

import mlx_h2o
from mlx_h2o.hosts.loaded import host_of
from mlx_h2o.loading.load import MODELS, SAMPLE_TEXT
from mlx_h2o.loading.vlm_text import TextModel

SIZE, DRAFTED, SPOKEN, ANSWER = 160, 3, 9, 6
FACT = "The secret number of Ada Hill is 4711."
QUESTIONS = (
    " Question: What is the secret number of Ada Hill? Answer:",
    " They walked on. Question: What is the secret number of Ada Hill? Answer:",
)


@pytest.fixture(params=["mlx-lm", "mlx-vlm"])
def host(request, embedded) -> tuple[Any, Any]:
    """The embedded model, as each library runs it, and its tokenizer."""
    if request.param == "mlx-lm":
        return embedded
    utils = pytest.importorskip("mlx_vlm.utils", reason="mlx-vlm is not installed here")
    model = TextModel(utils.load_model(MODELS / "recall-4m"))
    assert host_of(model).name == "mlx-vlm"
    return model, embedded[1]


def empty(model: Any) -> list[Any]:
    return mlx_h2o.make_prompt_cache(model, SIZE, bits=8, undo=DRAFTED)


def read(model: Any, cache: list[Any], tokens: list[int]) -> int:
    """The likeliest token after these."""
    return int(mx.argmax(model(mx.array([tokens]), cache=cache)[0, -1]).item())


def spoken(model: Any, cache: list[Any], token: int, count: int) -> list[int]:
    """Tokens by plain greedy decoding; the last one is not read."""
    tokens = [token]
    while len(tokens) < count:
        tokens.append(read(model, cache, tokens[-1:]))
    return tokens


def test_an_answer_after_every_reuse_is_that_of_a_fresh_cache(host, tmp_path):
    model, tokenizer = host
    filler = SAMPLE_TEXT.read_text(encoding="utf-8")[:1600]
    prefix = tokenizer.encode(f"{FACT} {filler}")
    questions = [tokenizer.encode(text, add_special_tokens=False) for text in QUESTIONS]
    assert len(prefix) > 2 * SIZE

    # A fresh cache each, in plain steps.
    expected, first = [], 0
    for question in questions:
        cache = empty(model)
        first = read(model, cache, prefix)
        text = spoken(model, cache, first, SPOKEN)
        expected.append(spoken(model, cache, read(model, cache, [text[-1], *question]), ANSWER))
    assert all(entry.evicted for entry in cache)
    assert "4711" in tokenizer.decode(expected[0])

    # One prefix, from a file, for two requests, each of which speculates first.
    cache = empty(model)
    read(model, cache, prefix)
    mlx_h2o.save_prompt_cache(tmp_path / "prefix", cache)
    shared = mlx_h2o.load_prompt_cache(tmp_path / "prefix")
    requests = [copy.deepcopy(shared) for _ in questions]
    for request in requests:
        draft = copy.deepcopy(request)
        steps = speculative_generate_step(
            mx.array([first]), model, model, num_draft_tokens=DRAFTED, max_tokens=SPOKEN - 1,
            prompt_cache=[*request, *draft],
        )  # fmt: skip
        assert [first, *(token for token, *_ in steps)] == text
        rest = request[0].offset - len(prefix) - (SPOKEN - 1)
        for entry in request:  # what it has read of the last token
            entry.trim(max(rest, 0))

    # Both go on in one batch.
    generator = BatchGenerator(model, max_tokens=ANSWER)
    prompts = [[text[-1], *question] for question in questions]
    uids = generator.insert(prompts, [ANSWER] * 2, caches=requests)
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    while any(len(tokens) < ANSWER for tokens in answers.values()):
        for response in generator.next()[1]:
            answers[response.uid].append(response.token)
    assert [answers[uid] for uid in uids] == expected
