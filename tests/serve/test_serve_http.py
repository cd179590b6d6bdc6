"""HTTP of `mlx_h2o serve`: deadlines, limits, keys, TLS, and errors in OpenAI's one form."""

import base64
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import openai
import pytest

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.serve.access import AccessRules
from mlx_h2o.serve.app import IGNORED
from mlx_h2o.serve.launch import ServerSettings, serve
from mlx_h2o.serve.listening import Certificate, ConnectionLimits
from mlx_h2o.serve.memory import most_bytes
from mlx_h2o.serve.settings import EngineSettings
from serving import MODEL, SIZE, Running, exchange, serving, until, words

#: Short enough for tests, and long beside what the machine needs.
PATIENCE = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = ConnectionLimits(connections=40, headers=PATIENCE, reading=PATIENCE)
    with serving(limits=limits, rules=AccessRules(largest=100_000, patience=PATIENCE)) as running:
        yield running


def is_error(answer: Any, status: int) -> bool:
    error = answer["error"]
    words = {401: "invalid_api_key", 404: "model_not_found"}
    has_code = error["code"] in (status, words.get(status))
    return has_code and bool(error["message"]) and bool(error["type"])


def raw_exchange(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """All that the server says to bytes that come in pieces, until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        for piece in pieces:
            try:
                client.sendall(piece)
            except OSError:
                break
            time.sleep(pause)
        return raw_answer(client)


def raw_answer(client: socket.socket) -> bytes:
    """All that is said until the connection is closed."""
    text = b""
    with suppress(ConnectionError):
        while part := client.recv(1 << 16):
            text += part
    return text


def error_in(text: bytes) -> tuple[int, Any]:
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


# -- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 100_000, "JSON"),
        (b'{"a":' * 3000, "JSON"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 400 + b"}", "max_tokens"),
        (b'{"prompt": "x", "max_tokens": -1' + b"0" * 9000 + b"}", "JSON"),
        (b'{"prompt": "x", "messages": [], "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "messages": [], "temperature": NaN}', "temperature"),
        (b'{"prompt": "x", "messages": [], "temperature": -Infinity}', "temperature"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "x", "\\udfff": 1}', "surrogate"),
        (b"", "JSON"),
        (b" \n", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"null", "JSON object"),
        (b'"x"', "JSON object"),
    ],
)
def test_bodies_that_say_nothing_sensible_are_refused_in_one_form(server, body, why):
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, answer, _ = exchange(server.port, path, body)
        assert status == 400
        assert is_error(answer, 400)
        assert why in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 400


NUMBER_FIELDS = {
    "max_tokens": (0, 10**7 + 1), "max_completion_tokens": (0, 10**7 + 1),
    "temperature": (-0.1, 101), "top_p": (-0.1, 1.1), "top_k": (-1, 10**7 + 1),
    "min_p": (-1, 1.5), "repetition_penalty": (-1, 101, 1e-9),
    "presence_penalty": (-101, 101), "frequency_penalty": (-101, 101),
    "repetition_context_size": (-1, 10**6 + 1), "presence_context_size": (-1, 10**6 + 1),
    "frequency_context_size": (-1, 10**6 + 1), "top_logprobs": (-2, 21),
    "seed": (-(2**63) - 1, 2**64),
    "n": (0, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBER_FIELDS)
def test_every_number_has_a_range(server, name):
    wrong = [*NUMBER_FIELDS[name], "1", True, [1], {}, 10**290, -(10**290)]
    for value in wrong:
        body = {"prompt": "x", name: value, "max_tokens": 1} | {name: value}
        status, answer, _ = exchange(server.port, "/v1/completions", body)
        assert status == 400, value
        assert name in answer["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (None, "messages: "),
        ([], "messages: "),
        (["x"], "messages[0]: "),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], '"wizard"'),
        ([{"role": "user"}], "messages[0]: it has no content"),
        ([{"role": "user", "content": None}], "messages[0]: it has no content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0]: its content"),
        ([{"role": "user", "content": [{}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must have a text"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "'audio'"),
        ([{"role": "assistant", "tool_calls": [{}], "content": ""}], "tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "tool_calls[0].function.arguments: it is no JSON",
        ),
    ],
)
def test_messages_are_refused_by_name(server, messages, why):
    body = {"messages": messages, "max_tokens": 1}
    status, answer, _ = exchange(server.port, "/v1/chat/completions", body)
    assert status == 400
    assert why in answer["error"]["message"]


# -- routes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/responses", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("PUT", "/health", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/" + "x" * 5000, 404),
        ("GET", "/v1/models/../../etc/passwd", 404),
        ("BREW", "/", 405),
    ],
)
def test_unknown_routes_and_methods_answer_in_one_form(server, method, path, status):
    body = {} if method in ("POST", "PUT") else None
    actual, answer, headers = exchange(server.port, path, body, method)
    assert actual == status
    assert is_error(answer, status)
    assert len(answer["error"]["message"]) < 400
    assert status != 405 or headers["allow"]


def test_the_model_is_told_by_its_name(server):
    assert server.client.models.retrieve(MODEL).id == MODEL
    assert server.client.models.retrieve("default_model").id == MODEL
    assert [model.id for model in server.client.models.list()] == [MODEL]


def test_what_is_no_http_is_told_so_in_the_same_form(server):
    for text in (
        b"nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 200_000,
    ):
        status, answer = error_in(raw_exchange(server.port, text))
        assert status == 400
        assert is_error(answer, 400)
    assert exchange(server.port, "/health")[0] == 200


# -- the slow and the many ------------------------------------------------------------------------

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [b""],
        [b"POST /v1/comp"],
        [HEAD, *[b"X-Slow: 1\r\n"] * 40],
        [HEAD + b"Content-Length: 900\r\n\r\n", *[b"{"] * 40],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n{\r\n"] * 40],
    ],
    ids=["nothing", "half a line", "headers", "body", "chunks"],
)
def test_slow_senders_are_sent_away(server, pieces):
    """Each byte comes in time, and the whole does not."""
    start = time.monotonic()
    status, answer = error_in(raw_exchange(server.port, *pieces, pause=PATIENCE / 10))
    assert status == 408
    assert is_error(answer, 408)
    assert time.monotonic() - start >= PATIENCE


def test_a_chunked_body_is_limited_too(server):
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    text = raw_exchange(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 20)
    status, answer = error_in(text)
    assert (status, is_error(answer, 413)) == (413, True)


def test_half_sent_bodies_hold_no_thread_and_connections_are_counted(server):
    port = server.port
    until(lambda: threading.active_count() < 20)
    before = threading.active_count()
    half = HEAD + b"Content-Length: 900\r\n\r\n{"
    clients = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(40)]
    try:
        for client in clients:
            client.sendall(half)
        with socket.create_connection(("127.0.0.1", port), timeout=30) as late:
            status, answer = error_in(raw_answer(late))
        assert (status, is_error(answer, 503)) == (503, True)
        assert threading.active_count() <= before + 1
        for client in clients:
            assert error_in(raw_answer(client))[0] == 408
    finally:
        for client in clients:
            client.close()
    until(lambda: exchange(port, "/health")[0] == 200)


@pytest.mark.slow
def test_who_reads_nothing_is_dropped(server):
    """The answer is longer than what the sockets in between hold."""
    wanted = {"prompt": "x", "max_tokens": 100_000, "stream": True, "n": 4, "top_logprobs": 20}
    body = json.dumps(wanted).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 10)
        client.connect(("127.0.0.1", server.port))
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        ledger = server.scheduler.ledger
        until(lambda: ledger.running == 4)
        until(lambda: ledger.running == 0)
        assert ledger.reserved == 0


# -- keys, fields, TLS ----------------------------------------------------------------------------


def test_a_key_is_needed_for_all_but_health():
    with serving(rules=AccessRules(key="sesame")) as running:
        port = running.port
        for path, body in (("/v1/models", None), ("/metrics", None), ("/", None),
                           ("/h2o/conversations", None), ("/v1/completions", {"prompt": "x"}),
                           ("/v1/nothing", None)):  # fmt: skip
            for given in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "Basic ===="},
                          {"Authorization": "Bearer sesame2"}, {"Authorization": "sesame"},
                          {"Authorization": "Bearer \xff"}):  # fmt: skip
                status, answer, headers = exchange(port, path, body, **given)
                assert (status, is_error(answer, 401)) == (401, True)
                assert headers["www-authenticate"]
        until(lambda: exchange(port, "/health")[0] == 200)
        right = {"Authorization": "Bearer sesame"}
        assert exchange(port, "/v1/models", **right)[0] == 200
        basic = base64.b64encode(b"anyone:sesame").decode()
        assert exchange(port, "/h2o/conversations", Authorization=f"Basic {basic}")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            running.client.models.list()


def test_fields_that_are_not_known_are_named_in_a_header_and_once_in_the_log(server, caplog):
    body = {"prompt": "x", "max_tokens": 1, "typo_of_mine": 3, "verbosity": "low", "a\r\nb: c": 1}
    for _ in range(2):
        status, _, headers = exchange(server.port, "/v1/completions", body)
        assert status == 200
        assert headers[IGNORED.lower()] == "typo_of_mine, verbosity"
        assert "b" not in headers
    assert caplog.text.count("typo_of_mine") == 1
    body = {"prompt": "x", "max_tokens": 1, "user": "me"}
    assert IGNORED.lower() not in exchange(server.port, "/v1/completions", body)[2]


def test_https(tmp_path, capsys):
    files = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    making = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    outputs = ["-keyout", files[0], "-out", files[1]]
    subprocess.run([*making.split(), *outputs], check=True, capture_output=True)
    certificate = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    with serving(certificate=certificate) as running:
        context = ssl.create_default_context(cafile=files[1])
        port = running.port
        with (
            socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.sendall(
                b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    options = ["--tls-cert", str(tmp_path / "none"), "--tls-key", files[0]]
    assert main(["serve", "--model", MODEL, *options]) == 2
    assert "--tls-cert: there is no file" in capsys.readouterr().err


# -- bytes ----------------------------------------------------------------------------------------


def test_bytes_never_exceed_the_bound_at_any_moment_and_are_none_when_nothing_runs():
    """Metrics and page are looked at all the time while 16 streams run, of which six fit."""
    need = most_bytes(mlx_h2o.make_prompt_cache(mlx_h2o.load(MODEL)[0], SIZE))
    bound = 6 * need
    with serving(bound=bound) as running:
        port, over, looks = running.port, [], 0
        ledger = running.scheduler.ledger
        done = threading.Event()

        def look() -> None:
            nonlocal looks
            while not done.is_set():
                most = max(sum(ledger.current), ledger.peak)
                looks += 1
                if most > bound:
                    over.append(most)
                time.sleep(0.0005)

        def stream(i: int) -> int:
            chunks = running.client.completions.create(
                model=MODEL, prompt=words(90 * i, 40), max_tokens=60 + i, temperature=0, stream=True
            )
            return sum(1 for _ in chunks)

        with ThreadPoolExecutor(17) as pool:
            watch = pool.submit(look)
            streams = [pool.submit(stream, i) for i in range(16)]
            shown = []
            while not all(one.done() for one in streams):
                shown.append(values_in(port))
                answer = exchange(port, "/h2o/conversations")[1]["bytes"]
                shown.append({"running": answer["running"], "idle": answer["idle"]})
            assert all(one.result() > 5 for one in streams)
            done.set()
            watch.result()
        assert looks > 100
        assert over == []
        assert all(one["running"] + one["idle"] <= bound for one in shown)
        assert any(one["running"] > 0 for one in shown)
        until(lambda: ledger.running == 0)
        assert ledger.current.running == ledger.reserved == 0
        until(lambda: ledger.current.idle == running.scheduler.conversations.nbytes)


def values_in(port: int) -> dict[str, float]:
    """What /metrics says of bytes."""
    text = exchange(port, "/metrics")[1]
    find = r"^mlx_h2o_kv_bytes_{} (\S+)$"
    return {
        name: float(re.search(find.format(name), text, re.M)[1]) for name in ("running", "idle")
    }


# -- ways out -------------------------------------------------------------------------------------


def command(*options: str, model: str = MODEL) -> list[str]:
    return [sys.executable, "-m", "mlx_h2o", "serve", "--model", model, "--port", "0", *options]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["too little", "port in use", "no model", "SIGTERM"])
def test_no_way_out_leaves_a_thread_behind(way, tmp_path):
    """Where one is left, the process aborts about every second time."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        options = {
            "too little": ["--kv-memory", "1KB"],
            "port in use": ["--port", str(taken.getsockname()[1])],
        }.get(way, [])
        model = str(tmp_path) if way == "no model" else MODEL
        for i in range(5):
            process = subprocess.Popen(
                command(*options, model=model), stderr=subprocess.PIPE, text=True, env=environment
            )
            if way == "SIGTERM":
                time.sleep(0.6 * i)
                process.terminate()
            _, text = process.communicate(timeout=120)
            assert "terminate called" not in text
            assert "Traceback" not in text
            assert process.returncode in (0, 2, 130, 143, -signal.SIGTERM), text


def test_a_port_in_use_is_an_error_in_one_line():
    before = threading.active_count()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"Cannot listen on 127.0.0.1, port {port}"):
            serve_at(port)
    for port in (-1, 1 << 16, 99999999):
        with pytest.raises(ValueError, match="--port must be from 0 to 65535"):
            serve_at(port)
    assert threading.active_count() == before


def serve_at(port: int) -> None:
    serve(ServerSettings(EngineSettings((MODEL,), {"max_size": SIZE}), port=port))
