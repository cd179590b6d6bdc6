"""Rivals from kvpress, NVIDIA's collection, which runs in a process and environment of its own.

kvpress compresses a prompt once, after it was read whole, and keeps what follows. It computes with
the same weights, in float32, on the CPU.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.board import weights
from benchmarks.board.packages import Missing, folder, pip
from benchmarks.board.reading import Read, Reading, plain
from benchmarks.board.rivals import Rival
from benchmarks.board.tasks import Task
from mlx_h2o.evaluate.reader import Reader
from mlx_h2o.loading import gguf
from mlx_h2o.loading.gguf_file import GGUFFile
from mlx_h2o.loading.load import model_path

VERSION = "0.5.5"
SOURCE = f"https://pypi.org/project/kvpress/{VERSION}/"
#: Torch without what it requires, which for Linux are gigabytes for GPUs.
ALONE = ("torch==2.13.0", f"kvpress=={VERSION}")
#: What the two need to compute on a CPU.
BESIDE = (
    *("transformers>=4.56,<5.3", "numpy>=2,<3", "safetensors", "cachetools>=5.5.2,<6", "requests"),
    *("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools"),
)
#: Bytes of disk that the environment takes, and a margin.
NEEDED = 3 << 30
LITTLE = 1e-3
WORKER = Path(__file__).parent / "kvpress_worker.py"

SNAPKV = {"press": "SnapKVPress", "settings": {"window_size": 64, "kernel_size": 5}}
EXPECTED = {"press": "ExpectedAttentionPress", "settings": {"epsilon": 1e-2}}
WITHOUT_NORM = {"press": "ExpectedAttentionPress", "settings": {"use_vnorm": False}}
QUARTER = "or a quarter of what stays if that is less"
#: Presses by the rival's name: class, settings, and why these.
PRESSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "StreamingLLM": ("StreamingLLMPress", {"n_sink": 4}, "4 sinks"),
    "H2O": ("ObservedAttentionPress", {}, "ObservedAttention: the mean attention of all queries"),
    "TOVA": ("TOVAPress", {}, "no settings"),
    "SnapKV": (SNAPKV["press"], SNAPKV["settings"], f"window 64, {QUARTER}, average pool 5"),  # type: ignore[dict-item]
    "AdaKV": ("AdaKVPress", {"press": SNAPKV, "alpha_safeguard": 0.5}, "on this SnapKV, floor 0.5"),
    "ChunkKV": (
        "ChunkKVPress",
        {"press": SNAPKV, "chunk_length": 10},
        "on this SnapKV, chunks of 10",
    ),
    "KeyDiff": ("KeyDiffPress", {}, "no settings"),
    "ExpectedAttention": (EXPECTED["press"], EXPECTED["settings"], "epsilon 0.01"),  # type: ignore[dict-item]
    "AdaKV of ExpectedAttention": (
        "AdaKVPress",
        {"press": EXPECTED, "alpha_safeguard": 0.2},
        "on this ExpectedAttention, floor 0.2",
    ),
    "KVzip": ("KVzipPress", {}, "heads and layers share the budget"),
    "CriticalKV": ("CriticalKVPress", {"press": SNAPKV}, "on this SnapKV"),
    "CriticalAdaKV": (
        "CriticalAdaKVPress",
        {"press": SNAPKV, "alpha_safeguard": 0.5},
        "on this SnapKV, floor 0.5",
    ),
    "Compactor": ("CompactorPress", {}, "8 sinks, 4 newest, blended by the ratio"),
}


def rivals() -> list[Rival]:
    """One for each press."""
    return [
        Rival(f"kvpress {name}", SOURCE, why, _pressed(press, settings), prompts_only=True)
        for name, (press, settings, why) in PRESSES.items()
    ]


def windowed(settings: dict[str, Any], rows: int) -> dict[str, Any]:
    """Settings in which no window takes more than a quarter of what stays.

    A press keeps its whole window; the authors' 64 tokens would be all that a small cache holds.

    Args:
        settings: A press's settings, which may hold another press.
        rows: Rows of a head that stay.
    """
    made = dict(settings)
    for name, value in settings.items():
        if isinstance(value, dict):
            made[name] = {**value, "settings": windowed(value.get("settings", {}), rows)}
        elif name == "window_size":
            made[name] = min(value, max(rows // 4, 1))
    return made


def _pressed(press: str, settings: dict[str, Any]) -> Read:
    def read(reader: Reader, task: Task, share: float) -> Reading:
        rows = len(task.prompts[0])
        # Presses keep int(rows * (1 - ratio)) rows; KVzip lets int(rows of all heads * ratio) go.
        # A little more, or less, is rounded to the number meant.
        little = -LITTLE if press == "KVzipPress" else LITTLE
        rows_left = max(round(share * rows), 1)
        ratio = 1 - (rows_left + little) / rows
        return pressed(reader, task, press, windowed(settings, rows_left), ratio)

    return read


def pressed(
    reader: Reader, task: Task, press: str, settings: dict[str, Any], ratio: float
) -> Reading:
    """A task's rows through a press, one by one.

    Args:
        reader: The model.
        task: The task.
        press: A class of kvpress; "none" compresses nothing.
        settings: Its arguments.
        ratio: The part of the rows that goes.

    Raises:
        ValueError: There is no kvpress here, or the press does not run.
    """
    worker = worker_of(reader)
    alone = len(task.prompts) == 1
    request = {"press": press, "settings": settings, "ratio": ratio, "alone": alone}
    logits, answers = [], []
    for prompt, continuation in zip(task.prompts, task.continuations, strict=True):
        answer, row = worker.ask({**request, "prompt": prompt, "continuation": continuation})
        answers.append(answer)
        logits.append(row)
    heads = sum(len(layer) for layer in worker.heads)
    row_bytes = plain(reader.model, 1) // heads
    n = len(answers)
    return Reading(
        mx.stack(logits),
        max(answer["rows"] for answer in answers) * row_bytes,
        max(answer["held"] for answer in answers),
        sum(answer["prompt_seconds"] for answer in answers) / n,
        sum(answer["token_seconds"] for answer in answers) / n,
        answers[0]["peak"],
    )


class Worker:
    """kvpress's process with one model.

    Args:
        python: The interpreter of its environment.
        reader: The model.

    Raises:
        ValueError: The process does not start.
    """

    def __init__(self, python: Path, reader: Reader):
        self._folder = Path(tempfile.mkdtemp(prefix="board-"))
        config = config_of(reader)
        weights.write(reader.model, reader.tokenizer, config, self._folder)
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        self.heads = [range(heads)] * config["num_hidden_layers"]
        self._log = (self._folder / "log").open("w+")
        self._process = subprocess.Popen(
            [str(python), str(WORKER), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            # Threads that wait do not spin: MLX's own are on the same cores.
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
        )
        self._answer()

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], mx.array]:
        """A request's answer, and its logits `[C - 1, vocabulary]`.

        Raises:
            ValueError: The press does not run, or the process has ended.
        """
        out = self._folder / "logits.npy"
        assert self._process.stdin is not None
        try:
            print(json.dumps({**request, "out": str(out)}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise ValueError(self._last_words()) from None
        answer = self._answer()
        if "failed" in answer:
            raise ValueError(answer["failed"])
        return answer, mx.array(np.load(out))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(self._last_words())
        return dict(json.loads(line))

    def _last_words(self) -> str:
        self._log.flush()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines() or ["no message"]
        return f"kvpress's process ended: {lines[-1]}"

    def close(self) -> None:
        """End the process and remove its files."""
        self._process.terminate()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_workers: dict[str, Worker | ValueError] = {}


def worker_of(reader: Reader) -> Worker:
    """The process of a reader's model; only one runs at a time.

    Raises:
        ValueError: It does not start; the same is said each time.
    """
    name = reader.model_name
    if name not in _workers:
        end_workers()
        try:
            _workers[name] = Worker(environment(), reader)
        except ValueError as error:
            _workers[name] = error
    worker = _workers[name]
    if isinstance(worker, ValueError):
        raise worker
    return worker


@atexit.register
def end_workers() -> None:
    """End all processes."""
    for worker in _workers.values():
        if isinstance(worker, Worker):
            worker.close()
    _workers.clear()


@cache
def environment() -> Path:
    """The Python of kvpress's environment, which is made if it is not there.

    Raises:
        Missing: pip cannot get a package, or there is too little disk.
    """
    place = folder() / f"kvpress-{VERSION}"
    python, done = place / "bin" / "python", place / ".complete"
    if done.exists():
        return python
    free = shutil.disk_usage(folder()).free
    if free < NEEDED:
        raise Missing(f"kvpress's environment needs {NEEDED >> 30} GiB of disk; {free >> 30} free.")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip(python, *BESIDE)
    pip(python, "--no-deps", *ALONE)
    done.touch()
    return python


def config_of(reader: Reader) -> dict[str, Any]:
    """The model's `config.json`; a GGUF file's header says the same."""
    path = Path(model_path(reader.model_name))
    if path.suffix == gguf.SUFFIX:
        return gguf.config_of(GGUFFile(path))
    return dict(json.loads((path / "config.json").read_text(encoding="utf-8")))
