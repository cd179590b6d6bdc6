"""Attacks `mlx_h2o serve` for minutes: sixteen clients, fuzzers, slow senders, kill -9 every 20 s.

    python -m benchmarks.attack --minutes 60

The server gets a bound for its KV memory and a folder for its sessions. At the same time

- clients send random requests with every field (`random_requests.py`), go on from the answers, and
  hang up; another server, which forgets everything before each conversation, has the right answers;
- clients hold conversations of many turns, and send back the answers that they got;
- fuzzers change one to three fields of a valid request into anything: integers from -10^400 to
  10^400, powers of ten and two, NaN, deep lists, texts, null, unknown roles and settings; and send
  bodies that are no JSON, with headers that lie;
- slow senders stop in the middle of a request's head or body;
- a client hangs up in the middle of answers;
- a process checks the server's bytes all the time;
- the server is killed by SIGKILL every 20 seconds and started again on the same folder.

It fails if a valid request gets an error, if an answer differs from the right one, if an answered
turn is not found by the next one, if a request gets no answer or one in no known form, if the bytes
exceed the bound, or if a slow sender is not disconnected.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from benchmarks.random_requests import PLAIN, Asker, Reference, path_of, sender, with_template
from mlx_h2o._byte_size import memory_size
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.policies import policy_names
from mlx_h2o.serve.launch import ServerSettings, serve
from mlx_h2o.serve.listening import Server as Listening
from mlx_h2o.serve.scheduler import Scheduler
from mlx_h2o.serve.settings import EngineSettings

#: Tokens of each answer, and of a conversation before its client begins another.
ANSWER, LONGEST_CONVERSATION = 24, 900
#: Tokens at the end of a turn that need not be found: those that the next words may change.
UNCOUNTED = 4
#: Seconds between two checks of the bytes, two lying heads, two lines of progress; for one answer.
LOOK_EVERY, LIE_EVERY, TELL_EVERY, PATIENCE = 0.1, 0.2, 30, 120
#: A number of tokens that takes long, and seconds after which a client that asked for it hangs up.
MANY_TOKENS, HURRY = 500, 10
#: Seconds after which a silent sender must have been disconnected.
SLOW_LIMIT = 150
#: How many of the random requests' clients hang up.
SHARE_CUT = 0.15
#: Slots of most random requests, in which nothing that they say is evicted.
ROOMY = 1024
#: Resident memory that the process may use beyond the bound: weights, activations, MLX's pool.
RESIDENT_SLACK_MB = 1500
FINDINGS_SHOWN = 20


class ServerGone(Exception):
    """The server was killed during the request."""


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) / 1024


def tell(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers."""
    while process.poll() is None:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not start")


@dataclass
class Attacked:
    """The results of an attack.

    Attributes:
        counts: The number of events, by kind.
        findings: Events that must not happen.
        most_bytes: The most bytes of running and idle caches at once.
        most_resident: The most resident MB of the server's process.
    """

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    most_bytes: int = 0
    most_resident: float = 0.0

    def report(self, text: str) -> None:
        """Note an event that must not happen."""
        self.findings.append(text)
        tell(f"FOUND: {text}")


class Server:
    """The server's process, which is killed and started again.

    Args:
        command: The command that starts it.
        port: The port that it listens on.
        log: The file of its standard error.
    """

    def __init__(self, command: list[str], port: int, log: Path):
        self.command, self.port, self.log = command, port, log
        self.lives = 0  # the number of starts
        self.up = threading.Event()
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, stdout=log, env=environment)
        wait_for(self.port, self.process)
        self.lives += 1
        self.up.set()

    def kill(self) -> None:
        """Kill it without a warning."""
        self.up.clear()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def exchange(
        self, method: str, path: str, body: bytes | None = None, patience: float = PATIENCE
    ) -> tuple[int, bytes]:
        """Send a request and read the whole answer.

        Raises:
            ServerGone: The server was killed meanwhile.
            OSError, HTTPException: The server gave no answer.
        """
        self.up.wait()
        life = self.lives
        try:
            with closing(HTTPConnection("127.0.0.1", self.port, timeout=patience)) as connection:
                connection.request(method, path, body)
                answer = connection.getresponse()
                return answer.status, answer.read()
        except (OSError, HTTPException) as error:
            if life != self.lives or not self.up.is_set():
                raise ServerGone from error
            raise


def answered(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """The whole answer to a valid completion request.

    Raises:
        RuntimeError: The answer is an error.
    """
    status, text = server.exchange("POST", "/v1/completions", json.dumps(body).encode())
    if status != 200:
        raise RuntimeError(f"{status}: {text[:300]!r}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def question(prompt: str, **fields: Any) -> dict[str, Any]:
    """A valid request."""
    return {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0} | fields


# -- clients with valid requests ------------------------------------------------------------------


def compare(server: Server, asker: Asker, attacked: Attacked, rng: random.Random) -> None:
    """Send a random request and compare its answer; some clients hang up."""

    def send(path: str, body: bytes) -> tuple[int, bytes]:
        return server.exchange("POST", path, body)

    if rng.random() < SHARE_CUT:
        hang_up(server, asker.request() | {"max_tokens": 99}, attacked, rng)
        return
    before = asker.compared
    finding = asker.ask(send)
    attacked.counts["random requests"] += 1
    attacked.counts["random requests, compared"] += asker.compared - before
    if finding is not None:
        attacked.report(f"an answer differs from the right one: {finding}")


@dataclass
class Conversation:
    """A client that sends back the answers that it got.

    Attributes:
        text: The whole conversation.
        tokens: The number of tokens that its last turn's cache must hold.
        life: The server's start, by number, that gave the last answer.
    """

    text: str = ""
    tokens: int = 0
    life: int = 0

    def turn(self, server: Server, attacked: Attacked, rng: random.Random) -> None:
        """Take one more turn; the server must find the previous one."""
        if not self.text or self.tokens > LONGEST_CONVERSATION:
            self.text, self.tokens = f"Conversation {rng.getrandbits(60)}.", 0
        words = SAMPLE_TEXT.read_text(encoding="utf-8").split()
        first = rng.randrange(len(words) - 40)
        prompt = f"{self.text} {' '.join(words[first : first + rng.randrange(5, 40)])}"
        # With a temperature: sampled tokens often differ from those of their text.
        answer = answered(server, question(prompt, temperature=1.0))
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        attacked.counts["turns"] += 1
        if self.tokens:
            attacked.counts["continuations"] += 1
            if self.life != server.lives:
                attacked.counts["continuations after a kill"] += 1
            if cached < self.tokens - UNCOUNTED:
                where = "after a kill" if self.life != server.lives else "without a kill"
                attacked.report(
                    f"a turn was lost {where}: {cached} tokens were found of {self.tokens}"
                )
        choice = answer["choices"][0]
        self.text = prompt + choice["text"]
        # Caches that evicted tokens cannot take back what no text spells: an end token, or half a
        # character. Then the conversation goes on from the end of the prompt.
        is_spelled = choice["finish_reason"] == "length" and not choice["text"].endswith("\ufffd")
        self.tokens = usage["total_tokens" if is_spelled else "prompt_tokens"]
        self.life = server.lives


def hang_up(server: Server, body: dict[str, Any], attacked: Attacked, rng: random.Random) -> None:
    """Stream an answer and close the connection in its middle."""
    server.up.wait()
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {path_of(body)} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            client.sendall(head.encode() + content)
            client.recv(rng.randrange(1, 2000))
    except OSError as error:
        raise ServerGone from error
    attacked.counts["hung up"] += 1


# -- fuzzers --------------------------------------------------------------------------------------


def some_integer(rng: random.Random) -> int:
    """An integer from -10^400 to 10^400; most are at an edge."""
    base = rng.choice((2, 10))
    power = rng.randrange(401 if base == 10 else 1330)
    return rng.choice((-1, 1)) * base**power + rng.choice((-1, 0, 0, 1))


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value that a field may not expect."""
    kind = rng.randrange(12 if depth < 2 else 9)
    if kind < 4:
        return some_integer(rng)
    if kind == 4:
        return rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324, 0.5))
    if kind == 5:
        return rng.choice((None, True, False))
    if kind < 9:
        return rng.choice(("", "x", "wizard", "user", "10" * 50, "25%", "\0", "\ud83d", "a" * 9000))
    if kind == 9:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 10:
        return {str(rng.choice(FIELDS)): anything(rng, depth + 1) for _ in range(rng.randrange(3))}
    return [[[[]]]]


FIELDS = (
    "prompt max_tokens max_completion_tokens temperature top_p top_k min_p seed stop n stream "
    "stream_options logprobs top_logprobs logit_bias repetition_penalty repetition_context_size "
    "presence_penalty presence_context_size frequency_penalty frequency_context_size "
    "xtc_probability xtc_threshold tools tool_choice response_format parallel_tool_calls user "
    "reasoning_effort model messages role_mapping chat_template_kwargs mlx_h2o nonsense"
).split()
SETTINGS = (
    "max_size max_bytes context policy remainder bits k_bits v_bits group_size undo positions pins "
    "sink recent evict_every window pool prompt age_normalised value_weighted chunk max_sise"
).split()


def fuzzed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a request some of whose fields are changed."""
    chat = rng.random() < 0.4
    body = question("A prompt of a few words.", max_tokens=4)
    if chat:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "Who?"}]
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.5:
            own = body.setdefault("mlx_h2o", {})
            if isinstance(own, dict):
                name = rng.choice(SETTINGS)
                valid = name == "policy" and rng.random() < 0.7
                own[name] = rng.choice(policy_names()) if valid else anything(rng)
        elif chat and rng.random() < 0.4 and isinstance(body.get("messages"), list):
            body["messages"].append({"role": anything(rng), "content": anything(rng)})
        else:
            body[rng.choice(FIELDS)] = anything(rng)
    return "/v1/chat/completions" if chat else "/v1/completions", body


def written(body: Any) -> bytes:
    """The body as JSON, with integers of any length."""
    sys.set_int_max_str_digits(0)
    return json.dumps(body, ensure_ascii=True).encode()


RAW = (
    b"", b"{", b"null", b"[1, 2]", b'"text"', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 50_000,
    b'{"prompt": 1' + b"0" * 5000 + b"}", b'{"prompt": "x", "prompt": 3}', b"\0" * 100,
)  # fmt: skip
ROUTES = ("/", "/v1", "/v1/models/none", "/v1/completions/x", "/h2o/x", "/../etc/passwd", "/%00")
METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW")


def fuzz(server: Server, attacked: Attacked, rng: random.Random) -> None:
    """Send one request that is wrong somewhere."""
    kind = rng.random()
    method, patience = "POST", PATIENCE
    if kind < 0.85:
        path, body = fuzzed(rng)
        content, request = written(body), f"{path} {body}"
        if wants_much(body):
            patience = HURRY
    elif kind < 0.95:
        path, content = rng.choice(("/v1/completions", "/v1/chat/completions")), rng.choice(RAW)
        request = f"{path} {content[:60]!r}"
    else:
        method, path, content = rng.choice(METHODS), rng.choice(ROUTES), b""
        request = f"{method} {path}"
    try:
        status, text = server.exchange(method, path, content, patience)
    except (OSError, HTTPException) as error:
        if isinstance(error, TimeoutError) and patience == HURRY:
            attacked.counts["fuzzed, long answers broken off"] += 1
        else:
            attacked.report(f"no answer ({error!r}) to {request[:400]}")
        return
    attacked.counts[f"fuzzed, {status}"] += 1
    if status >= 500:
        attacked.report(f"{status} {text[:200]!r} to {request[:400]}")
    elif status >= 400 and method != "HEAD" and not is_openai_error(text):
        attacked.report(f"{status} in no known form, {text[:200]!r}, to {request[:400]}")


def wants_much(body: dict[str, Any]) -> bool:
    """Whether a correct answer may need more tokens than there is time for."""
    names = ("max_tokens", "max_completion_tokens")
    counts = [body[name] for name in names if name in body]
    return any(count is None or (type(count) is int and count > MANY_TOKENS) for count in counts)


def is_openai_error(text: bytes) -> bool:
    """Whether an answer is an error in the format that OpenAI's clients read."""
    try:
        return isinstance(json.loads(text)["error"]["message"], str)
    except (ValueError, KeyError, TypeError):
        return False


def lie(server: Server, attacked: Attacked, rng: random.Random) -> None:
    """Send a head that lies about the body."""
    length = rng.choice(("9" * 5000, "-5", "1e9", "0x10", "18446744073709551616", "12, 13", ""))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    time.sleep(LIE_EVERY)
    server.up.wait()
    life = server.lives
    try:
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            client.settimeout(30)
            client.sendall(head.encode() + b"{}")
            first = client.recv(64)
    except OSError as error:
        if life != server.lives or not server.up.is_set():
            raise ServerGone from error
        if isinstance(error, TimeoutError):
            attacked.report(f"no answer to Content-Length: {length[:30]}")
        return
    attacked.counts["lying heads"] += 1
    if not first.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")) and server.up.is_set():
        attacked.report(f"Content-Length: {length[:30]} was answered by {first!r}")


def send_slowly(server: Server, attacked: Attacked, rng: random.Random) -> None:
    """Stop in the middle of a request, and wait to be disconnected."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n"
    body = head + b'\r\n{"prompt": "'
    server.up.wait()
    life, start = server.lives, time.monotonic()
    clients = []
    try:
        for _ in range(rng.randrange(1, 20)):
            client = socket.create_connection(("127.0.0.1", server.port), 10)
            clients.append(client)
            client.sendall(rng.choice((b"", b"PO", head, body)))
        for client in clients:
            client.settimeout(max(SLOW_LIMIT - (time.monotonic() - start), 0.1))
            while client.recv(1000):
                pass
        attacked.counts["slow senders sent away"] += len(clients)
    except TimeoutError:
        attacked.report(f"a slow sender was still there after {SLOW_LIMIT} s")
    except OSError as error:
        if life == server.lives and server.up.is_set():
            attacked.counts["slow senders sent away"] += 1
        else:
            raise ServerGone from error
    finally:
        for client in clients:
            client.close()


# -- the observer and the killer ------------------------------------------------------------------


def look(server: Server, bound: int, attacked: Attacked) -> None:
    """Compare the bytes that the server reports with its bound."""
    status, text = server.exchange("GET", "/metrics")
    if status != 200:
        attacked.report(f"/metrics gave {status}")
        return
    metrics = dict(re.findall(r"^mlx_h2o_(kv_bytes_\w+) (\S+)$", text.decode(), re.M))
    nbytes = int(float(metrics["kv_bytes_running"])) + int(float(metrics["kv_bytes_idle"]))
    attacked.most_bytes = max(attacked.most_bytes, nbytes)
    if nbytes > bound:
        attacked.report(f"{nbytes:,} bytes are held; the bound is {bound:,}")
    if server.process.poll() is None:
        attacked.most_resident = max(attacked.most_resident, resident_mb(server.process.pid))
    time.sleep(LOOK_EVERY)


def repeat(name: str, act: Callable[[], None], end: float, attacked: Attacked) -> None:
    """Act again and again until the time is over."""
    while time.monotonic() < end:
        try:
            act()
        except ServerGone:
            attacked.counts["broken off by a kill"] += 1
        except Exception as error:
            attacked.report(f"{name}: {error!r}")
            time.sleep(1)


def kill_often(server: Server, every: float, end: float, attacked: Attacked) -> None:
    """Kill the server and start it again until the time is over."""
    reported = time.monotonic()
    while time.monotonic() < end:
        time.sleep(min(every, max(end - time.monotonic(), 0)))
        if server.process.poll() is not None:
            attacked.report(f"the server ended by itself, with {server.process.returncode}")
            server.up.clear()
            server.start()
        elif time.monotonic() < end:
            server.kill()
            attacked.counts["kills"] += 1
            server.start()
        if time.monotonic() - reported > TELL_EVERY:
            reported = time.monotonic()
            rest = max(end - reported, 0) / 60
            tell(f"{rest:.0f} minutes are left: {summary(attacked)}")


def summary(attacked: Attacked) -> str:
    """The counts in one line."""
    parts = [f"{name} {count}" for name, count in sorted(attacked.counts.items())]
    return ", ".join([*parts, f"findings {len(attacked.findings)}"])


@contextmanager
def reference(args: argparse.Namespace, templated: str) -> Iterator[Reference]:
    """A server in a thread of this process, to compare with; it is not attacked."""
    ready: queue.SimpleQueue[tuple[Listening, Scheduler]] = queue.SimpleQueue()
    engine = EngineSettings((args.model, templated), {"max_size": args.max_kv_size})
    thread = threading.Thread(
        target=serve,
        args=(ServerSettings(engine, port=0), lambda *ends: ready.put(ends)),
    )
    thread.start()
    listening, scheduler = ready.get(timeout=PATIENCE)

    try:
        yield Reference(sender(listening.server_port, PATIENCE), scheduler)
    finally:
        listening.shutdown()
        thread.join()


def attack(
    server: Server, right: Reference, templated: str, bound: int, args: argparse.Namespace
) -> Attacked:
    """Run all clients at once."""
    attacked = Attacked()
    end = time.monotonic() + 60 * args.minutes
    random_of = iter(random.Random(f"{args.seed}-{i}") for i in range(1000))
    actors: list[tuple[str, Callable[[], None]]] = []
    for i in range(args.clients):
        if i % 2:
            actors.append(("talk", partial(Conversation().turn, server, attacked, next(random_of))))
        else:
            settings = {"max_size": ROOMY}
            asker = Asker(next(random_of), templated, right, settings=settings)
            actors.append(("ask", partial(compare, server, asker, attacked, next(random_of))))
    long = question("Once upon a time", max_tokens=400)
    actors.append(("hang up", partial(hang_up, server, long, attacked, next(random_of))))
    for act in (*[fuzz] * args.fuzzers, lie, send_slowly):
        actors.append((act.__name__, partial(act, server, attacked, next(random_of))))
    actors.append(("look", partial(look, server, bound, attacked)))
    threads = [
        threading.Thread(target=repeat, args=(*actor, end, attacked), daemon=True)
        for actor in actors
    ]
    for thread in threads:
        thread.start()
    kill_often(server, args.kill_every, end, attacked)
    for thread in threads:
        thread.join(PATIENCE + SLOW_LIMIT)
        if thread.is_alive():
            attacked.report("a client waits for ever")
    if attacked.most_resident > bound / 2**20 + RESIDENT_SLACK_MB:
        attacked.report(f"the process took {attacked.most_resident:.0f} MB")
    return attacked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--fuzzers", type=int, default=4)
    parser.add_argument("--kill-every", type=float, default=20, metavar="SECONDS")
    parser.add_argument("--model", default=PLAIN)
    parser.add_argument("--max-kv-size", type=int, default=256)
    parser.add_argument("--kv-memory", default="64MB")
    parser.add_argument("--port", type=int, default=8792)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bound = memory_size("--kv-memory", args.kv_memory)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mlx_h2o", "serve", "--model", args.model]
        command += ["--port", str(args.port), "--max-kv-size", str(args.max_kv_size)]
        command += ["--kv-memory", args.kv_memory, "--sessions", str(Path(folder) / "sessions")]
        templated = str(with_template(Path(folder) / "model"))
        command += ["--model", templated]
        log = Path(folder) / "log"
        server = Server(command, args.port, log)
        try:
            with reference(args, templated) as right:
                attacked = attack(server, right, templated, bound, args)
        except KeyboardInterrupt:
            raise SystemExit("broken off") from None
        finally:
            server.process.kill()
            server.process.wait()
        tracebacks = log.read_text(errors="replace").count("Traceback")
    print(f"{args.minutes:g} minutes, {args.clients} clients, seed {args.seed}, {args.model}\n")
    print("| what | count |\n|---|---:|")
    for name, count in sorted(attacked.counts.items()):
        print(f"| {name} | {count:,} |")
    print(f"| most KV bytes, of {bound:,} | {attacked.most_bytes:,} |")
    print(f"| most resident MB | {attacked.most_resident:,.0f} |")
    print(f"| tracebacks in the server's log | {tracebacks} |")
    print(f"| findings | {len(attacked.findings)} |")
    print("", *attacked.findings[:FINDINGS_SHOWN], sep="\n")
    raise SystemExit(bool(attacked.findings))


if __name__ == "__main__":
    main()
