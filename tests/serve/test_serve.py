"""`mlx_h2o serve`: real clients, one bound for everything, and what is refused."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import mlx_lm
import openai
import pytest

import mlx_h2o
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.serve.access import AccessRules
from mlx_h2o.serve.launch import ServerSettings, serve
from mlx_h2o.serve.memory import most_bytes
from mlx_h2o.serve.settings import EngineSettings
from serving import MODEL, SIZE, Running, alone, exchange, serving, until, words
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_the_start_says_model_bound_page_key_and_what_a_conversation_takes(capsys, embedded):
    with serving(aliases={"gpt-4o": MODEL}, bound=64_000_000, host="0.0.0.0") as running:
        port = running.port
    told = capsys.readouterr().err
    memory = mlx_h2o.describe(mlx_h2o.make_prompt_cache(embedded[0], SIZE)).memory
    assert f"a conversation: {memory}" in told
    assert f"model: {MODEL}, gpt-4o; KV memory: 64.0 MB for all; no key" in told
    assert f"page: http://THIS_MACHINE:{port}/" in told
    assert "Warning: other machines can use this server" in told
    with serving(rules=AccessRules("sesame")):
        told = capsys.readouterr().err
    assert "KV memory: no bound; needs the key" in told
    assert "Warning" not in told


# -- clients --------------------------------------------------------------------------------------


def test_requests_side_by_side_get_what_each_gets_alone(plain, embedded):
    """Streaming and not, two of them with settings of their own."""
    assert plain.scheduler.models.loaded[0].plan(plain.scheduler.settings.defaults).batches
    own = {"max_size": 64, "policy": "h2o", "remainder": False}
    cases = [(words(100 * i, 60 + 7 * i), {} if i < 3 else own) for i in range(5)]

    def ask(case: tuple[str, dict[str, Any]]) -> str:
        prompt, settings = case
        body = {"mlx_h2o": settings} if settings else None
        return plain.ask(prompt, 12, extra_body=body)

    def stream(case: tuple[str, dict[str, Any]]) -> str:
        prompt, settings = case
        chunks = plain.client.completions.create(
            model="default_model", prompt=prompt, max_tokens=12, temperature=0, stream=True,
            extra_body={"mlx_h2o": settings} if settings else None,
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        whole_answers, streamed = pool.map(ask, cases), pool.map(stream, cases)
        expected = [alone(embedded, prompt, 12, **settings) for prompt, settings in cases]
        assert list(whole_answers) == list(streamed) == expected


def test_a_chat_goes_on_from_its_own_caches(plain):
    messages = [{"role": "user", "content": words(0, 70)}]
    first = plain.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6)
    text = first.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And Anne?"}]
    second = plain.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens


def test_the_same_question_again_is_answered_again(plain):
    """Also where everything of it was seen: generation needs one token that is not."""
    answers = {plain.ask(words(300, 20), 1) for _ in range(3)}
    assert len(answers) == 1


def test_curl_streams(plain):
    body = json.dumps({"prompt": words(5, 30), "max_tokens": 4, "stream": True})
    curl = ["curl", "-sS", "--max-time", "60", "-H", "Content-Type: application/json", "-d", body]
    lines = subprocess.run(
        [*curl, f"{plain.url}/v1/completions"], capture_output=True, text=True, check=True
    ).stdout.split("\n\n")
    chunks = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert chunks[-1] == "[DONE]"
    assert json.loads(chunks[-2])["choices"][0]["finish_reason"] == "length"


def test_an_unknown_model_is_a_404_and_an_alias_is_known(plain):
    with pytest.raises(openai.NotFoundError, match="does not exist") as refused:
        plain.client.completions.create(model="gpt-9", prompt="x", max_tokens=1)
    error = refused.value
    assert (error.type, error.param) == ("invalid_request_error", None)  # as OpenAI has it
    assert error.code == "model_not_found"
    with serving(aliases={"gpt-4o": MODEL}) as running:
        answer = running.client.completions.create(model="gpt-4o", prompt="x", max_tokens=1)
        assert answer.model == MODEL
        assert [one.id for one in running.client.models.list()] == [MODEL, "gpt-4o"]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"mlx_h2o": {"max_size": 2}}, "max_size"),
        ({"mlx_h2o": {"max_size": "many"}}, "whole number"),
        ({"mlx_h2o": {"policy": "h2p"}}, "Unknown policy 'h2p'"),
        ({"mlx_h2o": {"sonk": 3}}, "no option sonk"),
        ({"mlx_h2o": {"policy": "h2o:sonk=3"}}, "no field sonk"),
        ({"mlx_h2o": {"budgets": "/etc/passwd"}}, "only when the server is started"),
        ({"mlx_h2o": 5}, "mlx_h2o: Input should be an object"),
        ({"kv_bits": 4}, "kv_bits is not served"),
        ({"adapters": "/tmp"}, "adapters is not served"),
        ({"draft_model": "other"}, "draft_model"),
        ({"n": 5}, "n: Input should be less than or equal to 4"),
        ({"response_format": {"type": "yaml"}}, "response_format.type: Input should be"),
        ({"stop": [1]}, "stop: Input should be"),
        ({"stop": ""}, None),
        ({"top_k": 10**9}, "top_k"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [1, 2]}, "one text"),
        ({"user": "me", "metadata": {"a": "b"}}, None),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(plain, extra, message):
    body = {"model": MODEL, "prompt": words(0, 9), "max_tokens": 2} | extra
    status, answer, _ = exchange(plain.port, "/v1/completions", body)
    assert status == (200 if message is None else 400), answer
    assert message is None or message in answer["error"]["message"]
    assert plain.scheduler.is_alive


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(request)
        return client.recv(1 << 16)


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        ("Content-Length: 99999999999", b"", 413),
        ("Content-Length: -1", b"", 400),
        ("Content-Length: 2\r\nOrigin: http://evil.example", b"{}", 403),
        ("Content-Length: 2", b"\xff\xfe", 400),
        ("Content-Length: 2", b"[]", 400),
        ("", b"", 411),
    ],
)
def test_bodies_that_are_none_are_refused(plain, head, body, status):
    lines = "POST /v1/completions HTTP/1.1\r\nHost: here\r\n" + (f"{head}\r\n" if head else "")
    answer = raw(plain.port, lines.encode() + b"\r\n" + body)
    assert answer.split()[1] == str(status).encode()


def test_messages_may_name_no_file_and_no_other_server(plain):
    for url in ("file:///etc/passwd", "http://127.0.0.1:1/x.png"):
        part = {"type": "image_url", "image_url": {"url": url}}
        with pytest.raises(openai.BadRequestError, match="fetches nothing"):
            plain.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": [part]}]
            )


def test_an_older_mlx_lm_is_refused_with_what_to_do_instead(monkeypatch):
    monkeypatch.setattr(mlx_lm, "__version__", "0.31.3")
    with pytest.raises(ValueError, match=r"needs mlx-lm 0\.32\.2 or later; this is 0\.31\.3"):
        serve(ServerSettings(EngineSettings((MODEL,))))


# -- the bound ------------------------------------------------------------------------------------


def test_the_bound_holds_while_requests_wait_and_idle_conversations_make_room(embedded):
    """Room for two and a half; seven come, and all get what they get alone."""
    model, _ = embedded
    need = most_bytes(mlx_h2o.make_prompt_cache(model, SIZE))
    bound = int(2.5 * need)
    with serving(bound=bound) as running:
        prompts = [words(150 * i, 80) for i in range(7)]
        with ThreadPoolExecutor(7) as pool:
            answers = list(pool.map(lambda prompt: running.ask(prompt, 24), prompts))
        assert answers == [alone(embedded, prompt, 24) for prompt in prompts]
        scheduler = running.scheduler
        until(lambda: scheduler.ledger.running == 0)
        assert need < scheduler.ledger.peak <= bound
        assert scheduler.conversations.nbytes <= bound
        assert scheduler.conversations.shrunk > 0
        assert scheduler.conversations.forgotten > 0
        with pytest.raises(openai.BadRequestError, match="send a smaller max_size"):
            running.ask(words(0, 9), extra_body={"mlx_h2o": {"max_size": 4096}})
        text = exchange(running.port, "/metrics")[1]
        value = {
            name: float(re.search(rf"^mlx_h2o_{name}(?:{{.*}})? (\S+)$", text, re.M)[1])
            for name in ("kv_bytes_bound", "kv_bytes_peak", "generated_tokens_total", "queue")
        }
        assert value["kv_bytes_bound"] == bound
        assert value["kv_bytes_peak"] <= bound
        assert value["generated_tokens_total"] == 7 * 24
        assert value["queue"] == 0


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_layers_of_other_kinds_are_within_the_bound_too(family, embedded, monkeypatch):
    """Sliding windows and states: room for two and a half conversations, of five."""
    _, tokenizer = embedded
    model = tiny_model(family, vocab_size=tokenizer.vocab_size)
    monkeypatch.setattr("mlx_h2o.serve.model.load", lambda name: (model, tokenizer))
    need = most_bytes(mlx_h2o.make_prompt_cache(model, SIZE), model, 32)
    bound = int(2.5 * need)
    with serving(bound=bound, chunk=32) as running:
        prompts = [words(150 * i, 40) for i in range(5)]
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda prompt: running.ask(prompt, 12), prompts))
        expected = [alone((model, tokenizer), prompt, 12, 32) for prompt in prompts]
        assert answers == expected
        until(lambda: running.scheduler.ledger.running == 0)
        assert need < running.scheduler.ledger.peak <= bound
        assert running.scheduler.conversations.nbytes <= bound


def test_a_model_whose_bytes_are_not_known_is_refused_at_the_start(embedded, monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr("mlx_h2o.serve.model.load", lambda name: (model, embedded[1]))
    monkeypatch.setattr("mlx_h2o.serve.model.bounded_caches", lambda *_: stock_caches(model))
    engine = EngineSettings((MODEL,), {"max_size": SIZE}, bound=1 << 20)
    with pytest.raises(ValueError, match="has a KVCache, whose bytes are not known"):
        serve(ServerSettings(engine, port=0))


def test_a_bound_that_is_too_small_is_refused_at_the_start_with_the_least_that_works():
    engine = EngineSettings((MODEL,), {"max_size": SIZE}, bound=1000)
    with pytest.raises(ValueError, match="--kv-memory is too small: it is 1,000 bytes") as refused:
        serve(ServerSettings(engine, port=0))
    least = int(re.search(r"Make it at least (\d+)", str(refused.value))[1])
    with pytest.raises(ValueError, match="too small"):
        serve(ServerSettings(replace(engine, bound=least - 1), port=0))
    with serving(bound=least) as running:
        assert running.ask(words(0, 60), 4)


def test_a_full_queue_is_told_when_to_come_again(embedded):
    need = most_bytes(mlx_h2o.make_prompt_cache(embedded[0], SIZE))
    with serving(bound=need, queue=1) as running, ThreadPoolExecutor(2) as pool:
        first = pool.submit(running.ask, words(0, 30), 300)
        until(lambda: running.scheduler.ledger.running == 1)
        second = pool.submit(running.ask, words(50, 30), 4)
        until(lambda: running.scheduler.waiting == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            running.ask(words(90, 30))
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert first.result()
        assert second.result()


@pytest.mark.parametrize(("stream", "waiting"), [(True, False), (False, True)])
def test_a_client_that_hangs_up_frees_its_slots(embedded, stream, waiting):
    need = most_bytes(mlx_h2o.make_prompt_cache(embedded[0], SIZE))
    with serving(bound=need) as running:
        scheduler = running.scheduler
        body = {"prompt": words(0, 30), "max_tokens": 100_000, "stream": stream}
        clients = []
        for count in range(1 + waiting):
            client = HTTPConnection("127.0.0.1", running.port, timeout=60)
            client.request("POST", "/v1/completions", json.dumps(body))
            clients.append(client)
            until(lambda count=count: scheduler.ledger.running + scheduler.waiting == count + 1)
        for client in reversed(clients):
            client.sock.shutdown(socket.SHUT_RDWR)
            client.close()
        until(lambda: scheduler.ledger.running == scheduler.waiting == 0)
        assert scheduler.ledger.reserved == 0
        counted = 1 + waiting
        until(lambda: f'requests_total{{status="499"}} {counted}.0' in scheduler.metrics.text())
        assert running.ask(words(40, 20), 4) == alone(embedded, words(40, 20), 4)


# -- files ----------------------------------------------------------------------------------------


def started(folder: Any, *options: str) -> tuple[subprocess.Popen[str], int]:
    """The command itself, in a process of its own, and its port."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlx_h2o", "serve", "--model", MODEL, "--port", "0"),
            *("--max-kv-size", str(SIZE)),
            *("--sessions", str(folder), *options),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    for line in process.stderr:
        if found := re.search(r"Serving on http://127.0.0.1:(\d+)", line):
            return process, int(found[1])
    raise AssertionError("it did not start")


@pytest.mark.slow
def test_a_kill_and_a_restart_lose_nothing_that_was_saved(tmp_path, embedded):
    """The second turn after the kill goes on from the first one's own caches."""
    folder = tmp_path / "sessions"
    turns = [words(0, 80), " And Anne said to Toby that"]
    tokenizer, first = embedded[1], alone(embedded, turns[0], 6)

    def ask(port: int, prompt: str) -> Any:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120)
        return client.completions.create(model=MODEL, prompt=prompt, max_tokens=6, temperature=0)

    process, port = started(folder)
    try:
        assert ask(port, turns[0]).choices[0].text == first
        until(lambda: any(folder.glob("*[0-9a-f].safetensors")))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder / "torn.safetensors").write_bytes(b"torn")
    process, port = started(folder, "--kv-memory", "64MB")
    try:
        whole = f"{turns[0]}{first}{turns[1]}"
        second = ask(port, whole)
        cached = second.usage.prompt_tokens_details.cached_tokens
        assert cached > len(tokenizer.encode(turns[0]))
        rest = tokenizer.encode(whole)[cached:]
        assert len(rest) == second.usage.prompt_tokens - cached
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert len(list(folder.glob("*.safetensors"))) == 2  # the conversation as it is now, and torn
    assert folder.stat().st_mode & 0o077 == 0
