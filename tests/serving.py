"""`mlx_h2o serve` in a thread of the tests' process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx_lm
import openai

import mlx_h2o
from mlx_h2o.loading.load import SAMPLE_TEXT
from mlx_h2o.serve.generator import BoundedGenerator
from mlx_h2o.serve.listening import Server
from mlx_h2o.serve.running import ServerSettings, serve

MODEL = "builtin:recall-4m"
WORDS = SAMPLE_TEXT.read_text(encoding="utf-8").split()
#: Slots that a head has where a test does not say.
SIZE = 48


@dataclass
class Running:
    """A server in a thread of this process."""

    httpd: Server
    generator: BoundedGenerator

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.httpd.server_port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, prompt: str, tokens: int = 8, **options: Any) -> str:
        answer = self.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, **options
        )
        return answer.choices[0].text


@contextmanager
def serving(**settings: Any) -> Iterator[Running]:
    options = settings.pop("options", [])
    settings.setdefault("defaults", {"max_size": SIZE})
    ready: list[Running] = []
    begun = threading.Event()

    def told(httpd: Server, generator: BoundedGenerator) -> None:
        ready.append(Running(httpd, generator))
        begun.set()

    arguments = ["--model", MODEL, "--port", "0", "--allowed-origins", "", *options]
    thread = threading.Thread(
        target=serve, args=(ServerSettings(**settings), arguments, told), daemon=True
    )
    thread.start()
    until(lambda: begun.is_set() or not thread.is_alive(), 120)
    assert begun.is_set(), "the server did not start"
    try:
        yield ready[0]
    finally:
        ready[0].httpd.shutdown()
        thread.join(60)
        assert not thread.is_alive()


def until(said: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < end
        time.sleep(0.02)


def words(first: int, count: int) -> str:
    return " ".join(WORDS[first : first + count])


def alone(loaded: Any, prompt: str, tokens: int = 8, **settings: Any) -> str:
    """What a prompt gets by itself."""
    model, tokenizer = loaded
    cache = mlx_h2o.make_prompt_cache(model, **({"max_size": SIZE} | settings))
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=tokens, prompt_cache=cache)
