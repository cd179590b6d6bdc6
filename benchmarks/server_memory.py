"""What a server, ours or mlx-lm's, holds for conversations that it keeps: for benchmarks.memory.

The server runs in this process, which asks it itself and then weighs: MLX's count of active memory
is the whole process's.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from http.client import HTTPConnection
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.weighing import SEQUENCES, Scale, Weight, parser
from mlx_h2o._blas import use_openblas
from mlx_h2o.cli import main as mlx_h2o_main
from mlx_h2o.loading.load import SAMPLE_TEXT, load, model_path

MODEL = "builtin:recall-4m"
OURS, THEIRS = ARMS = ("mlx-h2o, `mlx_h2o serve`", "`mlx_lm.server`")
PORT = 8793
ANSWER, WARM_UP = 64, 8
WORDS = 600


def ask(prompt: str, tokens: int) -> None:
    """One answer."""
    connection = HTTPConnection("127.0.0.1", PORT, timeout=600)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {content!r}")


def told_by_ours() -> int:
    """Bytes of running and idle conversations, by the server's metrics."""
    connection = HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    sizes = re.findall(r"^mlx_h2o_kv_bytes_(?:running|idle) (\S+)$", text, re.M)
    return sum(int(float(size)) for size in sizes)


def watched(arm: str, reported: Callable[[], int]) -> None:
    """Ask, weigh, print, and end the process, once the server answers."""
    try:
        while True:
            try:
                ask("One", WARM_UP)
                break
            except ConnectionError:
                threading.Event().wait(0.3)
        words = SAMPLE_TEXT.read_text(encoding="utf-8").split()
        prompts = [" ".join(words[40 * i : 40 * i + WORDS]) for i in range(1 + SEQUENCES)]
        ask(prompts[0], WARM_UP)
        before, scale = reported(), Scale(arm)
        askers = [threading.Thread(target=ask, args=(p, ANSWER)) for p in prompts[1:]]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        ask("One", WARM_UP)  # what ran is idle now
        weight: Weight = scale.weighed(f"{SEQUENCES} conversations kept", reported() - before)
        print(json.dumps([asdict(weight)]), flush=True)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ours(args: Namespace) -> None:
    """Serve by `mlx_h2o serve`."""
    threading.Thread(target=watched, args=(OURS, told_by_ours)).start()
    options = ["--max-kv-size", str(args.slots), "--port", str(PORT)]
    mlx_h2o_main(["serve", "--model", MODEL, *options])


def theirs(_: Namespace) -> None:
    """Serve by mlx-lm's server."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SOAK_PEAK"] = str(Path(folder) / "peak")
        server: Any = import_module("mlx_lm.server")
        noting: Any = import_module("benchmarks.stock_server")
        server.BatchGenerator, server.LRUPromptCache = noting.Noting, noting.Kept

        def reported() -> int:
            return int(noting.Noting.idle.nbytes)

        threading.Thread(target=watched, args=(THEIRS, reported)).start()
        sys.argv = ["mlx_lm.server", "--model", model_path(MODEL), "--port", str(PORT)]
        server.main()


def main() -> None:
    args = parser().parse_args()
    use_openblas()
    load(MODEL)
    {OURS: ours, THEIRS: theirs}[args.arm](args)


if __name__ == "__main__":
    main()
