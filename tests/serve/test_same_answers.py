"""The same question gets the same answer, whatever was asked before it, and whoever is beside."""

from __future__ import annotations

import importlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import mlx.core as mx
import pytest

from model_configs import config_of
from serving import MODEL, Running, alone, serving, until, words
from tiny_models import FAMILIES, tiny_model, with_random_weights

#: Models whose caches, as they are bounded, cannot be computed in one batch.
ONE_BY_ONE = ("deepseek_v3", "glm4_moe_lite", "kimi_linear")
#: Slots in which nothing that these tests ask is evicted, and in which nearly all of it is.
ROOMY, NARROW = 4096, 40


# -- one conversation after another ---------------------------------------------------------------

PROMPTS = [words(0, 9), words(0, 30), words(5, 30), words(200, 50)]


def request(drawn: random.Random) -> dict[str, Any]:
    """One of few prompts, as a text or a chat, with a limit and perhaps a stop."""
    prompt = drawn.choice(PROMPTS)
    body: dict[str, Any] = {"max_tokens": drawn.choice([1, 6, 17]), "temperature": 0}
    if drawn.random() < 0.4:
        body["stop"] = drawn.choice([" the", ",", "a", " and "])
    if drawn.random() < 0.5:
        return body | {"prompt": prompt}
    system = [{"role": "system", "content": "Be brief."}] if drawn.random() < 0.4 else []
    return body | {"messages": [*system, {"role": "user", "content": prompt}]}


def path_of(body: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in body else "/v1/chat/completions"


def answer_of(server: Running, body: dict[str, Any]) -> tuple[str, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path_of(body), json.dumps(body))
    response = connection.getresponse()
    told = json.loads(response.read())
    assert response.status == 200, told
    (choice,) = told["choices"]
    text = choice["text"] if "prompt" in body else choice["message"]["content"]
    return text, choice["finish_reason"]


def cut_off(server: Running, body: dict[str, Any]) -> None:
    """Ask for a stream, and hang up after its first piece."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path_of(body), json.dumps(body | {"stream": True, "max_tokens": 99}))
    connection.getresponse().readline()
    connection.close()


def same_answers(size: int, count: int, seed: int) -> None:
    """Each answer of a server that has answered others is that of one that has just begun."""
    drawn, expected = random.Random(seed), dict[str, Any]()
    settings = {"max_size": size, "budgets": "uniform"}
    with serving(defaults=settings) as server, serving(defaults=settings) as fresh:
        for _ in range(count):
            body = request(drawn)
            if drawn.random() < 0.25:
                cut_off(server, body)
                continue
            key = json.dumps(body, sort_keys=True)
            if key not in expected:
                until(lambda: fresh.scheduler.ledger.running == 0)
                fresh.scheduler.call(fresh.scheduler.conversations.clear).result()
                expected[key] = answer_of(fresh, body)
            assert answer_of(server, body) == expected[key], body


@pytest.mark.parametrize("size", [ROOMY, NARROW])
def test_each_answer_is_that_of_a_server_that_has_just_begun(size):
    same_answers(size, 15, seed=size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [ROOMY, NARROW])
def test_so_it_is_after_hundreds_of_requests(size, seed):
    same_answers(size, 300, seed)


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
        long = pool.submit(sampled, server, words(40, 30), 400, seed=1)
        until(lambda: server.scheduler.slots > 0)
        # Beside a long answer with a seed, others are answered, and have the seed's own answer.
        assert sampled(server, words(9, 30), seed=5) == first
        assert not long.done()
        assert long.result()


# -- long prompts ---------------------------------------------------------------------------------


def test_a_prompt_beyond_training_is_a_400_unless_it_is_wanted():
    body = {"prompt": words(0, 4000), "max_tokens": 1}
    with serving() as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        assert (response.status, error["code"]) == (400, "context_length_exceeded")
        assert "--long-prompts" in error["message"]
        rolling = {"max_size": 48, "positions": "rolling", "remainder": False, "bits": 16}
        assert answer_of(server, body | {"mlx_h2o": rolling})[1] == "length"
    with serving(long_prompts=True) as server:
        assert answer_of(server, body)[1] == "length"


def test_a_short_request_passes_a_long_prompt_and_a_client_that_left_frees_it_in_a_chunk(embedded):
    with serving(chunk=16, long_prompts=True) as server, ThreadPoolExecutor(1) as pool:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"prompt": words(0, 1500), "max_tokens": 1}
        pool.submit(connection.request, "POST", "/v1/completions", json.dumps(body)).result()
        until(lambda: server.scheduler.ledger.running == 1)
        assert server.ask(words(0, 20), 4) == alone(embedded, words(0, 20), 4, chunk=16)
        assert server.scheduler.ledger.running == 1  # the long one is still being read
        begun = time.monotonic()
        connection.close()
        until(lambda: server.scheduler.ledger.running == 0)
        assert time.monotonic() - begun < 5


# -- models whose caches cannot be batched --------------------------------------------------------


def model_of(family: str, vocabulary: int) -> Any:
    if family in FAMILIES:
        return tiny_model(family, vocab_size=vocabulary)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = config_of(family) | {"vocab_size": vocabulary}
    mx.random.seed(0)
    return with_random_weights(module.Model(module.ModelArgs.from_dict(config)))


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_models_whose_caches_cannot_be_batched_are_served(family, embedded, monkeypatch):
    """Alone and four at once, with a seed and without, with a stop, and going on."""
    tokenizer = embedded[1]
    model = model_of(family, tokenizer.vocab_size)
    monkeypatch.setattr("mlx_h2o.serve.model.load", lambda name: (model, tokenizer))
    prompts = [words(60 * i, 30) for i in range(4)]
    with serving(defaults={"max_size": 48}) as server, ThreadPoolExecutor(4) as pool:
        assert not server.scheduler.served.plan({"max_size": 48}).batches
        expected = [alone((model, tokenizer), prompt, 6) for prompt in prompts]
        assert server.ask(prompts[0], 6) == server.ask(prompts[0], 6) == expected[0]
        assert list(pool.map(lambda one: server.ask(one, 6), prompts)) == expected
        seeded = [sampled(server, prompts[1], 6, seed=3) for _ in range(2)]
        assert seeded[0] == seeded[1]
        assert len({sampled(server, prompts[1], 6) for _ in range(4)}) > 1
        stop = expected[2][3:6]
        assert server.ask(prompts[2], 6, stop=stop) == expected[2][: expected[2].index(stop)]
        more = server.client.completions.create(
            model=MODEL, prompt=f"{prompts[3]}{expected[3]} and", max_tokens=2
        )
        assert more.usage.prompt_tokens_details.cached_tokens > 0
