#!/usr/bin/env python3
"""Runs the targets that `make test` left out, for so many minutes; reports those that did not run.

Targets of the last commits' files come first. A target that fails fails the whole; one that runs
out of time is stopped and reported as not finished, and fails nothing. Two targets run at a time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "logs"

#: The content of each target of `make test-all`, by the paths that it depends on.
AREAS = {
    "test-python": ("python/mlx_h2o/", "tests/", "golden/", "docs/", "benchmarks/", "research/"),
    "test-server": ("python/mlx_h2o/", "tests/serve/", "tests/spill/", "tests/chat/", "tests/cli/"),
    "test-caches": ("python/mlx_h2o/", "python/src/", "c_api/src/cpu/"),
    "test-models": ("python/mlx_h2o/", "tests/model_", "tests/models/"),
    "test-metal": ("metal/", "tests/metal/", "python/mlx_h2o/attention/backends/"),
    "test-native": ("c_api/", "golden/", "tests/conformance/test_c_api.py"),
    "test-sanitize": ("c_api/src/cpu/", "python/src/", "python/CMakeLists.txt"),
    "test-swift": ("swift/", "Package.swift", "c_api/mlx_c/", "tests/host_gpu/"),
    "test-old-mlx-lm": (
        "python/mlx_h2o/hosts/routing.py",
        "python/mlx_h2o/models/make.py",
    ),
    "test-macos": ("c_api/src/", "python/src/", "tools/check_macos_build.py"),
}
# The number of last commits considered.
COMMITS = 20
# Targets run at once; each keeps about one core busy.
LANES = 2
# The most minutes of one target, so that none can take all the time. Most take less than 20; the C
# library is compiled twice, instrumented.
MOST_MINUTES = 30
# No target finishes in less time.
LEAST_SECONDS = 60
# The lines shown of a failed target's output.
SHOWN_LINES = 80


@dataclass
class Running:
    """A target under way."""

    target: str
    process: subprocess.Popen[bytes]
    started: float

    @property
    def log(self) -> Path:
        return LOGS / f"{self.target}.log"

    def stop(self) -> None:
        """End the target and every process that it started."""
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def changed_paths() -> list[list[str]]:
    """The paths that each of the last commits touched, newest first; none without a history."""
    command = ["git", "log", f"-{COMMITS}", "-m", "--first-parent", "--name-only", "--format=%x00"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [commit.split() for commit in done.stdout.split("\0")[1:]]


def ordered(commits: Iterable[Iterable[str]]) -> list[str]:
    """All targets, those that the newest commits touch first."""
    touched = [
        target
        for paths in commits
        for target, prefixes in AREAS.items()
        if any(path.startswith(prefixes) for path in paths)
    ]
    return list(dict.fromkeys([*touched, *AREAS]))


def start(target: str) -> Running:
    LOGS.mkdir(parents=True, exist_ok=True)
    # Each target has a make of its own, even if this runs under another make.
    env = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    with (LOGS / f"{target}.log").open("wb") as log:
        process = subprocess.Popen(
            ["make", target], cwd=ROOT, stdout=log, stderr=log, env=env, start_new_session=True
        )
    return Running(target, process, time.monotonic())


def finished(running: Running, deadline: float) -> str | None:
    """The outcome of a target, or None while it runs."""
    code, now = running.process.poll(), time.monotonic()
    minutes = (now - running.started) / 60
    if code is None and now < deadline and minutes < MOST_MINUTES:
        return None
    lines = running.log.read_text(errors="replace").splitlines()
    if code is None:
        running.stop()
        return f"not finished after {minutes:.1f} minutes"
    if code == 0:
        return f"passed in {minutes:.1f} minutes: {lines[-1] if lines else ''}"
    print(f"---- {running.target} ----", *lines[-SHOWN_LINES:], sep="\n", flush=True)
    return f"FAILED after {minutes:.1f} minutes"


def run(targets: list[str], seconds: float) -> dict[str, str]:
    """The outcome of each target."""
    deadline = time.monotonic() + seconds
    results: dict[str, str] = {}
    waiting, lanes = list(targets), list[Running]()
    try:
        while lanes or waiting:
            room = time.monotonic() + LEAST_SECONDS < deadline
            while room and waiting and len(lanes) < LANES:
                lanes.append(start(waiting.pop(0)))
            for running in list(lanes):
                if result := finished(running, deadline):
                    lanes.remove(running)
                    results[running.target] = result
                    print(f"{running.target}: {result}", flush=True)
            if not lanes and not room:
                break
            time.sleep(0.5)
    finally:
        for running in lanes:
            running.stop()
    return results | dict.fromkeys(waiting, "not run: no time was left")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True)
    minutes = parser.parse_args().minutes
    results = run(ordered(changed_paths()), 60 * minutes)
    print(f"\nWhat `make test` leaves out, in {minutes:.0f} minutes:")
    for target, result in results.items():
        print(f"    {target}: {result}")
    return any(result.startswith("FAILED") for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
