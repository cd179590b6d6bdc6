"""`mlx_h2o sessions`: list, show or remove the conversations that a server has saved."""

from __future__ import annotations

import argparse
import fcntl
import json
import time
from pathlib import Path
from typing import Any

from mlx_h2o._byte_size import size_text
from mlx_h2o.cli.options import typed
from mlx_h2o.cli.tables import show as show_table
from mlx_h2o.evaluate.report import Table
from mlx_h2o.serve.keys import token_count, tokens_of
from mlx_h2o.serve.sessions import DAY, Note, SavedConversation, conversations_in, locked

#: Characters of a name in a list; more if they are needed to tell names apart.
SHORT_NAME = 8


def add_parser(commands: Any) -> None:
    """Add `sessions` to the command's subparsers."""
    parser = commands.add_parser(
        "sessions",
        help="list, show or remove conversations that a server saved",
        description="What `mlx_h2o serve --sessions DIR` has saved, of every model. Nothing is "
        "removed while a server uses the folder.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, text in (
        ("list", list_all, "all conversations of a folder, the newest first"),
        ("show", show_one, "one conversation: what it says, how long it is, what it pins"),
        ("remove", remove, "remove conversations; what they said is lost then"),
    ):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        action.add_argument("folder", type=Path, metavar="DIR", help="the folder of --sessions")
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "show":
            action.add_argument("name", help="a conversation's name, or how it begins")
        if name == "remove":
            which = action.add_mutually_exclusive_group(required=True)
            which.add_argument(
                "names", nargs="*", default=[], metavar="NAME", help="names, or how they begin"
            )
            which.add_argument(
                "--older-than", type=typed(days, "a number of days such as 30"), metavar="DAYS",
                help="all without a new turn for so many days",
            )  # fmt: skip
            which.add_argument("--all", action="store_true", help="all of the folder")
        action.set_defaults(run=run)


def days(text: str) -> float:
    """A number of days.

    Raises:
        ValueError: The text is no number, or not above 0.
    """
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def list_all(args: argparse.Namespace) -> None:
    """Print all conversations."""
    files = _newest_first(args.folder)
    if args.json:
        print(json.dumps([_fields(one, Note.read(one.path)) for one in files], indent=2))
        return
    columns = ("name", "last turn", "tokens", "size", "model", "began with")
    rows = [
        (
            _short(one, files),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.written)),
            f"{token_count(note.place.key):,}" if note else "?",
            size_text(one.size),
            note.model if note else "(damaged)",
            note.turn.title if note else "",
        )
        for one in files
        for note in [Note.read(one.path)]
    ]
    title = f"{args.folder}: {len(files)} conversations"
    in_all = f"{size_text(sum(one.size for one in files))} in all"
    show_table(Table(title, columns, rows, in_all, texts=(0, 1, 4, 5)))


def show_one(args: argparse.Namespace) -> None:
    """Print one conversation."""
    one = _with_name(args.name, _newest_first(args.folder))
    note = Note.read(one.path)
    texts = [text for text, _ in note.turn.texts] if note else []
    fields = _fields(one, note)
    if args.json:
        more = {"texts": texts, "token_ids": tokens_of(note.place.key)} if note else {}
        print(json.dumps(fields | more, indent=2))
        return
    fields["size"] = f"{size_text(one.size)} ({one.size:,} bytes)"
    width = max(map(len, fields))
    for name, value in fields.items():
        print(f"{name.replace('_', ' '):<{width}}  {value}")
    if texts:
        print(f"\n{texts[-1]}")


def remove(args: argparse.Namespace) -> None:
    """Remove conversations, unless a server uses their folder."""
    files = _newest_first(args.folder)
    if args.all:
        chosen = files
    elif args.older_than is not None:
        chosen = [one for one in files if time.time() - one.written > args.older_than * DAY]
    else:
        chosen = [_with_name(name, files) for name in dict.fromkeys(args.names)]
    try:
        with locked(args.folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for one in chosen:
                one.path.unlink(missing_ok=True)
    except BlockingIOError as error:
        raise ValueError(
            f"A server uses {args.folder}: end it first, or give it --sessions-memory or "
            "--sessions-days, so that it removes the oldest itself."
        ) from error
    size = sum(one.size for one in chosen)
    if args.json:
        print(json.dumps({"removed": [one.name for one in chosen], "bytes": size}))
    else:
        count = len(chosen)
        print(f"removed {count} conversation{'s' * (count != 1)}, {size_text(size)}")


def _fields(one: SavedConversation, note: Note | None) -> dict[str, Any]:
    """A conversation's entry in the list, as JSON types."""
    fields: dict[str, Any] = {
        "name": one.name,
        "bytes": one.size,
        "last_turn": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(one.written)),
        "damaged": note is None,
    }
    if note is not None:
        fields |= {
            "model": note.model,
            "tokens": token_count(note.place.key),
            "pins": [list(span) for span in note.place.mark.pins],
            "settings": note.place.mark.label,
            "title": note.turn.title,
            "answer": note.turn.name,
        }
    return fields


def _newest_first(folder: Path) -> list[SavedConversation]:
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}.")
    return sorted(conversations_in(folder), key=lambda one: one.written, reverse=True)


def _with_name(name: str, files: list[SavedConversation]) -> SavedConversation:
    """The conversation whose name begins with `name`."""
    fitting = [one for one in files if name and one.name.startswith(name)]
    if len(fitting) != 1:
        what = "More than one conversation has a name" if fitting else "No conversation has a name"
        raise ValueError(f"{what} that begins with {name!r}: see mlx_h2o sessions list.")
    return fitting[0]


def _short(one: SavedConversation, files: list[SavedConversation]) -> str:
    """The beginning of a name that no other name has."""
    for length in range(SHORT_NAME, len(one.name)):
        if sum(other.name.startswith(one.name[:length]) for other in files) == 1:
            return one.name[:length]
    return one.name
