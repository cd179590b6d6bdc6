"""Nothing answered is lost: kill -9 at any moment, and clients that send back what they got."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import MODEL, Running, exchange, serving, words

PINS = {"spans": [[0, 5], [7, 9]]}
#: Lets the model generate the tokens of two letters alone.
LETTERS = {"73": 100, "78": 100}


#: Has everything imported that the command needs, and forks a process for each server: starting
#: Python takes longer than all else.
FORKING = """
import json, os, sys
import mlx_h2o.cli.serve, mlx_h2o.serve.launch
from mlx_h2o.cli import main, parser
parser()
for line in sys.stdin:
    child = os.fork()
    if not child:
        sys.exit(main(json.loads(line)))
    print(child, flush=True)
    os.waitpid(child, 0)
"""


class Servers:
    """Servers, one after the other, each a process of its own that is killed in the end."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )

    def close(self) -> None:
        self._parent.kill()
        self._parent.communicate()

    @contextmanager
    def running(self, folder: Path, *options: str) -> Iterator[tuple[int, int]]:
        """`mlx_h2o serve`: its process and its port."""
        command = ["serve", "--port", "0", "--model", MODEL, "--sessions", str(folder), *options]
        assert self._parent.stdin
        assert self._parent.stdout
        assert self._parent.stderr
        print(json.dumps([*command, "--max-kv-size", "64"]), file=self._parent.stdin, flush=True)
        process = int(self._parent.stdout.readline())
        try:
            for line in self._parent.stderr:
                if match := re.search(r"Serving on http://127.0.0.1:(\d+)", line):
                    yield process, int(match[1])
                    return
            raise AssertionError("it did not start")
        finally:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@dataclass
class Client:
    """One conversation, of a client that sends back what it got and nothing else.

    Attributes:
        chat: Whether it is a chat.
        pins: What it pins in every turn.
        messages: Messages, or the text.
        answered: Tokens that the caches of its last whole turn hold at least.
        turns: How many did.
        name: The last answer's.
    """

    chat: bool
    pins: dict[str, Any]
    stops: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    answered: int = 0
    turns: int = 0
    name: str = ""

    def turn(
        self, client: openai.OpenAI, tokens: int, more: str, model: str = MODEL, **more_options: Any
    ) -> int:
        """Ask on; how many tokens were known. The turn counts once its last event is here."""
        sent = [*self.messages, {"role": "user", "content": more}]
        options: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 1}
        options |= {"extra_body": {"mlx_h2o": {"pins": self.pins}}, "stream": True}
        options |= {"stream_options": {"include_usage": True}, "stop": self.stops or None}
        options |= more_options
        if self.chat:
            chunks = client.chat.completions.create(messages=sent, logprobs=True, **options)
        else:
            prompt = "".join(message["content"] for message in sent)
            chunks = client.completions.create(prompt=prompt, logprobs=0, **options)
        text, usage, reason, name = "", None, None, ""
        pieces = list[str]()
        for chunk in chunks:
            name = chunk.id
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += (choice.delta.content if self.chat else choice.text) or ""
                reason = choice.finish_reason or reason
                if self.chat and choice.logprobs:
                    pieces += [one.token for one in choice.logprobs.content]
                elif choice.logprobs:
                    pieces += choice.logprobs.tokens
        assert reason is not None  # else the stream broke off
        assert usage is not None
        self.messages = [*sent, {"role": "assistant", "content": text}]
        self.answered, self.name = usage.prompt_tokens - 1, name
        # The caches go back to the end of the prompt where an end of text or a stop text was read,
        # or part of a character: no text spells that, but for SmolLM2's template, which ends turns.
        whole = not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
        ends = self.chat and not self.stops and model != MODEL
        if whole and (ends or reason == "length"):
            self.answered = usage.prompt_tokens + usage.completion_tokens - 1
        self.turns += 1
        return int(usage.prompt_tokens_details.cached_tokens)


def openai_client(port: int) -> openai.OpenAI:
    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


def pins_of(port: int, name: str) -> list[list[int]]:
    return list(exchange(port, f"/h2o/conversations/{name}")[1]["pins"])


def talk(one: Client, client: openai.OpenAI, drawn: random.Random) -> None:
    """Turn after turn, until the server is gone."""
    try:
        while True:
            turn_of(one, client, drawn)
    except Exception:  # of whatever layer noticed first that the server is gone
        return


def turn_of(one: Client, client: openai.OpenAI, drawn: random.Random) -> None:
    tokens, count = drawn.choice([1, 3, 8, 20]), drawn.randint(1, 12)
    one.turn(client, tokens, f" {words(drawn.randrange(400), count)}")


# When the server is killed: at any time, once a turn was written down of which its client may not
# have heard yet, and once a client has heard of its turn, which must have been written down.
MOMENTS = ("some time", "noted", "answered")


def until_noted(folder: Path, count: int) -> None:
    """Return at the moment at which so many turns more are on disk."""

    def notes() -> set[str]:
        return {name for name in os.listdir(folder) if name[0] != "."}

    before, written = notes(), set[str]()
    end = time.monotonic() + 60
    while len(written) < count:
        written |= notes() - before
        assert time.monotonic() < end


@dataclass
class Tally:
    """Of many kills: turns that clients had answered, conversations that went on after it."""

    turns: int = 0
    expected: int = 0
    cached: int = 0


def killed_again_and_again(
    servers: Servers, folder: Path, kills: int, seed: int, *options: str
) -> Tally:
    """Kill the server while clients stream, start it, and let them go on.

    Each client whose conversation had a whole answer sends back what it got: its caches must be
    found, with all that was read and said, and with its pins.
    """
    drawn, tally = random.Random(seed), Tally()
    clients = list[Client]()
    for kill in range(kills + 1):
        with servers.running(folder, *options) as (process, port):
            client = openai_client(port)
            for one in clients:
                before = one.answered
                cached = one.turn(client, 1, f" {words(drawn.randrange(400), 3)}")
                tally.expected += 1
                tally.cached += cached >= before
                assert pins_of(port, one.name) == one.pins.get("spans", [])
            clients = [
                Client(
                    chat=i % 2 == 0, pins=PINS if i % 3 else {}, stops=[" the"] if i == 3 else []
                )
                for i in range(4)
            ]
            for one in clients:
                one.messages = [{"role": "user", "content": words(drawn.randrange(300), 12)}]
            moment, turns = MOMENTS[kill % 3], drawn.randint(2, 6)
            talking = clients[1:] if moment == "answered" else clients
            with ThreadPoolExecutor(4) as pool:
                try:
                    for one in talking:
                        pool.submit(talk, one, client, random.Random(drawn.random()))
                    if moment == "some time":
                        time.sleep(drawn.uniform(0.05, 1.5))
                    elif moment == "noted":
                        until_noted(folder, turns)
                    for _ in range(turns if moment == "answered" else 0):
                        turn_of(clients[0], client, drawn)
                finally:
                    os.kill(process, signal.SIGKILL)
            tally.turns += sum(one.turns for one in clients)
            clients = [one for one in clients if one.turns]
    return tally


def test_what_was_answered_is_there_after_kills(servers, tmp_path):
    tally = killed_again_and_again(servers, tmp_path, 3, seed=1)
    assert tally.cached == tally.expected > 3


@pytest.mark.slow
def test_what_was_answered_is_there_after_kills_with_files_of_rows(servers, tmp_path):
    rows = tmp_path / "rows"
    tally = killed_again_and_again(servers, tmp_path / "s", 3, 3, "--spill", str(rows))
    assert tally.cached == tally.expected > 3
    assert not list(rows.iterdir())


def test_a_stopped_answer_to_a_conversation_is_there_after_a_kill(servers, tmp_path):
    """Only the text of an earlier answer tells the model's own tokens of it."""
    one = Client(chat=False, pins={}, stops=["e"])
    one.messages = [{"role": "user", "content": "Anne was"}]
    with servers.running(tmp_path) as (process, port):
        client = openai_client(port)
        # Letters, which are not the tokens that a tokenizer makes of their text.
        one.turn(client, 12, f" {words(5, 60)}", stop=None, logit_bias=LETTERS)
        cached = one.turn(client, 60, f" {words(40, 12)}")
        assert 0 < cached < one.answered
        other = Client(chat=False, pins={}, messages=[{"role": "user", "content": "Another"}])
        other.turn(client, 1, " day")  # after which the first turn's file is gone
        os.kill(process, signal.SIGKILL)
    with servers.running(tmp_path) as (_, port):
        assert one.turn(openai_client(port), 1, f" {words(90, 5)}") > cached


@pytest.mark.slow
def test_what_was_answered_is_there_after_many_kills(servers, tmp_path):
    tally = killed_again_and_again(servers, tmp_path, 30, seed=2)
    print(tally)
    assert tally.cached == tally.expected > 30


# -- continuations by an unchanged client ---------------------------------------------------------


def continued(folder: Path, conversations: int, model: str, seed: int) -> tuple[int, int]:
    """Turns of clients that send back what they got, also to a server that was started anew.

    Returns:
        Turns that went on, and those of them whose caches were found.
    """
    drawn, clients, turns, hits = random.Random(seed), list[Client](), 0, 0
    settings: dict[str, Any] = {"sessions": folder, "models": (model,)}
    for _ in range(2):
        with serving(**settings) as server, ThreadPoolExecutor(4) as pool:
            clients = clients or [
                Client(
                    chat=i % 3 > 0,
                    pins={},
                    messages=[{"role": "user", "content": words(4 * i, 20)}],
                )
                for i in range(conversations)
            ]

            def ask(one: Client, more: str, server: Running = server) -> tuple[int, bool]:
                before, tokens = one.answered, drawn.choice([1, 6, 25])
                cached = one.turn(server.client, tokens, more, model)
                return bool(before), bool(before) and cached >= before

            for _ in range(2):
                more = [f" {words(drawn.randrange(400), drawn.randint(1, 9))}" for _ in clients]
                for goes_on, is_known in pool.map(ask, clients, more):
                    turns, hits = turns + goes_on, hits + is_known
    return turns, hits


def test_clients_that_send_back_what_they_got_are_found(tmp_path):
    turns, hits = continued(tmp_path, 6, MODEL, seed=1)
    assert hits == turns == 18


@pytest.mark.slow
@pytest.mark.parametrize(("model", "conversations"), [(MODEL, 95), ("smollm2-135m", 12)])
def test_many_clients_that_send_back_what_they_got_are_found(tmp_path, model, conversations):
    turns, hits = continued(tmp_path, conversations, model, seed=2)
    print(f"{model}: {hits} of {turns} continuations were found")
    assert hits == turns == 3 * conversations
