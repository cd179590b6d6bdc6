"""The same question gets the same answer, whatever was asked before it, and whoever is beside."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.random_requests import (
    PLAIN,
    Asker,
    Reference,
    answers_to,
    path_of,
    sender,
    with_template,
)
from mlx_h2o.serve.model import chunk_of
from mlx_h2o.serve.sampling import Sampler
from mlx_h2o.serve.sequence import Sequence
from serving import MODEL, Running, alone, exchange, serving, until, words

#: Slots in which nothing that these tests ask is evicted, and in which nearly all of it is.
ROOMY, NARROW = 4096, 40


# -- one conversation after another ---------------------------------------------------------------


def answer_of(server: Running, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a completion, and why it ended."""
    ((choice,), _) = answers_to(sender(server.port, 60), body)
    return choice["text"], choice["finish_reason"]


def cut_off(server: Running, body: dict[str, Any]) -> None:
    """Ask for a stream, and hang up after its first piece."""
    body = body | {"stream": True, "max_tokens": 99}
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        connection.request("POST", path_of(body), json.dumps(body))
        connection.getresponse().readline()


def same_answers(size: int, count: int, seed: int, folder: Path) -> int:
    """Compare answers with those of a server that has just begun; the number that were equal."""
    draw, templated = random.Random(seed), str(with_template(folder / "model"))
    settings: dict[str, Any] = {
        "defaults": {"max_size": size, "budgets": "uniform"}, "models": (PLAIN, templated),
    }  # fmt: skip
    with serving(**settings) as server, serving(**settings) as fresh:
        reference = Reference(sender(fresh.port, 60), fresh.scheduler)
        asker = Asker(draw, templated, reference, size == NARROW)
        for _ in range(count):
            if draw.random() < 0.2:
                cut_off(server, asker.request())
            else:
                assert asker.ask(sender(server.port, 60)) is None
    return asker.compared


@pytest.mark.parametrize("size", [ROOMY, NARROW])
def test_each_answer_is_that_of_a_server_that_has_just_begun(size, tmp_path):
    assert same_answers(size, 12, size, tmp_path) > 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [ROOMY, NARROW])
def test_so_it_is_after_hundreds_of_requests(size, seed, tmp_path):
    assert same_answers(size, 300, seed, tmp_path) > 150


def test_several_answers_go_on_from_the_same_caches(monkeypatch):
    """Though nothing but the newest of them stays in memory."""
    monkeypatch.setattr("mlx_h2o.serve.conversations.MAX_ENTRIES", 1)
    with serving(defaults={"max_size": NARROW, "budgets": "uniform"}) as server:
        first = words(200, 60)
        answer = server.client.completions.create(
            model=MODEL,
            prompt=f"{first}{server.ask(first, 6)} and so",
            max_tokens=1,
            n=4,
            logprobs=1,
        )
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
        # Alone and in a batch sums differ by the last bits.
        assert np.ptp([one.logprobs.token_logprobs[0] for one in answer.choices]) < 1e-3


# -- seeds ----------------------------------------------------------------------------------------


def sampled(server: Running, prompt: str, tokens: int = 8, **options: Any) -> str:
    answer = server.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=1.0, **options
    )
    return answer.choices[0].text


def test_a_seed_changes_no_answer_of_others_and_keeps_none_waiting():
    with serving() as server, ThreadPoolExecutor(4) as pool:
        first = sampled(server, words(9, 30), seed=5)
        assert len({sampled(server, words(9, 30)) for _ in range(4)}) > 1
        long = pool.submit(sampled, server, words(40, 30), 150, seed=1)
        until(lambda: server.scheduler.slots > 0)
        # Beside a long answer with a seed, others are answered, and have the seed's own answer.
        assert sampled(server, words(9, 30), seed=5) == first
        assert not long.done()
        assert long.result()


def test_a_seed_draws_the_same_token_though_the_last_bits_differ():
    """As they do between a batch and a request alone."""
    logits = mx.random.normal((1, 5000), key=mx.random.key(0))
    others = logits + 1e-4 * (mx.arange(5000) < 2500)
    for seed in range(50):
        one = Sampler(seed=seed, temperature=1.0)
        assert one.draw(logits, 0).item() == one.draw(others, 0).item()


def test_an_answer_is_continued_with_its_own_tokens_after_a_restart_too(tmp_path):
    """Nothing is added to it, so the prompt is the conversation's whole text."""

    def turns(server: Running, text: str, ends: list[str]) -> str:
        for end in ends:
            text += sampled(server, text, 17, seed=1) + end
        return text

    prompt = words(200, 50)
    with serving(defaults={"max_size": ROOMY}) as server:
        expected = turns(server, prompt, [", so", "", ""])
    for ends in ([", so", ""], [""]):
        with serving(defaults={"max_size": ROOMY}, sessions=tmp_path) as server:
            prompt = turns(server, prompt, ends)
    assert prompt == expected


# -- long prompts ---------------------------------------------------------------------------------


def test_a_prompt_beyond_training_is_a_400_unless_it_is_wanted():
    body = {"prompt": words(0, 2000), "max_tokens": 1}
    with serving() as server:
        status, answer, _ = exchange(server.port, "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "--long-prompts" in answer["error"]["message"]
        rolling = {"max_size": 48, "positions": "rolling", "remainder": False, "bits": 16}
        assert answer_of(server, body | {"mlx_h2o": rolling})[1] == "length"
    with serving(long_prompts=True) as server:
        assert answer_of(server, body)[1] == "length"


def test_a_short_request_passes_a_long_prompt_and_a_client_that_left_frees_it_in_a_chunk(
    embedded, monkeypatch
):
    gone, next_chunk = list[bool](), Sequence.next_chunk

    def watched(one: Sequence, size: int) -> list[int]:
        gone.append(one.request.gone.is_set())
        return next_chunk(one, size)

    monkeypatch.setattr(Sequence, "next_chunk", watched)
    with serving(chunk=16, long_prompts=True) as server, ThreadPoolExecutor(1) as pool:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"prompt": words(0, 1500), "max_tokens": 1}
        pool.submit(connection.request, "POST", "/v1/completions", json.dumps(body)).result()
        until(lambda: server.scheduler.ledger.running == 1)
        assert server.ask(words(0, 20), 4) == alone(embedded, words(0, 20), 4, chunk=16)
        assert server.scheduler.ledger.running == 1  # the long one is still being read
        assert len(gone) < 90  # of more than 120 chunks
        connection.close()
        until(lambda: server.scheduler.ledger.running == 0)
        assert sum(gone) <= 1


def test_a_short_request_waits_for_one_chunk_of_a_long_prompt(monkeypatch):
    chunks, ends = list[tuple[float, Sequence]](), dict[Sequence, float]()
    next_chunk, deliver = Sequence.next_chunk, Sequence.deliver

    def watched(one: Sequence, size: int) -> list[int]:
        chunks.append((time.monotonic(), one))
        time.sleep(0.03)  # so that short ones come while the long one is read
        return next_chunk(one, size)

    def delivered(one: Sequence, event: Any) -> None:
        ends[one] = time.monotonic()
        deliver(one, event)

    monkeypatch.setattr(Sequence, "next_chunk", watched)
    monkeypatch.setattr(Sequence, "deliver", delivered)
    with serving(chunk=4, long_prompts=True) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"prompt": words(0, 1500), "max_tokens": 1}
        connection.request("POST", "/v1/completions", json.dumps(body))
        until(lambda: len(chunks) > 0)
        for i in range(8):
            server.ask(words(20 * i, 3), 1)
        connection.close()
    long, waits = chunks[0][1], 0
    for one in {one for _, one in chunks if one is not long}:
        times = [at for at, other in chunks if other is long]
        waits += sum(one.request.arrival < at < ends[one] for at in times)
    assert waits < 6  # of 8: a chunk may begin while a request arrives


def test_a_chunk_takes_half_a_second_whatever_the_model():
    sizes = [chunk_of(int(parameters)) for parameters in (4e6, 135e6, 1e9, 70e9)]
    assert (sizes[0], sizes[-1]) == (512, 32)
    assert sizes == sorted(sizes, reverse=True)
