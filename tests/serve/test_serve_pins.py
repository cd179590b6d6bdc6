"""Pins through the server: found in the prompt, kept through all that happens, refused with why."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import mlx_h2o
from mlx_h2o.chat.pin_rules import PinRules, spans_for
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.serve.memory import most_bytes
from mlx_h2o.serve.pins import PinRequest
from serving import MODEL, SIZE, Running, alone, exchange, serving, until, words
from tiny_models import kept_positions

# Alike in all layers: a profile gives some so few slots that a sentence is too many.
SETTINGS = {"max_size": SIZE, "budgets": "uniform"}
SYSTEM = "You are a clerk of the court. Answer in French."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(defaults=SETTINGS) as running:
        yield running


def pins(**wanted_pins: Any) -> dict[str, Any]:
    return {"mlx_h2o": {"pins": wanted_pins}}


def holds(cache: list[Any], *spans: tuple[int, int]) -> bool:
    wanted = {p for span in spans for p in range(*span)}
    return all(wanted <= set(head) for _, entry in entries(cache) for head in kept_positions(entry))


def newest(running: Running) -> Any:
    """The conversation that ended last."""
    until(lambda: running.scheduler.ledger.running == 0)
    time.sleep(0.05)  # it is kept after its last token is out
    return [one for one in running.scheduler.conversations.entries if one.kind == "turn"][-1]


# -- what is pinned -------------------------------------------------------------------------------


def test_sequences_of_one_batch_have_each_its_own_pins(server, embedded):
    """By text, by another, by tokens, and none; all get what each gets alone."""
    text = f"{words(0, 20)}. The Fee shall mean ten ducats. {words(20, 50)}"
    _, tokenizer = embedded
    tokens = tokenizer.encode(text)
    wanted_pins = [{"texts": ["ten ducats"]}, {"texts": ["shall mean"]}, {"spans": [[3, 9]]}, {}]
    rules = [PinRules(texts=("ten ducats",)), PinRules(texts=("shall mean",))]
    spans = [*(spans_for(rule, tokenizer, tokens) for rule in rules), ((3, 9),), ()]
    assert spans[0][0][0] > spans[1][0][0]
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda one: server.ask(text, 12, extra_body=pins(**one)), wanted_pins)
        assert list(answers) == [alone(embedded, text, 12, **SETTINGS, pins=each) for each in spans]
    until(lambda: len(server.scheduler.conversations) >= 4)
    caches = {idle.place.mark.pins: idle.cache for idle in server.scheduler.conversations.entries}
    assert all(holds(caches[each], *each) for each in spans)
    assert not holds(caches[()], *spans[0])  # which a policy alone forgets


def test_a_pinned_system_prompt_stays_through_a_long_chat(server):
    messages = [{"role": "developer", "content": SYSTEM}]
    for turn in range(3):
        messages.append({"role": "user", "content": words(90 * turn, 60)})
        answer = server.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=30, extra_body=pins(roles=["developer"])
        )
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert (cached > 0) == (turn > 0)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    last = newest(server)
    ((first, end),) = last.place.mark.pins
    assert first == 0
    assert end > 5
    assert last.cache[0].evicted > 100
    assert holds(last.cache, (first, end))


def test_what_the_server_pins_is_looked_for_and_need_not_be_there(embedded):
    usual = PinRequest(("system",), ("ducats",), spans=((3, 5), (900, 950)), required=False)
    with serving(pins=usual, defaults=SETTINGS) as running:
        assert running.ask("And Anne said to Toby that") is not None
        assert newest(running).place.mark.pins == ((3, 5),)
        running.ask("He had ten ducats, and Anne said")
        assert {p for span in newest(running).place.mark.pins for p in range(*span)} > {3, 4}
        running.ask("He had ten ducats, and Anne said", extra_body=pins())
        assert newest(running).place.mark.pins == ()
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who?"}]
        running.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
        assert newest(running).place.mark.pins[0][0] == 0


# -- what is gone on with -------------------------------------------------------------------------


def test_a_pinned_prefix_serves_the_same_pins_only(server):
    text = f"{words(200, 10)} ten ducats {words(210, 40)}"
    server.ask(text, 2, extra_body=pins(texts=["ten ducats"]))
    newest(server)

    def cached(wanted_pins: dict[str, Any], more: str) -> int:
        answer = server.client.completions.create(
            model=MODEL, prompt=text + more, max_tokens=1, extra_body=pins(**wanted_pins)
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    later = " Anne said that Toby had said so, and five nights, and"
    # Its own continuation needs the answer; so ask again, from what one token told.
    answer = server.ask(text, 3, extra_body=pins(texts=["ten ducats"]))
    newest(server)
    assert cached({"texts": ["ten ducats"]}, answer + later) > 0
    assert cached({"texts": ["ten ducats", "five nights"]}, answer + later + " x") > 0
    assert cached({}, answer + later) == 0
    assert cached({"texts": [words(200, 3)]}, answer + later) == 0


def test_pins_survive_shrinking_files_and_a_restart(tmp_path, embedded):
    need = most_bytes(mlx_h2o.make_prompt_cache(embedded[0], **SETTINGS))
    text = f"{words(0, 10)} ten ducats {words(10, 60)}"
    wanted_pins = pins(texts=["ten ducats"])
    settings: dict[str, Any] = {
        # A running request, its prompt, and half a conversation.
        "bound": int(2.7 * need),
        "defaults": SETTINGS,
        "sessions": tmp_path / "s",
    }
    with serving(**settings) as running:
        answer = running.ask(text, 6, extra_body=wanted_pins)
        ((first, end),) = newest(running).place.mark.pins
        running.ask(words(300, 60), 6)  # for which the other makes room
        until(lambda: running.scheduler.conversations.shrunk > 0)
        shrunk = next(i for i in running.scheduler.conversations.entries if i.place.mark.pins)
        assert shrunk.shrunk
        assert holds(shrunk.cache, (first, end))
    with serving(**settings) as running:
        going_on = running.client.completions.create(
            model=MODEL, prompt=f"{text}{answer} and Anne", max_tokens=40, extra_body=wanted_pins
        )
        assert going_on.usage.prompt_tokens_details.cached_tokens > end
        later = newest(running)
        assert later.place.mark.pins == ((first, end),)
        assert holds(later.cache, (first, end))
        other = running.client.completions.create(
            model=MODEL, prompt=f"{text}{answer} and Anne", max_tokens=1
        )
        assert other.usage.prompt_tokens_details.cached_tokens == 0


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted_pins", "message"),
    [
        ("system", "must be an object with lists of roles, texts, spans"),
        ({"patterns": ["a"]}, "must be an object with lists"),
        ({"roles": "system"}, "mlx_h2o.pins.roles must be a list of texts"),
        ({"texts": [""]}, "must be a list of texts"),
        ({"spans": [[3]]}, "must be (first, one past the last)"),
        ({"spans": [[3, 999]]}, "the prompt has"),
        ([[3, 999]], "the prompt has"),
        ({"roles": ["system"]}, "no system message"),
        ({"texts": ["unheard"]}, "does not contain"),
        ({"texts": ["a"] * 65}, "has 65; at most 64"),
        ({"spans": [[0, 45]]}, "41 pinned tokens are too many"),
        ({}, None),
    ],
)
def test_pins_that_cannot_be_had_are_refused_with_why(server, wanted_pins, message):
    body = {"prompt": words(0, 60), "max_tokens": 1, "mlx_h2o": {"pins": wanted_pins}}
    status, answer, _ = exchange(server.port, "/v1/completions", body)
    assert status == (200 if message is None else 400), answer
    assert message is None or message in answer["error"]["message"]
    until(lambda: server.scheduler.ledger.reserved == 0)
    assert server.scheduler.is_alive


def test_too_many_pins_of_the_server_itself_are_the_requests_400():
    with (
        serving(
            pins=PinRequest(texts=(words(0, 50),), required=False), defaults=SETTINGS
        ) as running,
        pytest.raises(openai.BadRequestError, match="pinned tokens are too many"),
    ):
        running.ask(words(0, 60))
