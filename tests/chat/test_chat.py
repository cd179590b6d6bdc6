"""`mlx_h2o chat`, through a pseudo-terminal as a person has it, and the dialogue behind it."""

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.chat.dialogue import TOKENS, Dialogue
from mlx_h2o.chat.pin_rules import PinRules
from mlx_h2o.cli import interrupts
from tiny_models import tiny_model

SECONDS = 60
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: str, **variables: str):
        self.master, slave = pty.openpty()
        command = [sys.executable, "-m", "mlx_h2o", "chat", *arguments]
        environment = os.environ | {"TERM": "dumb", "COLUMNS": "200"} | variables
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
        )
        os.close(slave)
        self._rest = ""

    def read_until(self, end: str) -> str:
        """What it shows, up to the last `end`; what is there after it is read by the next call."""
        shown, deadline = self._rest, time.monotonic() + SECONDS
        while end not in shown:
            left = max(deadline - time.monotonic(), 0)
            ready, _, _ = select.select([self.master], [], [], left)
            assert ready, f"{end!r} never came: {shown!r}"
            try:
                shown += os.read(self.master, 4096).decode(errors="replace")
            except OSError:  # the other end was closed
                break
        size = shown.rfind(end) + len(end) if end in shown else len(shown)
        self._rest = shown[size:]
        return ESCAPES.sub("", shown[:size]).replace("\r\n", "\n")

    def say(self, line: str) -> str:
        """The answer to a line."""
        os.write(self.master, f"{line}\n".encode())
        return self.read_until("\n> ").removeprefix(line)

    def close(self) -> int:
        os.write(self.master, b"/quit\n")
        code = self.process.wait(SECONDS)
        os.close(self.master)
        return code


def test_a_chat_in_the_terminal(tmp_path):
    options = ("--model", "builtin:recall-4m", "--max-kv-size", "96", "--max-tokens", "12")
    fact = "The secret number of Ada Hill is 4711."
    chat = Terminal(*options, "--pin", fact)
    chat.read_until("> ")
    said = chat.say(f"We met in spring. {fact} Then the summer came, and with it the heat.")
    status = re.search(
        r"\[4 of 4 layers bounded, [\d.]+ [kM]B at most, [\d.]+ [kM]B now, peak while reading "
        r"[\d.]+ [kM]B; (\d+) of (\d+) tokens evicted, (\d+) pinned",
        said,
    )
    assert status, said
    assert int(status[3]) > 8
    assert fact in chat.say("/pins")
    assert "\x1b" not in chat.say("/help")
    filler = "And so the days went by, one after the other, and the road was long and dusty. " * 4
    for _ in range(2):
        said = chat.say(filler)
    evicted = re.search(r"([\d,]+) of ([\d,]+) tokens evicted", said)
    assert int(evicted[1].replace(",", "")) > 0
    assert "pinned" in chat.say("/pin the road was long")
    assert "does not contain" in chat.say("/pin nothing of the kind")
    assert fact in chat.say("/kept")
    path = tmp_path / "chat.safetensors"
    assert "saved" in chat.say(f"/save {path}")
    pins = chat.say("/pins")
    assert "There is no /nonsense" in chat.say("/nonsense")
    assert "carry" in chat.say("/turn 7")
    assert "0% of the past counts" in chat.say("/turn reset")
    assert "50% of the past counts" in chat.say("/turn 0.5")
    assert "How much of the past" in chat.say("/turn")
    assert "cleared" in chat.say("/clear")
    assert "Nothing is pinned" in chat.say("/unpin")
    assert "Nothing is pinned" in chat.say("/pins")
    assert re.search(r"read \d+ tokens", chat.say(f"/load {path}"))
    assert chat.say("/pins") == pins
    count = len(pins.strip().splitlines()) - 1  # the last line is the prompt
    assert f"unpinned {count}" in chat.say("/unpin")
    gone = tmp_path / "no" / "folder.safetensors"
    assert f"there is no folder {gone.parent}" in chat.say(f"/save {gone}")
    assert str(path) in chat.say(f"/save {path}")
    assert chat.close() == 0
    other = Terminal(*options)
    other.read_until("> ")
    other.say(f"/load {path}")
    assert "Nothing is pinned" in other.say("/pins")
    answer = other.say("Question: What is the secret number of Ada Hill? Answer:")
    assert "tokens evicted" in answer
    assert "There is no file nowhere.safetensors" in other.say("/load nowhere.safetensors")
    assert other.close() == 0


def test_pasted_lines_are_one_message_and_ctrl_c_twice_saves(tmp_path):
    """On a terminal that edits lines."""
    options = ("--model", "builtin:recall-4m", "--max-tokens", "4")
    ready = "\x1b[?12l\x1b[?25h"  # the prompt stands, and keys are read one by one
    variables = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_CACHE_HOME": str(tmp_path)}
    chat = Terminal(*options, **variables)
    chat.read_until(ready)
    os.write(chat.master, b"\x1b[200~Anne went home.\nToby stayed.\x1b[201~\r")
    answer = chat.read_until("tokens/s]\r\n") + chat.read_until(ready)
    assert answer.count(" peak while reading ") == 1
    os.write(chat.master, b"\x1b[A")  # arrow up: the last message again
    chat.read_until("Toby stayed.")
    os.write(chat.master, b"\x03")
    chat.read_until("ends the chat]\r\n")
    chat.read_until(ready)
    os.write(chat.master, b"\x03")
    command = re.search(r"To go on: (mlx_h2o chat [^\r\n]+)", chat.read_until("stopped\r\n"))
    assert chat.process.wait(SECONDS) == 130
    os.close(chat.master)
    program, *_, path = shlex.split(command[1])
    assert program == "mlx_h2o"
    assert [str(file) for file in tmp_path.rglob("*.safetensors")] == [path]
    _, metadata = mlx_h2o.load_prompt_cache(path, return_metadata=True)
    said = mlx_h2o.load("builtin:recall-4m")[1].decode(json.loads(metadata[TOKENS])["tokens"])
    assert "Anne went home.\nToby stayed." in said
    again = Terminal(*shlex.split(command[1])[2:])
    again.read_until("> ")
    assert "Anne went home." in again.say("/kept")
    assert again.close() == 0


def test_ctrl_c_ends_a_reply_between_two_steps(embedded):
    """So the caches can be saved; the second one raises as ever."""
    model, tokenizer = embedded
    dialogue = Dialogue(model, tokenizer, lambda: make_prompt_cache(model, 64))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts.after_this_step() as interrupted:
            for _ in dialogue.reply("It was a cold day.", 50):
                signal.raise_signal(signal.SIGINT)
                if interrupted():
                    break
        assert dialogue.cache[0].arrays()  # it is at rest
        with pytest.raises(KeyboardInterrupt), interrupts.after_this_step():
            [signal.raise_signal(signal.SIGINT) for _ in range(2)]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_what_is_new_is_read_and_nothing_is_said_twice(embedded):
    model, tokenizer = embedded
    dialogue = Dialogue(model, tokenizer, lambda: make_prompt_cache(model, 128))
    for text in ("It was a cold day.", " The wind blew.", " They stayed inside."):
        before = len(dialogue.tokens)
        said = [r.token for r in dialogue.reply(text, 6)]
        assert len(said) == 6
        assert dialogue.status()["tokens"] == len(dialogue.tokens) == dialogue.cache[0].offset
        told = tokenizer.encode(text, add_special_tokens=not before)
        whole = dialogue.tokens + dialogue._pending
        assert whole[before:][-6 - len(told) :] == [*told, *said]
    # A reader may leave; the conversation goes on from what was said.
    replies = dialogue.reply(" And then", 50)
    next(replies)
    replies.close()
    assert len(dialogue.tokens) == dialogue.cache[0].offset
    list(dialogue.reply(" it rained.", 4))
    assert dialogue.cache[0].offset == len(dialogue.tokens)
    assert len(dialogue.retention()) == len(dialogue.tokens)
    assert max(share for _, share in dialogue.retention()) == 1


def test_what_is_kept_is_told_in_words(embedded, monkeypatch):
    """Without the template's tokens; a word of several tokens is one word."""
    model, _ = embedded
    _, tokenizer = mlx_h2o.load("builtin:recall-4m")
    marks = ["<|im_start|>", "<|im_end|>"]
    dialogue = Dialogue(model, tokenizer, lambda: make_prompt_cache(model, 96))
    list(dialogue.reply("Aristotle lived in Stagira.", 1))
    dialogue.tokens = dialogue.tokens[: dialogue.cache[0].offset]
    assert "Aristotle" in [word.strip() for word, _ in dialogue.words()]
    assert len(dialogue.retention()) > len(dialogue.words())
    begin, end = marks
    texts = [begin, "user", "\n", "Hel", "lo", end, "\n", begin, "ass", "istant", "\n", "Hi"]
    shares = [1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1]
    dialogue.tokens = [0 if text in marks else 9 for text in texts]
    monkeypatch.setattr("mlx_h2o.chat.dialogue.special_ids", lambda _: {0})
    monkeypatch.setattr(dialogue, "retention", lambda: list(zip(texts, shares, strict=True)))
    told = dialogue.words()
    assert "".join(word for word, _ in told) == "user: Hello\nassistant: Hi"
    assert told[1] == ("Hello", 0.6)


def test_pins_and_files_of_a_dialogue(embedded, tmp_path):
    model, tokenizer = embedded

    def fresh():
        rules = PinRules(patterns=("secret",))
        return Dialogue(model, tokenizer, lambda: make_prompt_cache(model, 96), rules=rules)

    dialogue = fresh()
    list(dialogue.reply("The secret number of Ada is 4711. It rained.", 4))
    assert ["4711" in text for text in dialogue.pinned_texts] == [True]
    with pytest.raises(ValueError, match="not"):
        dialogue.pin("nothing of the kind")
    path = tmp_path / "d.safetensors"
    with pytest.raises(ValueError, match="nothing to save yet"):
        fresh().save(path, "m")
    dialogue.save(path, "m")
    other = fresh()
    tiny = tiny_model("llama")
    foreign = Dialogue(tiny, tokenizer, lambda: make_prompt_cache(tiny, 64))
    for name, model_there in (("n", "m"), ("m", "another model of the name m")):
        with pytest.raises(ValueError, match=f"saved with {model_there}, whose weights"):
            foreign.load(path, name)
    other.load(path, "the same model at another place")
    assert other.pinned_texts == dialogue.pinned_texts
    texts = [[r.token for r in d.reply(" And so", 8)] for d in (dialogue, other)]
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="chat template"):
        Dialogue(model, tokenizer, list, system="Be brief.")
