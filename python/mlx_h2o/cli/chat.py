"""`mlx_h2o chat`: chat with a model in bounded memory."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_h2o._files import cache_folder, require_writable
from mlx_h2o._progress import progress_bar
from mlx_h2o.chat.dialogue import Dialogue
from mlx_h2o.cli import interrupts
from mlx_h2o.cli.chat_lines import line_reader
from mlx_h2o.cli.options import (
    add_cache_options,
    add_model_option,
    add_reading_option,
    cache_settings,
    load_model,
    typed,
)
from mlx_h2o.cli.pin_options import add_pin_options, pin_rules
from mlx_h2o.cli.sampling import add_sampling_options, sampler_of
from mlx_h2o.layer.pins_and_turns import PinAnswer, checked_carry
from mlx_h2o.models.make import bounded_caches
from mlx_h2o.slots.pins import Span

PROMPT = "> "
# Tokens that at least this share of the heads holds are shown as remembered.
REMEMBERED = 0.5
DIM, PLAIN = "\033[2m", "\033[0m"
HELP = """\
/pin TEXT    never forget this text of the conversation (without TEXT: your last message)
/pins        list the pins
/unpin       remove all pins
/kept        the conversation; tokens that most KV heads have evicted are dim, or [in brackets]
/turn CARRY  how much of the past counts from here on: 0 (or reset) to 1
/save FILE   write the conversation's memory
/load FILE   go on with a conversation that was saved
/clear       begin a new conversation
/quit        or an end of file; Ctrl-C twice saves the conversation first"""


def add_parser(commands: Any) -> None:
    """Add `chat` to the command's subparsers."""
    parser = commands.add_parser(
        "chat",
        help="chat with a model within bounded memory",
        description="Chat with a model whose memory is bounded; /help lists the commands.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_option(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="the system prompt")
    add_sampling_options(parser, max_tokens=256)
    parser.add_argument(
        "--carry", type=typed(checked_carry, "a number from 0 to 1, or reset"), default=1.0,
        metavar="PART", help="how much of the past counts in each new turn (default: all of it)",
    )  # fmt: skip
    parser.add_argument(
        "--load", metavar="FILE", type=Path, help="go on with a conversation that was saved"
    )
    add_cache_options(parser)
    add_reading_option(parser)
    add_pin_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Chat until the user ends it."""
    rules, settings, sampler = pin_rules(args), cache_settings(args), sampler_of(args)
    model, tokenizer = load_model(args)
    dialogue = Dialogue(
        model,
        tokenizer,
        lambda: bounded_caches(model, settings),
        args.system_prompt,
        rules,
        args.carry,
        args.reading,
    )
    if args.load is not None:
        dialogue.load(args.load, args.model)
    print(f"{args.model}; {dialogue.memory}; /help lists the commands.", flush=True)
    talk = Talk(dialogue, args, sampler)
    try:
        talk.go_on()
    except KeyboardInterrupt:
        talk.keep()
        raise


class Talk:
    """The user's lines, and the replies to them.

    Args:
        dialogue: The conversation.
        args: The command's options.
        sampler: Chooses tokens from logits.
    """

    def __init__(
        self, dialogue: Dialogue, args: argparse.Namespace, sampler: Callable[[mx.array], mx.array]
    ):
        self._dialogue, self._args, self._sampler = dialogue, args, sampler
        self._last, self._is_long, self._interrupted = "", False, False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: print(HELP),
            "pin": self._pin,
            "pins": self._pins,
            "unpin": self._unpin,
            "kept": self._show_kept,
            "turn": self._turn,
            "save": self._save,
            "load": self._load,
            "clear": self._clear,
        }

    def go_on(self) -> None:
        """Read messages until an end of file, /quit, or Ctrl-C twice."""
        read = line_reader(PROMPT)
        while True:
            try:
                line = read().strip()
            except EOFError:
                print()
                return
            except interrupts.Terminated:
                raise
            except KeyboardInterrupt:
                if self._interrupted:
                    raise
                self._interrupted = True
                print("\n[Ctrl-C again saves the conversation and ends the chat]", flush=True)
                continue
            self._interrupted = False
            if line == "/quit":
                return
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._say(line)
            except (ValueError, OSError) as error:
                print(error)
            sys.stdout.flush()

    def keep(self) -> None:
        """Save the conversation in the user's cache folder, and print what goes on with it."""
        if not self._dialogue.tokens:
            return
        folder = cache_folder() / "conversations"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / time.strftime("%Y-%m-%d-%H%M%S.safetensors")
        try:
            self._dialogue.save(file, self._args.model)
        except (ValueError, OSError, RuntimeError) as error:
            print(f"\nThe conversation could not be saved: {error}")
            return
        command = shlex.join(["mlx_h2o", "chat", "--model", self._args.model, "--load", str(file)])
        print(f"\nThe conversation is saved. To go on: {command}", flush=True)

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        if name not in self._commands:
            raise ValueError(f"There is no /{name}; /help lists what there is.")
        self._commands[name](rest.strip())

    def _say(self, line: str) -> None:
        """Take one turn; Ctrl-C ends the reply, and the conversation goes on."""
        self._last = line
        speed = 0.0
        bar = ExitStack()
        replies = self._dialogue.reply(
            line,
            self._args.max_tokens,
            bar.enter_context(progress_bar("reading", "tokens", transient=True)),
            sampler=self._sampler,
        )
        try:
            with bar, interrupts.after_this_step() as interrupted:
                for response in replies:
                    bar.close()
                    print(response.text, end="", flush=True)
                    speed = response.generation_tps
                    self._interrupted = interrupted()
                    if self._interrupted:
                        print(" ...", end="")
                        break
        finally:
            replies.close()
        print()
        print(self._status(speed))
        warning = self._dialogue.past_training()
        if warning is not None and not self._is_long:
            print(f"[{warning}]")
        self._is_long = warning is not None

    def _status(self, speed: float) -> str:
        now = self._dialogue.status()
        evicted = f"{now['evicted']:,} of {now['tokens']:,} tokens evicted"
        return f"[{self._dialogue.memory}; {evicted}, {now['pinned']} pinned, {speed:.1f} tokens/s]"

    def _pin(self, text: str) -> None:
        answer = self._dialogue.pin(text or self._last)
        print(_in_words(answer))

    def _pins(self, _: str) -> None:
        texts = self._dialogue.pinned_texts
        print("\n".join(repr(text) for text in texts) or "Nothing is pinned.")

    def _unpin(self, _: str) -> None:
        count = len(self._dialogue.pinned_texts)
        self._dialogue.unpin()
        print(f"unpinned {count}" if count else "Nothing is pinned.")

    def _turn(self, carry: str) -> None:
        if not carry:
            raise ValueError("How much of the past? /turn CARRY, from 0 (or reset) to 1.")
        self._dialogue.begin_turn(carry)
        print(f"from here on {checked_carry(carry):.0%} of the past counts")

    def _clear(self, _: str) -> None:
        self._dialogue.clear()
        self._last = ""
        print("cleared")

    def _show_kept(self, _: str) -> None:
        marks = (DIM, PLAIN) if sys.stdout.isatty() else ("[", "]")
        out, lost = "", False
        for text, share in self._dialogue.words():
            if (share < REMEMBERED) != lost:
                lost = not lost
                out += marks[not lost]
            out += text
        print((out + marks[1] * lost) or "Nothing was said yet.")

    def _save(self, path: str) -> None:
        file = _path(path)
        require_writable("/save", file)
        self._dialogue.save(file, self._args.model)
        print(f"saved {len(self._dialogue.tokens):,} tokens in {path}")

    def _load(self, path: str) -> None:
        file = _path(path)
        if not file.is_file():
            raise ValueError(f"There is no file {path}.")
        self._dialogue.load(file, self._args.model)
        print(f"read {len(self._dialogue.tokens):,} tokens")


def _path(text: str) -> Path:
    """A file name as the user typed it."""
    if not text:
        raise ValueError("Which file? /save FILE, /load FILE.")
    return Path(text).expanduser()


def _in_words(answer: PinAnswer) -> str:
    """The result of a pin, in words."""
    parts = []
    for spans, words in (
        (answer.pinned, "pinned"),
        (answer.partly, "pinned where they are still held"),
        (answer.gone, "forgotten already"),
    ):
        if count := _count(spans):
            parts.append(f"{count} tokens {words}")
    return ", ".join(parts)


def _count(spans: tuple[Span, ...]) -> int:
    return sum(end - first for first, end in spans)
