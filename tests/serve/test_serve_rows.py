"""`serve --spill --sessions`: after kill -9 a conversation goes on in its file of rows."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from serve_until_killed import EVERY, settings

from mlx_h2o.caches.resume import told_by
from mlx_h2o.serve.kept_rows import KeptRows, Told
from mlx_h2o.serve.marks import Mark
from mlx_h2o.serve.sessions import Sessions, token_count, tokens_of
from mlx_h2o.spill import state_keeping
from mlx_h2o.spill.conversation_rows import close_all
from mlx_h2o.spill.layout import POSITIONS
from mlx_h2o.spill.row_file import RowFile
from mlx_h2o.spill.setting import Spill
from serving import MODEL, serving, until, words

#: A record is in its file when the block before it is: two blocks later.
LATE = 2 * 16


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(state_keeping, "EVERY", EVERY)


@contextmanager
def to_be_killed(sessions, rows):
    """A client of a server in a process of its own, which is killed when the block ends."""
    here = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, str(here / "serve_until_killed.py"), str(sessions), str(rows)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{here.parent}:{here}"},
    )
    try:
        port = int(process.stdout.readline())
        yield openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def streamed(client, prompt, tokens, most=None):
    """An answer's text, of which at most so many pieces are read."""
    pieces = []
    stream = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, stream=True
    )
    for chunk in stream:
        pieces += [choice.text for choice in chunk.choices]
        if most is not None and len(pieces) >= most:
            break
    return "".join(pieces)


def known(running, prompt, tokens=4):
    """How many tokens of a prompt were known, and of how many."""
    answer = running.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0
    )
    return answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens


def rows_files(folder):
    return sorted(folder.glob("*.rows"))


def in_file(running):
    """The last conversation's caches, which go on in their file."""
    last = [idle for idle in running.generator.conversations.idle if idle.kind == "assistant"][-1]
    for entry in last.cache:
        assert entry.spill.follows
        assert entry.spill.available == entry.offset
    assert any(entry.back is not None and entry.evicted for entry in last.cache)
    return last.cache


def test_a_server_killed_within_an_answer_goes_on_from_the_file(tmp_path):
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with to_be_killed(sessions, rows) as client:
        said = streamed(client, prompt, 400, most=130)
    (file,) = rows_files(rows)
    recorded = [position for position, _ in told_by(file)]
    assert not list(sessions.glob("*.json"))
    with serving(**settings(sessions, rows)) as running:
        found, whole = known(running, prompt + said + " " + words(300, 5))
        # The newest may be of tokens that were not sent any more.
        assert found in recorded
        # All but a few blocks was known; all that the client was sent is in the prompt.
        assert 0 < whole - found < EVERY + LATE + 30
        assert in_file(running)[0].spill.conversation.file.path == file
    assert rows_files(rows) == [file]


def test_a_chat_that_broke_off_goes_on_from_the_part_that_its_client_got(tmp_path):
    sessions, rows = tmp_path / "sessions", tmp_path / "rows"
    asked = [{"role": "user", "content": words(0, 60)}]
    with to_be_killed(sessions, rows) as client:
        said = ""
        for chunk in client.chat.completions.create(
            model=MODEL, messages=asked, max_tokens=400, temperature=0, stream=True
        ):
            said += "".join(choice.delta.content or "" for choice in chunk.choices)
            if len(said) > 500:
                break
    (file,) = rows_files(rows)
    recorded = [position for position, _ in told_by(file)]
    with serving(**settings(sessions, rows)) as running:
        answer = running.client.chat.completions.create(
            model=MODEL,
            messages=[
                *asked,
                {"role": "assistant", "content": said},
                {"role": "user", "content": words(300, 5)},
            ],
            max_tokens=4,
        )
        found = answer.usage.prompt_tokens_details.cached_tokens
        assert found in recorded
        assert answer.usage.prompt_tokens - found < EVERY + LATE + 30
        in_file(running)


def test_requests_outside_of_batches_tell_their_tokens_too(tmp_path):
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with serving(**settings(sessions, rows)) as running:
        said = running.ask(prompt, 120, seed=1)
        tokenizer = running.generator.provider.tokenizer
        tokens = tokenizer.encode(prompt)
    close_all()
    newest, older = KeptRows(Spill(rows, keep=True), MODEL).left
    for left in (newest, older):
        assert tokens_of(left.key)[: len(tokens)] == tokens
        assert left.prompt == len(tokens) < token_count(left.key)
    text = tokenizer.decode(tokens_of(newest.key)[len(tokens) :])
    assert said.startswith(text.lstrip())


def test_a_conversation_that_made_room_comes_back_with_its_file(tmp_path):
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with serving(**settings(sessions, rows)) as running:
        said = running.ask(prompt, 150)
        (file,) = rows_files(rows)
        generator = running.generator
        generator.between_steps(lambda: generator.conversations.make_room(0))
        assert len(generator.conversations) == 0
        found, whole = known(running, prompt + said + " " + words(300, 5))
        assert 0 < whole - found < EVERY + LATE + 30
        assert in_file(running)[0].spill.conversation.file.path == file


def test_a_client_that_asks_again_goes_on_from_what_was_read(tmp_path):
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with to_be_killed(sessions, rows) as client:
        first = streamed(client, prompt, 120)
        again = prompt + first + " " + words(300, 10)
        streamed(client, again, 400, most=3)
    (file,) = rows_files(rows)
    with serving(**settings(sessions, rows)) as running:
        found, whole = known(running, again)
        assert 0 < whole - found < 40
        assert in_file(running)[0].spill.conversation.file.path == file


def test_only_the_tokens_after_the_record_are_read_again(tmp_path, caplog):
    caplog.set_level("INFO")
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with to_be_killed(sessions, rows) as client:
        said = streamed(client, prompt, 200)
    assert list(sessions.glob("*.json"))
    assert not list(sessions.glob("*.safetensors"))
    with serving(**settings(sessions, rows)) as running:
        found, whole = known(running, prompt + said + " " + words(300, 5))
        assert whole - found < 12
        in_file(running)
    (read,) = [record.args[0] for record in caplog.records if "again" in record.msg]
    assert 0 < read < EVERY + LATE + 16


def test_without_the_file_of_rows_the_session_goes_on_as_before(tmp_path):
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with to_be_killed(sessions, rows) as client:
        said = streamed(client, prompt, 100)
    (file,) = rows_files(rows)
    with file.open("r+b") as damaged:
        damaged.seek(0)
        damaged.write(b"x" * 100)
    with serving(**settings(sessions, rows)) as running:
        found, whole = known(running, prompt + said + " " + words(300, 5))
        assert whole - found < 12
    assert file.exists()


def test_records_of_another_conversation_model_or_settings_do_not_serve(tmp_path):
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with to_be_killed(sessions, rows) as client:
        streamed(client, prompt, 120)
    (file,) = rows_files(rows)
    spill = Spill(rows, keep=True)
    left = KeptRows(spill, MODEL).left
    assert [token_count(one.key) for one in left] == [p for p, _ in told_by(file)]
    newest, older = left
    assert newest.is_newest
    assert not older.is_newest
    assert KeptRows(spill, "another").left == []
    kept, more = KeptRows(spill, MODEL), newest.key + newest.key[:8]
    assert kept.longest_before(newest.mark, more) == newest
    assert kept.longest_before(newest.mark, newest.key) == older
    assert kept.longest_before(Mark("other"), more) is None
    assert kept.longest_before(newest.mark, newest.key[8:] + more) is None
    # The older does not take the file from the newest, unless its client asks the same again.
    apart = kept.load(older, older.key + b"\0" * 8)
    assert apart[0].offset == token_count(older.key)
    assert apart[0].spill is None
    assert kept.longest_before(newest.mark, more) == newest
    going_on = kept.load(newest, more)
    assert going_on[0].spill.follows
    # It is in use now, and another server leaves it alone.
    assert KeptRows(spill, MODEL).left == []


def test_a_record_tells_the_tokens_before_it_only():
    told = Told("m", Mark("a", ((1, 2),)), [5, 6, 7], 1)
    assert told.until(4) is None
    assert told.until(2)["pins"] == ((1, 2),)
    assert told.until(2) == Told("m", Mark("a", ((1, 2),)), [5, 6, 9], 1).until(2)
    assert told.until(3) != told.until(2)


def test_old_files_go(tmp_path):
    sessions, rows = tmp_path / "sessions", tmp_path / "rows"
    with to_be_killed(sessions, rows) as client:
        streamed(client, words(0, 60), 120)
    (file,) = rows_files(rows)
    spill = Spill(rows, keep=True)
    assert KeptRows(spill, MODEL, most_days=1, most_bytes=2**30).left
    assert file.exists()
    with RowFile.open(file, writable=False):
        assert KeptRows(spill, MODEL, most_bytes=10).left == []
        assert file.exists()  # someone uses it
    assert KeptRows(spill, MODEL, most_bytes=10).left == []
    assert not list(rows.glob("*.rows*"))


@pytest.mark.parametrize("asked_alone", [False, True])
def test_an_ordinary_end_loses_no_token(tmp_path, asked_alone):
    """The next turn reads its own tokens only, from the file of rows alone."""
    sessions, rows, prompt = tmp_path / "sessions", tmp_path / "rows", words(0, 60)
    with serving(**settings(sessions, rows)) as running:
        said = running.ask(prompt, 70, **({"seed": 1} if asked_alone else {}))
        held = {idle.cache[0].offset for idle in running.generator.conversations.idle}
    (file,) = rows_files(rows)
    newest = told_by(file)[0][0]
    assert newest == max(held)
    assert newest % POSITIONS  # within a block
    assert not list(sessions.glob("*.safetensors"))  # the file of rows is the session
    with serving(**settings(sessions, rows)) as running:
        found, whole = known(running, prompt + said + " " + words(300, 5))
        assert found >= newest
        assert whole - found < 12
        assert in_file(running)[0].spill.conversation.file.path == file


# -- a kill between any two steps of writing ------------------------------------------------------


@dataclass
class Disk:
    """What was on disk at one moment.

    Attributes:
        step: What had just been done.
        answers: Turns whose ends their client had.
        noted: Turns that were on disk.
    """

    step: str
    answers: int
    noted: int
    folder: Path


@pytest.fixture(scope="module", params=[EVERY, 2 * EVERY, state_keeping.EVERY])
def disks(request, tmp_path_factory):
    """Copies of the folders at each step of a conversation's second and third turn, and its texts.

    Returns:
        The copies, and the prompt of each turn with its answer.
    """
    root, copies, said = tmp_path_factory.mktemp("disks"), list[Disk](), list[str]()
    folder, noted, one_at_a_time = root / "now", 0, threading.Lock()

    def copied(step):
        with one_at_a_time:  # they come from several threads
            if noted:
                copy = root / str(len(copies))
                shutil.copytree(folder, copy)
                copies.append(Disk(step, len(said), noted, copy))

    def stepwise(owner, name):
        real = getattr(owner, name)

        def done(*args, **kwargs):
            nonlocal noted
            result = real(*args, **kwargs)
            noted += name == "note"
            copied(f"{name} {result}")
            return result

        patched.setattr(owner, name, done)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(state_keeping, "EVERY", request.param)
        for step in [(Sessions, "note"), (Sessions, "forget"), (KeptRows, "record")]:
            stepwise(*step)
        stepwise(state_keeping, "write_record")
        with serving(**settings(folder / "sessions", folder / "rows")) as running:
            prompt = words(0, 60)
            for turn in range(3):
                prompt += running.ask(prompt, 20 + 40 * turn)
                said.append(prompt)
                prompt += " " + words(300 + 20 * turn, 8)
                until(lambda: not any(i.unsaved for i in running.generator.conversations.idle))
                copied("idle")
    return copies, said


def test_every_turn_that_a_client_may_know_is_found_after_a_kill(disks, tmp_path):
    copies, said = disks
    lost, asked = [], 0
    for number, disk in enumerate(copies):
        for most in (10, 1):
            folder = tmp_path / f"{number}-{most}"
            shutil.copytree(disk.folder, folder)
            options = ["--prompt-cache-size", str(most)]
            given = settings(folder / "sessions", folder / "rows")
            with serving(**given, options=options) as running:
                for turn in {max(disk.answers, 1), disk.noted}:
                    asked += 1
                    found, whole = known(running, said[turn - 1] + " " + words(500, 5))
                    if whole - found > 20:
                        lost.append((disk.step, disk.answers, disk.noted, most, turn, found, whole))
    print(f"{len(copies)} moments, {asked} turns asked on")
    assert not lost, "\n".join(map(str, lost))
