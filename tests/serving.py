"""`mlx_h2o serve` in a thread of the tests' process."""

import copy
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from http.client import HTTPConnection
from typing import Any

import mlx.core as mx
import openai
from mlx_lm.generate import generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_h2o
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.serve.answer import Detokenizer
from mlx_h2o.serve.launch import ServerSettings, serve
from mlx_h2o.serve.listening import Server
from mlx_h2o.serve.scheduler import Scheduler
from mlx_h2o.serve.settings import EngineSettings

MODEL = "builtin:recall-4m"
WORDS = SAMPLE_TEXT.read_text(encoding="utf-8").split()
#: Slots that a head has where a test does not say.
SIZE = 48


@dataclass
class Running:
    """A server in a thread of this process."""

    httpd: Server
    scheduler: Scheduler

    @property
    def port(self) -> int:
        return self.httpd.server_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, prompt: str, tokens: int = 8, **options: Any) -> str:
        answer = self.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, **options
        )
        return answer.choices[0].text


@contextmanager
def serving(**settings: Any) -> Iterator[Running]:
    """A server; the settings are those of `EngineSettings` and of `ServerSettings`."""
    settings.setdefault("defaults", {"max_size": SIZE})
    settings.setdefault("models", (MODEL,))
    own = {one.name for one in fields(EngineSettings)}
    # Both have limits; here they are those of a connection.
    engine = {name: value for name, value in settings.items() if name in own and name != "limits"}
    rest = {name: value for name, value in settings.items() if name not in engine}
    ready: list[Running] = []
    begun = threading.Event()

    def listens(httpd: Server, scheduler: Scheduler) -> None:
        ready.append(Running(httpd, scheduler))
        begun.set()

    server = ServerSettings(EngineSettings(**engine), port=0, **rest)
    thread = threading.Thread(target=serve, args=(server, listens), daemon=True)
    thread.start()
    until(lambda: begun.is_set() or not thread.is_alive(), 120)
    assert begun.is_set(), "the server did not start"
    try:
        ready[0].scheduler.loaded.wait(120)
        yield ready[0]
    finally:
        ready[0].httpd.shutdown()
        thread.join(60)
        assert not thread.is_alive()


def exchange(
    port: int, path: str, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON or text, and headers of an answer to GET, or to POST where there is a body."""
    text = body if isinstance(body, bytes | None) else json.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(method or ("GET" if body is None else "POST"), path, text, names)
        response = connection.getresponse()
        answer: Any = response.read().decode()
    if response.getheader("content-type") == "application/json":
        answer = json.loads(answer)
    return response.status, answer, {name.lower(): value for name, value in response.getheaders()}


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def words(first: int, count: int) -> str:
    return " ".join(WORDS[first : first + count])


def wrapped(tokenizer: TokenizerWrapper, **options: Any) -> TokenizerWrapper:
    """Another wrapper around a copy: mlx-lm's sets attributes of the tokenizer that it wraps."""
    inner = copy.copy(tokenizer._tokenizer)
    return TokenizerWrapper(inner, eos_token_ids=tokenizer.eos_token_ids, **options)


def alone(loaded: Any, prompt: str, tokens: int = 8, chunk: int = 512, **settings: Any) -> str:
    """What a prompt gets by itself."""
    model, tokenizer = loaded
    try:
        cache = mlx_h2o.make_prompt_cache(model, **({"max_size": SIZE} | settings))
    except NothingToBound:
        cache = stock_caches(model)
    ids = tokenizer.encode(prompt)
    steps = generate_step(
        mx.array(ids), model, max_tokens=tokens, prompt_cache=cache, prefill_step_size=chunk
    )
    text, detokenizer = "", Detokenizer(tokenizer, ids)
    for token, _ in steps:
        if token in tokenizer.eos_token_ids:
            return text
        text += detokenizer.add(int(token))
    return text + detokenizer.finish()
