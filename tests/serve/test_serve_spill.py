"""`mlx_h2o serve --spill`: a file for each conversation, which goes on in it and goes with it."""

import json
import subprocess
import sys

import numpy as np
import openai
import pytest

from mlx_h2o.cli import main
from mlx_h2o.slots.pins import true_positions
from serving import SIZE, WORDS, serving


def require_slots_in_file(entry):
    """All slots' keys are in the file."""
    for run in entry.store.runs:
        views = entry.store.views(run)
        positions = np.array(true_positions(views["positions"]))[0]
        for head in range(run.heads):
            rows = entry.spill.rows(run.first + head, positions[head])
            assert np.array_equal(rows["keys"], np.array(views["keys"][0, head]))


def test_each_conversation_has_a_file_and_goes_on_in_it(tmp_path):
    prompts = [" ".join(WORDS[first : first + 60]) for first in (0, 100)]
    answers = {}
    for spill in (None, str(tmp_path)):
        defaults = {"max_size": SIZE, **({"spill": spill} if spill else {})}
        with serving(defaults=defaults) as running:
            answers[spill] = []
            for prompt in prompts:
                first = running.ask(prompt, 24)
                second = running.ask(prompt + first + " " + WORDS[300], 24)
                answers[spill] += [first, second]
            if spill is None:
                continue
            last = [idle for idle in running.scheduler.conversations.entries if not idle.passed]
            ends = [idle.cache for idle in last if idle.kind == "turn"]
            files = {cache[-1].spill.conversation.file for cache in ends}
            assert len(files) == len(ends) == 2
            for cache in ends:  # rows come back to the last layer, so the file has its rows
                assert [entry.spill is not None for entry in cache] == [False, False, False, True]
                assert not cache[-1].spill.failure
                assert cache[-1].spill.available == cache[-1].offset > 100
            with pytest.raises(openai.BadRequestError, match="only when the server is started"):
                running.ask("x", extra_body={"mlx_h2o": {"spill": "/tmp"}})
    assert answers[None] == answers[str(tmp_path)]
    assert not list(tmp_path.iterdir())


def test_the_command_s_files_go_with_it(tmp_path, capsys):
    command = ["generate", "--model", "builtin:recall-4m", "--prompt", " ".join(WORDS[:80])]
    command += ["--max-tokens", "40", "--max-kv-size", "48", "--json"]
    assert main(command) == 0
    # A process of its own: its files go when it ends.
    own = [sys.executable, "-m", "mlx_h2o", *command, "--spill", str(tmp_path / "rows")]
    run = subprocess.run(own, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    report = [json.loads(printed) for printed in (capsys.readouterr().out, run.stdout)]
    assert report[0]["tokens"] == report[1]["tokens"]
    assert len(report[0]["tokens"]) == 40
    # Rows that wait for the file count, and so do the queries that ask for rows to come back.
    assert report[0]["kv_bytes"] < report[1]["kv_bytes"] < 1.25 * report[0]["kv_bytes"]
    assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "rows").iterdir())
