"""mlx-vlm's own HTTP server in a second process, with `install` before its `main()`."""

import base64
import io
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")
pytest.importorskip("fastapi", reason="what mlx-vlm's server needs is not installed here")

from PIL import Image

from vlm_folder import write_vlm_folder

pytestmark = pytest.mark.slow

MAIN = "import mlx_h2o; {install}; import mlx_vlm.server.cli as s; s.main()"
BOUNDED = "mlx_h2o.install(max_bytes=160_000, bits=16)"
# Tokens of an answer, and of a chunk of a prompt.
ANSWER, CHUNK = 12, 64
# Long prompts, more than the bound holds; the bytes of a token in a plain cache.
MANY, LONG, TOKEN = 3, 2000, 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("qwen2_vl")
    write_vlm_folder(made)
    return made


@contextmanager
def serving(folder: Path, install: str, *options: str, **env: str) -> Iterator[tuple[Any, Path]]:
    """A function that asks the server, which gives text and gigabytes at most, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address, log = ["--host", "127.0.0.1", "--port", port], folder / f"{port}.log"
    start = [sys.executable, "-c", MAIN.format(install=install), "--model", str(folder)]
    server = subprocess.Popen(
        [*start, *address, "--prefill-step-size", str(CHUNK), *options],
        stderr=log.open("w"), stdout=subprocess.DEVNULL, env=os.environ | env,
    )  # fmt: skip
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)

    def ask(text: str, image: str = "", stream: bool = False, then: str = "") -> tuple[str, float]:
        content = [{"type": "image_url", "image_url": {"url": image}}] if image else []
        content.append({"type": "text", "text": text})
        answer = client.chat.completions.create(
            model=str(folder), messages=[{"role": "user", "content": content}],
            max_tokens=ANSWER, temperature=0, stream=stream,
        )  # fmt: skip
        if stream:
            deltas = [chunk.choices[0].delta.content for chunk in answer if chunk.choices]
            return "".join(delta or "" for delta in deltas), 0.0
        return answer.choices[0].message.content, answer.timings["peak_memory"] * 1e9

    try:
        while "Uvicorn running" not in log.read_text():
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        yield ask, log
    finally:
        server.terminate()
        server.wait()


def picture(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 255, (112, 84, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def letters(count: int, seed: int) -> str:
    return "".join(map(chr, np.random.default_rng(seed).integers(0x41, 0x5B, count)))


def test_requests_at_once_get_the_tokens_of_plain_caches_within_the_memory(folder):
    """Four of the six see an image or are streamed; then prompts come that exceed the bound."""
    questions = [(letters(20 + 9 * i, i), picture(i) if i % 2 else "", i > 2) for i in range(6)]
    texts, rise = [], []
    for install in ("pass", BOUNDED):
        with serving(folder, install) as (ask, _), ThreadPoolExecutor(6) as pool:
            texts.append([text for text, _ in pool.map(lambda one: ask(*one), questions)])
            before = ask("a")[1]
            answers = list(pool.map(ask, [letters(LONG, seed) for seed in range(MANY)]))
            assert all(text for text, _ in answers)
            rise.append(max(most for _, most in answers) - before)
    assert texts[0] == texts[1]
    # What remains is the prompts' embeddings, which mlx-vlm holds, and activations.
    assert rise[0] - rise[1] > MANY * (LONG * TOKEN - 160_000)


def test_its_prefix_cache_works_in_memory_and_its_disk_tier_is_refused(folder):
    text = letters(100, 7)
    prompts = [text + letters(20, 8), text + letters(33, 9)]
    answers = []
    for install in ("pass", BOUNDED):
        apc = {"APC_ENABLED": "1", "APC_DISK_ENABLED": "0"}
        with serving(folder, install, **apc) as (ask, log), ThreadPoolExecutor(2) as pool:
            answers.append([ask(text)[0], *(answer for answer, _ in pool.map(ask, prompts))])
            assert re.search(r"cached_tokens=[1-9]", log.read_text())
    assert answers[0] == answers[1]
    disk = {"APC_ENABLED": "1", "APC_DISK_PATH": str(folder / "apc")}
    with serving(folder, BOUNDED, **disk) as (ask, log), pytest.raises(openai.InternalServerError):
        ask(text)
    assert "set APC_DISK_ENABLED=0" in log.read_text()
