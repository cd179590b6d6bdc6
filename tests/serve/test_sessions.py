"""Saved conversations: their files, how they are pruned and removed, and how texts find them."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.serve.conversations import Conversations
from mlx_h2o.serve.marks import Mark, mark
from mlx_h2o.serve.sessions import (
    DAY,
    Note,
    Sessions,
    conversations_in,
    key_of,
    locked,
    token_count,
    tokens_of,
)
from mlx_h2o.serve.ticket import Place
from mlx_h2o.serve.transcripts import Transcripts
from mlx_h2o.serve.turn_text import TurnText, segments_of
from serving import MODEL, words
from tiny_models import prompt_tokens, tiny_model

OWN = Mark("a", ((2, 5),))


# -- the folder -----------------------------------------------------------------------------------


def note(sessions: Sessions, tokens: list[int], text: str = "hello", own: Mark = OWN) -> Path:
    sessions.note(own, key_of(tokens), [text], "how it began", "cmpl-1")
    return sessions.path_of(own, key_of(tokens)).with_suffix(".json")


def test_a_turn_is_on_disk_whole_before_it_is_told(tmp_path, monkeypatch):
    synced: list[Path] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    path = note(Sessions(tmp_path, "m"), [1, 2, 3], "what 🙂 was said \ud800")
    assert synced[-1] == tmp_path
    assert synced[0].parent == tmp_path
    again = Sessions(tmp_path, "m")
    assert again.notes == [
        Note("m", OWN, key_of([1, 2, 3]), ("what 🙂 was said \ud800",), "how it began", "cmpl-1")
    ]
    assert [(s.mark, s.key, s.cached) for s in again.saved.values()] == [
        (OWN, key_of([1, 2, 3]), False)
    ]
    assert Sessions(tmp_path, "another").saved == {}
    told = json.loads(path.read_text())
    for damage in (
        {"tokens": [10**400]},
        {"tokens": "x"},
        {"pins": [[3, 1]]},
        {"version": 2},
        {"texts": 3},
    ):
        path.write_text(json.dumps(told | damage))
        assert Sessions(tmp_path, "m").saved == {}
    path.write_text("[" * 100_000)
    assert Sessions(tmp_path, "m").saved == {}


def test_earlier_turns_go_once_the_later_one_has_what_they_had(tmp_path):
    """Caches of an earlier turn stay until the later turn's are there: they are gone on from."""
    model, tokens = tiny_model("llama"), prompt_tokens(60)
    conversations = Conversations(sessions=Sessions(tmp_path, "m"))
    sessions = conversations.sessions
    assert sessions is not None

    def keep(count: int) -> Place:
        cache = mlx_h2o.make_prompt_cache(model, 40)
        mark(cache, Mark("a"))
        model(mx.array([tokens[:count]]), cache=cache)
        place = Place(Mark("a"), key_of(tokens[:count]))
        conversations._keep(place.key, cache, "user", None)
        sessions.note(place.mark, place.key, ["x" * count], "", "")
        conversations.noted(place, told=True)
        return place

    def files() -> list[str]:
        return sorted(path.suffix for path in tmp_path.iterdir())

    keep(20)
    assert files() == [".json"]
    assert conversations.save_one()
    assert not conversations.save_one()
    assert files() == [".json", ".safetensors"]
    keep(40)
    keep(45)
    keep(50)
    assert files() == [".json"] * 3 + [".safetensors"]
    assert len(Sessions(tmp_path, "m").without_caches()) == 2
    assert sessions.longest_before(Mark("a"), key_of(tokens)).key == key_of(tokens[:20])
    conversations.make_room(0)  # which writes what is not written yet
    assert files() == [".json", ".safetensors"]
    assert sessions.longest_before(Mark("a"), key_of(tokens)).key == key_of(tokens[:50])


def test_the_turn_before_stays_until_the_client_was_told_of_the_next(tmp_path):
    """kill -9 between a turn's note and its client's hearing of it: it goes on from the one before.

    So it is after a start too, when the caches of both are computed.
    """
    model, tokens = tiny_model("llama"), prompt_tokens(60)
    counts = [20, 30, 40, 50]
    sessions = Sessions(tmp_path, "m")

    def keep(count: int) -> None:
        sessions.note(Mark("a"), key_of(tokens[:count]), ["x" * count], "", "")

    def known() -> list[int]:
        return sorted(token_count(saved.key) for saved in sessions.saved.values())

    for count in counts:
        keep(count)
    assert known() == counts[-2:]
    # The server was killed, and is started again.
    sessions = Sessions(tmp_path, "m")
    assert known() == counts[-2:]
    conversations = Conversations(sessions=sessions)
    for saved in sessions.without_caches():
        cache = mlx_h2o.make_prompt_cache(model, 64)
        mark(cache, saved.mark)
        model(mx.array([tokens_of(saved.key)]), cache=cache)
        conversations.insert_cache(None, tokens_of(saved.key), cache)
    assert known() == counts[-2:]
    assert sessions.without_caches() == []
    before = sessions.longest_before(Mark("a"), key_of([*tokens[:40], 7, 8, 9]))
    assert before is not None
    assert token_count(before.key) == 40
    # The client goes on from the later one, and is told: all before it can go.
    keep(60)
    assert known() == [40, 50, 60]
    sessions.save(Mark("a"), key_of(tokens), cache)
    assert known() == [60]


def test_a_note_keeps_its_texts_when_a_later_turn_goes_on_from_it_without_any(tmp_path):
    """A template that leaves thoughts out has the next turn go on from an earlier place."""
    sessions = Sessions(tmp_path, "m")
    sessions.note(Mark("a"), key_of([1, 2]), ["said"], "", "first")
    sessions.note(Mark("a"), key_of([1, 2]), [], "", "second")
    assert [note.texts for note in Sessions(tmp_path, "m").notes] == [("said",)]


def test_the_oldest_go_when_the_folder_is_full_or_they_are_too_old(tmp_path, caplog):
    sessions = Sessions(tmp_path, "m")
    paths = [note(sessions, [i, 2, 3], "x" * 1000) for i in range(5)]
    (tmp_path / "notes.txt").write_text("not ours")
    for i, path in enumerate(paths):
        os.utime(path, (time.time() - (10 - i) * DAY,) * 2)
    caplog.set_level(logging.WARNING)
    Sessions(tmp_path, "m", most_days=8.5)
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert "older than 8.5 days" in caplog.text
    size = paths[-1].stat().st_size
    full = Sessions(tmp_path, "m", most_bytes=3 * size + size // 2)
    newest = note(full, [9, 2, 3], "x" * 1000)
    assert [path.exists() for path in (*paths[2:], newest)] == [False, True, True, True]
    assert len(full.saved) == 3
    assert paths[2].stem in caplog.text
    assert (tmp_path / "notes.txt").exists()


# -- the command ----------------------------------------------------------------------------------


def test_the_command_lists_shows_and_removes(tmp_path, capsys):
    sessions = Sessions(tmp_path, "m")
    paths = [note(sessions, [i, 2, 3], f"said {i}") for i in range(3)]
    os.utime(paths[0], (time.time() - 40 * DAY,) * 2)
    paths[2].write_text("{}")

    def told(*options: str) -> Any:
        assert main(["sessions", *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    listed = told("list", str(tmp_path))
    assert {one["name"] for one in listed} == {path.stem for path in paths}
    assert sum(one["damaged"] for one in listed) == 1
    shown = told("show", str(tmp_path), paths[1].stem[:12])
    assert (shown["texts"], shown["token_ids"]) == (["said 1"], [1, 2, 3])
    assert (shown["pins"], shown["title"], shown["caches"]) == ([[2, 5]], "how it began", False)
    assert main(["sessions", "list", str(tmp_path)]) == 0
    assert paths[1].stem[:8] in (out := capsys.readouterr().out)
    assert "bytes" in out
    assert main(["sessions", "show", str(tmp_path), paths[1].stem]) == 0
    assert "said 1" in capsys.readouterr().out
    assert main(["sessions", "remove", str(tmp_path), "nobody"]) == 2
    assert "No conversation has a name that begins with 'nobody'" in capsys.readouterr().err
    assert main(["sessions", "remove", str(tmp_path), ""]) == 2
    assert "More than one" not in capsys.readouterr().err
    removed = told("remove", str(tmp_path), "--older-than", "30")
    assert removed["removed"] == [paths[0].stem]
    with sessions.held():
        assert main(["sessions", "remove", str(tmp_path), "--all"]) == 2
        assert "A server uses" in capsys.readouterr().err
        assert len(conversations_in(tmp_path)) == 2
    with locked(tmp_path, fcntl.LOCK_EX):
        pass
    assert main(["sessions", "remove", str(tmp_path), "--all"]) == 0
    assert "removed 2 conversations" in capsys.readouterr().out
    assert conversations_in(tmp_path) == []
    assert main(["sessions", "list", str(tmp_path / "none")]) == 2
    assert main(["serve", "--sessions-memory", "2GB"]) == 2
    assert "--sessions-memory is about the folder of --sessions" in capsys.readouterr().err


def test_what_a_killed_server_had_begun_to_write_goes(tmp_path):
    sessions = Sessions(tmp_path, "m")
    path = note(sessions, [1])
    begun, other = tmp_path / f".{path.name}.123", tmp_path / ".keep.me.123"
    for file in (begun, other):
        file.write_text("")
    with sessions.held():
        assert not begun.exists()
        assert other.exists()
        assert path.exists()


# -- texts ----------------------------------------------------------------------------------------


def test_the_longest_text_that_a_prompt_begins_with_is_found():
    transcripts = Transcripts(most_bytes=800)
    keys = [key_of(range(i, i + 10)) for i in range(12)]
    for text, key in zip(("ab", "abc", "abc", "", "abd", "abcdef"), keys, strict=False):
        transcripts.add(text, key)
    assert transcripts.spellings("abcde") == [
        (3, keys[2]),
        (3, keys[1]),
        (2, keys[0]),
        (0, keys[3]),
    ]
    assert transcripts.spellings("🙂") == [(0, keys[3])]
    for i in range(6, 12):
        transcripts.add(f"later {i}", keys[i])
    # Ten of 80 bytes each are remembered.
    assert transcripts.spellings("abcde") == [(3, keys[2]), (0, keys[3])]
    assert transcripts.spellings("later 11 and on")[0] == (8, keys[11])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return mlx_h2o.load(MODEL)[1]


def turn(tokenizer: Any, template: Callable[[list[dict[str, Any]]], str], *said: str) -> TurnText:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    text = template(messages)
    return TurnText(text, tokenizer.encode(text), messages, template, tokenizer)


def trimming(messages: list[dict[str, Any]]) -> str:
    return "".join(f"[{m['role']}] {m['content'].strip()}\n" for m in messages) + "[assistant]"


def thoughtless(messages: list[dict[str, Any]]) -> str:
    parts = (f"[{m['role']}]{m['content'].split('</think>')[-1]}\n" for m in messages)
    return "".join(parts) + "[assistant]<think>\n"


@pytest.mark.parametrize(
    "answer", [" Paris.", " Paris \n", "", "Paris 🙂", "[user]", " a [user] b"]
)
def test_templates_that_strip_an_answer_are_gone_on_with(tokenizer, answer):
    first = turn(tokenizer, trimming, words(0, 9))
    # As sampled: not as it would be tokenized.
    sampled = [token for c in answer for token in tokenizer.encode(c)]
    tokens = [*first.tokens, *sampled]
    texts, goes_on = first.continued(tokens, first.told(tokens))
    assert goes_on
    following = turn(tokenizer, trimming, words(0, 9), first.told(tokens), "And then?")
    text = max((text for text in texts if following.text.startswith(text)), key=len)
    spelled = following.goes_on_from(len(text), tokens)
    assert spelled[: len(tokens)] == tokens
    assert tokenizer.decode(spelled[len(tokens) :]) == following.text[len(text) :]


def test_thoughts_that_a_template_leaves_out_are_not_gone_on_with(tokenizer):
    first = turn(tokenizer, thoughtless, words(0, 9))
    tokens = [*first.tokens, *tokenizer.encode(" hm</think>Paris.")]
    texts, goes_on = first.continued(tokens, "Paris.")
    assert not goes_on
    following = turn(tokenizer, thoughtless, words(0, 9), "Paris.", "And then?")
    assert not any(following.text.startswith(text) for text in texts)


def test_a_template_that_refuses_a_turn_is_no_error(tokenizer):
    def strict(messages: list[dict[str, Any]]) -> str:
        if len(messages) > 1:
            raise ValueError("one message only")
        return messages[0]["content"]

    first = turn(tokenizer, strict, "hello")
    assert first.continued([*first.tokens, 5], "x")[1] is False


def test_half_a_character_is_a_replacement_for_the_client_and_itself_for_the_caches(tokenizer):
    """Tokens that are no whole UTF-8: a client sends back U+FFFD, which is another token."""
    half = tokenizer.encode("🙂")[:-1]
    text = words(0, 9)
    said = TurnText(text, tokenizer.encode(text), [], str, tokenizer)
    tokens = [*said.tokens, *half]
    told = said.told(tokens)
    assert told.endswith("\ufffd")
    texts, _ = said.continued(tokens, told)
    assert text + told in texts


@pytest.mark.parametrize("stops", [(), (" Anne",)])
def test_a_character_that_an_end_of_text_cuts_is_not_told(tokenizer, stops):
    """A client is not told of it, so what it sends back has no U+FFFD there."""
    text, half = words(0, 9), tokenizer.encode("🙂")[:-1]
    said = TurnText(text, tokenizer.encode(text), [], str, tokenizer, stops)
    answer = [*tokenizer.encode(" Paris"), *half]
    tokens = [*said.tokens, *answer, next(iter(tokenizer.eos_token_ids))]
    # Where they can, the caches leave the end of text out.
    for held in (tokens, tokens[: -said.beyond(tokens)]):
        texts, _ = said.continued(held, " Paris", cut=True)
        assert text + " Paris" in texts
        assert not any("\ufffd" in one for one in texts)


def test_segments_keep_the_borders_that_are_still_there():
    before = list(range(12))
    segments, kinds = [before[:3], before[3:10], before[10:]], ["system", "user", "assistant"]
    now = [0, 1, 2, 3, 90, 91, 92, 8, 9, 10, 11]
    assert segments_of(before, segments, kinds, now) == (
        [[0, 1, 2], [3, 90, 91, 92, 8, 9], [10, 11]],
        kinds,
    )
    assert segments_of(before, segments, kinds, [7, 8, 9]) == ([[7, 8, 9]], ["assistant"])
    assert segments_of(before, [before], ["user"], [7]) == ([[7]], ["user"])


def test_what_follows_is_tokenized_as_in_the_whole_prompt():
    """A tokenizer that begins every text with a space would put one into the middle."""

    class Spaced:
        eos_token_ids = ()

        def __call__(self, text: str, **_: Any) -> dict[str, Any]:
            starts = [i for i, c in enumerate(text) if c == " " or not i]
            return {
                "input_ids": [len(text[s:].split(" ")[0]) or 1 for s in starts],
                "offset_mapping": [(s, s + 1) for s in starts],
            }

        def encode(self, text: str, **_: Any) -> list[int]:
            return [-1, *self(text)["input_ids"]]

    inner = Spaced()
    tokenizer = SimpleNamespace(_tokenizer=inner, encode=inner.encode, eos_token_ids=())
    said = TurnText("ab cd ef", inner("ab cd ef")["input_ids"], [], str, tokenizer)
    assert said.goes_on_from(5, [77]) == [77, *said.tokens[-1:]]
    assert said.goes_on_from(4, [77])[:2] == [77, -1]
    assert said.goes_on_from(8, [77]) == [77]
