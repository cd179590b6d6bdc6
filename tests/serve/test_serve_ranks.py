"""The server whose model two processes share: the same answers, and a page that stops neither."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import pytest

import mlx_h2o
from mlx_h2o.serve import views
from mlx_h2o.serve.ranks import require_shareable
from serving import MODEL, SIZE, alone, exchange, words

COMMAND = Path(sys.executable).with_name("mlx_h2o")
LAUNCH = Path(sys.executable).with_name("mlx.launch")


def launch(*options: str) -> subprocess.Popen[str]:
    """`mlx_h2o serve` on two ranks of this machine."""
    serve = [str(COMMAND), "serve", "--model", MODEL, "--port", "0", *options]
    # Its usual ports may be another run's.
    ports = ["--starting-port", str(20000 + os.getpid() % 10000)]
    words = [str(LAUNCH), "--backend", "ring", *ports, "-n", "2", *serve]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stderr=pipe, stdout=pipe, text=True, start_new_session=True)


@contextmanager
def shared(*options: str) -> Iterator[int]:
    """The port of such a server."""
    process = launch("--max-kv-size", str(SIZE), *options)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"Serving on http://127.0.0.1:(\d+)", line):
                yield int(found[1])
                break
    finally:
        try:
            interrupt(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C in a terminal: both ranks end, and so does what launched them.

    While MLX asks for a compiler with system(3) a Ctrl-C is lost, so it is pressed again.
    """
    for _ in range(5):
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
            return
    raise AssertionError("Ctrl-C does not end the ranks")


def client_of(port: int) -> Any:
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


@pytest.mark.slow
def test_two_ranks_answer_as_one_while_the_page_looks():
    """Looks come in the middle of answers: one that waited for rank 1 would stop everything."""
    loaded = mlx_h2o.load(MODEL)
    prompts = [words(40 * i, 60) for i in range(2)]
    with shared() as port, ThreadPoolExecutor(3) as pool:
        client = client_of(port)

        def ask(prompt: str, tokens: int = 8) -> Any:
            return client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0
            )

        first = ask(prompts[0])
        place = f"/h2o/conversations/{first.id}"
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        looks = [exchange(port, place)]
        while not all(answer.done() for answer in answers):
            looks.append(exchange(port, place))
        assert {status for status, *_ in looks} == {200}
        answer = looks[0][1]
        assert answer["processes"] == 2
        heads = [len(entry.budgets) for entry in mlx_h2o.make_prompt_cache(loaded[0], SIZE)]
        assert [layer["heads"] for layer in answer["layers"]] == [count // 2 for count in heads]
        half = exchange(port, f"{place}/half")
        assert half[0] == 200
        assert half[1]["bytes"] < answer["bytes"]
        expected = [alone(loaded, prompt) for prompt in prompts]
        assert first.choices[0].text == expected[0]
        assert [answer.result().choices[0].text for answer in answers] == expected
        sampled = [
            client.completions.create(
                model=MODEL, prompt=prompts[1], max_tokens=8, temperature=1.0, seed=7
            )
            for _ in range(2)
        ]
        assert sampled[0].choices[0].text == sampled[1].choices[0].text
        # A turn goes on from its caches on both ranks.
        more = ask(prompts[0] + expected[0] + " " + words(5, 8), 3)
        assert more.usage.prompt_tokens_details.cached_tokens > 0
        refused_on_ranks(port, place, client)


def refused_on_ranks(port: int, place: str, client: Any) -> None:
    """A click would change one rank alone; a request by itself could not be ended on both."""
    status, answer, _ = exchange(port, f"{place}/pins", {"pin": [[0, 4]]})
    assert status == 400
    assert "several processes share the model" in answer["error"]["message"]
    pins = {"mlx_h2o": {"max_size": SIZE, "pins": {"texts": ["no such words"]}}}
    with pytest.raises(openai.BadRequestError, match="no such words"):
        client.completions.create(model=MODEL, prompt="Anne", max_tokens=2, extra_body=pins)
    answer = client.completions.create(
        model=MODEL, prompt=words(0, 20), max_tokens=2,
        extra_body={"mlx_h2o": {"pins": {"spans": [[0, 6]]}}},
    )  # fmt: skip
    assert answer.choices[0].text


@pytest.mark.slow
def test_layers_that_choose_together_are_looked_at_but_not_tried():
    """What would be lost at half is a choice of all ranks, which one of them cannot begin."""
    with shared("--policy", "h2o:unit=layer", "--profile", "uniform") as port:
        answer = client_of(port).completions.create(
            model=MODEL, prompt=words(0, 70), max_tokens=2, temperature=0
        )
        place = f"/h2o/conversations/{answer.id}"
        assert exchange(port, place)[0] == 200
        status, answer, _ = exchange(port, f"{place}/half")
        assert (status, 'unit="layer"' in answer["error"]["message"]) == (400, True)
        assert exchange(port, place)[0] == 200


@pytest.mark.slow
def test_what_one_rank_would_decide_alone_is_refused_at_the_start():
    process = launch("--kv-memory", "1GB")
    _, errors = process.communicate(timeout=120)
    assert "several processes share the model" in errors
    assert "omit it, and bound each conversation" in errors


def test_refusals_say_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match="--kv-memory would bound one of them"):
        require_shareable(1, bounded=True, saving=False)
    with pytest.raises(ValueError, match="--sessions saves those of one"):
        require_shareable(1, bounded=False, saving=True)
    require_shareable(1, bounded=False, saving=False)
    monkeypatch.setattr("mlx_h2o.serve.ranks.processes", lambda: 2)
    with pytest.raises(ValueError, match="pins are a request's"):
        views.change_pins(None, "", {"pin": [[0, 1]]})
