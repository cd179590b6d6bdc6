"""Saved conversations: their files, how they are pruned and removed, and how texts find them."""

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.loading.fingerprint import fingerprint
from mlx_h2o.serve.answer import AnswerText
from mlx_h2o.serve.keys import Mark, Place, key_of
from mlx_h2o.serve.pins import NO_PINS
from mlx_h2o.serve.prompt import Prompt
from mlx_h2o.serve.protocol import Chat, Completion
from mlx_h2o.serve.request import Request
from mlx_h2o.serve.sessions import (
    DAY,
    Limits,
    Note,
    Sessions,
    Turn,
    conversations_in,
    in_use,
    locked,
)
from serving import MODEL, serving, words
from tiny_models import tiny_model

OWN = Mark("a", ((2, 5),), "f")


# -- the folder -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def save(sessions: Sessions, model: Any, tokens: list[int], text: str = "hello") -> Path:
    cache = mlx_h2o.make_prompt_cache(model, 40)
    model(mx.array([tokens]), cache=cache)
    turn = Turn("cmpl-1", "how it began", ((text, len(tokens)),), ({"role": "user"},))
    return sessions.save(Place(OWN, key_of(tokens)), cache, turn)


def folder_of(path: Path, **limits: Any) -> Sessions:
    sessions = Sessions(path, Limits(**limits))
    sessions.add_model("m", "f")
    return sessions


def test_a_conversation_is_one_file(tmp_path, model):
    sessions = folder_of(tmp_path)
    path = save(sessions, model, [1, 2, 3], "what 🙂 was said \ud800")
    assert list(tmp_path.iterdir()) == [path]
    turn = Turn("cmpl-1", "how it began", (("what 🙂 was said \ud800", 3),), ({"role": "user"},))
    note = Note("m", Place(OWN, key_of([1, 2, 3])), turn)
    again = folder_of(tmp_path)
    assert again.notes == {path: note}
    cache = again.load(path)
    assert cache is not None
    assert cache[0].offset == 3
    path.write_bytes(path.read_bytes()[:-5])
    assert folder_of(tmp_path).load(path) is None


def test_files_of_another_model_of_the_same_name_are_left_aside(tmp_path, model, caplog):
    save(folder_of(tmp_path), model, [1, 2, 3])
    assert Sessions(tmp_path, Limits()).add_model("m", "g") == []
    assert "other weights" in caplog.text


def test_a_fingerprint_tells_weights_configurations_and_tokenizers_apart(model):
    tokenizer = mlx_h2o.load(MODEL)[1]
    prints = {
        fingerprint(model),
        fingerprint(model, tokenizer),
        fingerprint(tiny_model("llama", seed=1)),
        fingerprint(tiny_model("llama", rope_theta=5000.0)),
        fingerprint(tiny_model("llama", hidden_size=64)),
    }
    assert len(prints) == 5
    assert fingerprint(tiny_model("llama")) == fingerprint(model)


def test_the_oldest_go_when_the_folder_is_full_or_they_are_too_old(tmp_path, model, caplog):
    sessions = folder_of(tmp_path)
    paths = [save(sessions, model, [i, 2, 3], "x" * 1000) for i in range(5)]
    (tmp_path / "notes.txt").write_text("not ours")
    for i, path in enumerate(paths):
        os.utime(path, (time.time() - (10 - i) * DAY,) * 2)
    caplog.set_level(logging.WARNING)
    folder_of(tmp_path, days=8.5)
    assert [path.exists() for path in paths] == [False, False, True, True, True]
    assert "older than 8.5 days" in caplog.text
    size = paths[-1].stat().st_size
    full = folder_of(tmp_path, nbytes=3 * size + size // 2)
    newest = save(full, model, [9, 2, 3], "x" * 1000)
    assert [path.exists() for path in (*paths[2:], newest)] == [False, True, True, True]
    assert len(full.notes) == 3
    assert paths[2].stem in caplog.text
    assert (tmp_path / "notes.txt").exists()


def test_what_a_killed_server_had_begun_to_write_goes(tmp_path, model):
    path = save(folder_of(tmp_path), model, [1])
    begun, other = tmp_path / f".{path.name}.123", tmp_path / ".keep.me.123"
    for file in (begun, other):
        file.write_text("")
    with in_use(tmp_path):
        assert not begun.exists()
        assert other.exists()
        assert path.exists()


# -- the command ----------------------------------------------------------------------------------


def test_the_command_lists_shows_and_removes(tmp_path, capsys, model):
    sessions = folder_of(tmp_path)
    paths = [save(sessions, model, [i, 2, 3], f"said {i}") for i in range(3)]
    os.utime(paths[0], (time.time() - 40 * DAY,) * 2)
    paths[2].write_text("{}")

    def output(*options: str) -> Any:
        assert main(["sessions", *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    listed = output("list", str(tmp_path))
    assert {one["name"] for one in listed} == {path.stem for path in paths}
    assert sum(one["damaged"] for one in listed) == 1
    shown = output("show", str(tmp_path), paths[1].stem[:12])
    assert (shown["texts"], shown["token_ids"]) == (["said 1"], [1, 2, 3])
    assert (shown["pins"], shown["title"]) == ([[2, 5]], "how it began")
    assert main(["sessions", "list", str(tmp_path)]) == 0
    assert paths[1].stem[:8] in (out := capsys.readouterr().out)
    assert "kB" in out
    assert main(["sessions", "show", str(tmp_path), paths[1].stem]) == 0
    assert "said 1" in capsys.readouterr().out
    assert main(["sessions", "remove", str(tmp_path), "nobody"]) == 2
    assert "No conversation has a name that begins with 'nobody'" in capsys.readouterr().err
    assert main(["sessions", "remove", str(tmp_path), ""]) == 2
    assert "More than one" not in capsys.readouterr().err
    removed = output("remove", str(tmp_path), "--older-than", "30")
    assert removed["removed"] == [paths[0].stem]
    with in_use(tmp_path):
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


def test_a_turn_is_forced_to_disk_before_its_answer_ends(tmp_path, monkeypatch):
    forced: list[Path] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        forced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with serving(sessions=tmp_path) as server:
        server.ask(words(0, 20))
        (file,) = tmp_path.glob("*.safetensors")
        assert forced == [file, tmp_path]


# -- texts ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return mlx_h2o.load(MODEL)[1]


def turn(tokenizer: Any, template: Callable[[list[dict[str, Any]]], str], *texts: str) -> Prompt:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    text = template(messages)
    return Prompt(text, tokenizer.encode(text), messages, template, tokenizer)


def answer_to(prompt: Prompt, tokens: list[int], reason: str = "stop", **body: Any) -> AnswerText:
    if prompt.messages:
        request: Any = Chat.model_validate({"messages": prompt.messages, **body})
    else:
        request = Completion.model_validate({"prompt": prompt.text, **body})
    answer = AnswerText(
        prompt.tokenizer, Request(request, MODEL, "", {}, NO_PINS, [0]), prompt.tokens, "normal"
    )
    for token in tokens:
        answer.add(token, None)
        if answer.stops:
            break
    answer.finish(reason)
    return answer


def trimming(messages: list[dict[str, Any]]) -> str:
    return "".join(f"[{m['role']}] {m['content'].strip()}\n" for m in messages) + "[assistant]"


def keeping(messages: list[dict[str, Any]]) -> str:
    return "".join(f"[{m['role']}]{m['content']}\n" for m in messages) + "[assistant]"


def thoughtless(messages: list[dict[str, Any]]) -> str:
    parts = (f"[{m['role']}]{m['content'].split('</think>')[-1]}\n" for m in messages)
    return "".join(parts) + "[assistant]<think>\n"


@pytest.mark.parametrize("template", [trimming, keeping])
@pytest.mark.parametrize(
    "answer", [" Paris.", "  Paris", " Paris \n", "", "Paris 🙂", "[user]", " a [user] b"]
)
def test_spaces_around_an_answer_do_not_hide_it(tokenizer, template, answer):
    """Its client gets it without the first one, and a template strips it or not."""
    first = turn(tokenizer, template, words(0, 9))
    # As sampled: not as it would be tokenized.
    sampled = [token for c in answer for token in tokenizer.encode(c)]
    given = answer_to(first, sampled)
    texts = first.continuations(given, ends=False)
    following = turn(tokenizer, template, words(0, 9), given.content, "And then?")
    text, count = max(one for one in texts if following.text.startswith(one[0]))
    assert count == len(sampled)
    spelled = following.spelled_from(len(text), [*first.tokens, *sampled])
    if spelled is not None:  # else no token of the whole prompt begins there
        assert spelled[: len(first.tokens) + count] == [*first.tokens, *sampled]
        assert tokenizer.decode(spelled[len(first.tokens) + count :]) == following.text[len(text) :]


def test_an_end_token_is_never_counted_for_a_text_without_it(tokenizer):
    """Otherwise the same question again would go on after it."""
    first = turn(tokenizer, trimming, "hello")
    assert first.continuations(answer_to(first, []), ends=True) == [(first.text, 0)] or all(
        count == 0 for _, count in first.continuations(answer_to(first, []), ends=True)
    )


def test_thoughts_that_a_template_leaves_out_are_not_gone_on_with(tokenizer):
    first = turn(tokenizer, thoughtless, words(0, 9))
    given = answer_to(first, tokenizer.encode(" hm</think>Paris."))
    assert first.continuations(given, ends=False) == []


def test_a_template_that_refuses_a_turn_is_no_error(tokenizer):
    def strict(messages: list[dict[str, Any]]) -> str:
        if len(messages) > 1:
            raise ValueError("one message only")
        return messages[0]["content"]

    first = turn(tokenizer, strict, "hello")
    assert first.continuations(answer_to(first, [5]), ends=False) == []


def test_half_a_character_is_not_part_of_a_text_that_is_gone_on_with(tokenizer):
    """A client sends back U+FFFD, which is another token."""
    text, half = words(0, 9), tokenizer.encode("🙂")[:-1]
    prompt = Prompt(text, tokenizer.encode(text), [], str, tokenizer)
    answer = answer_to(prompt, [*tokenizer.encode(" Paris"), *half], "length")
    assert answer.text.endswith("\ufffd")
    whole = len(tokenizer.encode(" Paris"))
    assert prompt.continuations(answer, ends=False) == [(text + " Paris", whole)]


def test_a_stop_text_cuts_at_the_last_token_before_it(tokenizer):
    text = words(0, 9)
    prompt = Prompt(text, tokenizer.encode(text), [], str, tokenizer)
    answer = answer_to(prompt, tokenizer.encode(" Paris is large."), stop="ris")
    ((beginning, count),) = prompt.continuations(answer, ends=False)
    assert (text + " Paris is").startswith(beginning)
    assert answer.text[: answer.visible] == " Pa"
    assert tokenizer.decode(tokenizer.encode(" Paris is large.")[:count]) == beginning[len(text) :]
