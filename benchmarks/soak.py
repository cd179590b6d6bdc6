"""Many streams for minutes: `mlx_h2o serve` within its bound, and the same on mlx-lm's server.

    python -m benchmarks.soak --streams 16 --tokens 2000 --minutes 10

Each stream asks for answers of N tokens, one after another, until the time is over. The output,
side by side: resident memory after parts of the time, the most KV bytes, tokens per second, errors,
and the number of answers that differ from the one that the same prompt gets alone, which is made
once for each prompt. mlx-lm's server gets half of the time (--stock-minutes), and the answers alone
an eighth of it (--alone-minutes); prompts that these times do not reach are reported. So ten
minutes end in less than twenty on a machine that gives an answer in a minute; standard error shows
progress.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mlx_lm

import mlx_h2o
from mlx_h2o._byte_size import memory_size
from mlx_h2o.loading.load import SAMPLE_TEXT, model_path

#: Seconds between two checks of the resident memory, and checks between two lines of progress.
EVERY = 5
TOLD_EVERY = 6
PROMPT_WORDS = 60


@dataclass
class Soaked:
    """The results of one server.

    Attributes:
        name: The server's name.
        resident: Seconds and MB, one pair for each check.
        answers: The texts of all complete answers, by stream.
        tokens: Generated tokens in all.
        seconds: Seconds since the first request.
        errors: The errors' messages.
        kv_peak: The most bytes of KV at once.
    """

    name: str
    resident: list[tuple[float, float]] = field(default_factory=list)
    answers: dict[int, list[str]] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0
    errors: list[str] = field(default_factory=list)
    kv_peak: int = 0

    def resident_at(self, share: float) -> float:
        """MB after a share of the time."""
        at = self.resident[-1][0] * share
        return next(mb for seconds, mb in self.resident if seconds >= at)


def prompts(streams: int) -> list[str]:
    """A prompt for each stream."""
    words = SAMPLE_TEXT.read_text(encoding="utf-8").split()
    return [" ".join(words[40 * i : 40 * i + PROMPT_WORDS]) for i in range(streams)]


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)])) / 1024


def tell(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def soak(name: str, command: list[str], minutes: float, args: argparse.Namespace) -> Soaked:
    """Start a server, send requests on all streams for the given minutes, and watch it."""
    soaked = Soaked(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peak"
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "SOAK_PEAK": str(file)}
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        try:
            wait_for(args.port, process)
            start = time.monotonic()
            end = start + 60 * minutes
            threads = [
                threading.Thread(target=stream, args=(i, prompt, end, args, soaked))
                for i, prompt in enumerate(prompts(args.streams))
            ]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                look = time.monotonic() - start, resident_mb(process.pid)
                if len(soaked.resident) % TOLD_EVERY == 0:
                    tell(
                        f"{name}: {look[0]:.0f} of {60 * minutes:.0f} s, {look[1]:.0f} MB, "
                        f"{soaked.tokens} tokens, {len(soaked.errors)} errors"
                    )
                soaked.resident.append(look)
                next((thread for thread in threads if thread.is_alive()), threads[0]).join(EVERY)
            soaked.seconds = time.monotonic() - start
            soaked.kv_peak = peak_of(args.port, file)
        finally:
            process.terminate()
            process.wait(60)
    return soaked


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


def stream(number: int, prompt: str, end: float, args: argparse.Namespace, soaked: Soaked) -> None:
    """Send requests, one after another, until the time is over."""
    answers = soaked.answers.setdefault(number, [])
    while time.monotonic() < end:
        text = ""
        try:
            for chunk in chunks(prompt, args):
                text += chunk
                soaked.tokens += 1
        except Exception as error:
            soaked.errors.append(repr(error))
            return
        answers.append(text)


def chunks(prompt: str, args: argparse.Namespace) -> Any:
    """The chunks of one answer."""
    body = {"prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "stream": True}
    connection = HTTPConnection("127.0.0.1", args.port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()!r}")
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0]["text"]
        elif line.startswith(b"data: [DONE]"):
            return
    raise RuntimeError("the answer broke off")


def peak_of(port: int, file: Path) -> int:
    """The most bytes of KV, from the server's metrics or from stock_server.py's file."""
    if file.exists():
        return int(file.read_text())
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    match = re.search(r"^mlx_h2o_kv_bytes_peak (\S+)$", text, re.M)
    assert match is not None, "prometheus-client is missing"
    return int(float(match[1]))


def unlike_alone(soaked: Soaked, args: argparse.Namespace) -> tuple[int, int]:
    """The number of answers that differ from the one given alone, and the number compared.

    Each prompt is sent once, however often it was answered, until the time for it is over.
    """
    model, tokenizer = mlx_h2o.load(args.model)
    end = time.monotonic() + 60 * args.alone_minutes
    unlike = compared = 0
    for number, prompt in enumerate(prompts(args.streams)[: args.alone]):
        if time.monotonic() > end:
            tell(f"alone: the time is over before prompt {number + 1}")
            break
        cache = mlx_h2o.make_prompt_cache(model, args.max_kv_size)
        expected = mlx_lm.generate(
            model, tokenizer, prompt, max_tokens=args.tokens, prompt_cache=cache
        )
        unlike += sum(answer != expected for answer in soaked.answers[number])
        compared += len(soaked.answers[number])
        tell(f"alone: {number + 1} of {args.alone} prompts, {unlike} of {compared} answers differ")
    return unlike, compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--model", default="builtin:recall-4m")
    parser.add_argument("--max-kv-size", type=int, default=256)
    parser.add_argument("--kv-memory", default="64MB")
    parser.add_argument("--alone", type=int, default=16, help="prompts that are asked alone too")
    parser.add_argument("--stock-minutes", type=float, help="for mlx-lm's server (default: half)")
    parser.add_argument(
        "--alone-minutes", type=float, help="for these prompts (default: an eighth)"
    )
    parser.add_argument("--port", type=int, default=8791)
    args = parser.parse_args()
    if args.stock_minutes is None:
        args.stock_minutes = args.minutes / 2
    if args.alone_minutes is None:
        args.alone_minutes = args.minutes / 8
    args.alone = min(args.alone, args.streams)
    bound = memory_size("--kv-memory", args.kv_memory)
    own = ["--port", str(args.port), "--max-kv-size", str(args.max_kv_size)]
    own += ["--kv-memory", args.kv_memory, "--queue", str(args.streams)]
    command = [sys.executable, "-m", "mlx_h2o", "serve", "--model", args.model, *own]
    ours = soak("mlx_h2o serve", command, args.minutes, args)
    stock = ["--model", model_path(args.model), "--port", str(args.port)]
    stock += ["--decode-concurrency", str(args.streams), "--prompt-cache-size", str(args.streams)]
    command = [sys.executable, "-m", "benchmarks.stock_server", *stock]
    theirs = soak("mlx_lm.server", command, args.stock_minutes, args)
    print(
        f"{args.streams} streams of {args.tokens} tokens, {args.minutes:g} minutes (mlx-lm's "
        f"server {args.stock_minutes:g}), {args.model}"
    )
    print(
        "| server | KV bytes, most | resident MB at 10, 50, 100 % | tokens/s | answers | errors |"
    )
    print("|---|---:|---|---:|---:|---:|")
    for soaked in (ours, theirs):
        resident = ", ".join(f"{soaked.resident_at(share):.0f}" for share in (0.1, 0.5, 1.0))
        answers = sum(map(len, soaked.answers.values()))
        print(
            f"| {soaked.name} | {soaked.kv_peak:,} | {resident} | "
            f"{soaked.tokens / soaked.seconds:.0f} | {answers} | {len(soaked.errors)} |"
        )
    unlike, compared = unlike_alone(ours, args)
    print(
        f"\nThe bound was {bound:,} bytes. Of {compared} answers {unlike} differ from those alone."
    )
    if ours.kv_peak > bound or ours.errors or unlike:
        print(*ours.errors[:3], sep="\n")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
