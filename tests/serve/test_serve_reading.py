"""Prompts that the server reads twice: the answers are those of `generate --reading twice`."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
from mlx_lm import stream_generate

import mlx_h2o
from mlx_h2o.cli import main
from mlx_h2o.compression import reading
from mlx_h2o.compression.reading import NEWEST, read_prompt
from mlx_h2o.serve import scheduler
from mlx_h2o.serve.launch import ServerSettings, serve
from mlx_h2o.serve.memory import Ledger, most_bytes
from mlx_h2o.serve.settings import EngineSettings
from serving import MODEL, Running, exchange, serving, until, words, wrapped

SETTINGS = {"max_size": 80}
FACT = "The secret number of Mary Lane is"
PROMPT = (
    f"It was no longer a secret to us. {FACT} 5231.\n\n{words(0, 300)}\n\nNow I shall say what I "
    f"remember. {FACT}"
)
TWICE = {"reading": "twice"}


def complete(
    server: Running, prompt: str, own: Any = TWICE, tokens: int = 6, **options: Any
) -> Any:
    return server.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=0, extra_body=own, **options
    )


def text_of(answer: Any) -> str:
    """The answer; a server's begins with the model's space."""
    return str(answer.choices[0].text).strip()


def details(answer: Any) -> tuple[int, int]:
    """Tokens of a prompt that were cached, and that were read twice."""
    own = answer.usage.prompt_tokens_details
    return own.cached_tokens, own.model_extra["twice_read_tokens"]


def generated(capsys: Any, prompt: str, how: str) -> str:
    """The answer of the command."""
    command = ["generate", "--model", MODEL, "-p", prompt, "-m", "6", "--max-kv-size", "80"]
    assert main([*command, "--reading", how, "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["text"]).strip()


def goes_on(loaded: Any, turns: list[str], tokens: int = 6) -> str:
    """The answer to the last of a conversation's turns, whose texts are read twice if long."""
    model, tokenizer = loaded
    cache = mlx_h2o.make_prompt_cache(model, **SETTINGS)
    for turn in turns:
        new = tokenizer.encode(turn)
        read, _ = read_prompt(model, tokenizer, new, cache, "twice")
        answer = stream_generate(model, tokenizer, new[read:], tokens, prompt_cache=cache)
        text = "".join(one.text for one in answer)
    return text.strip()


def test_the_answer_is_that_of_generate(capsys):
    """What one reading forgets is known after two; both can be asked of one server."""
    once, twice = (generated(capsys, PROMPT, how) for how in ("once", "twice"))
    assert "5231" in twice
    assert "5231" not in once
    with serving(defaults=SETTINGS) as server:
        plain = complete(server, PROMPT, None)
        assert (text_of(plain), details(plain)) == (once, (0, 0))
        for how in ("twice", "auto"):
            answer = complete(server, PROMPT, {"reading": how})
            assert text_of(answer) == twice
            assert details(answer) == (0, answer.usage.prompt_tokens - NEWEST)
        # The same question again: the prompt's caches are there, as two readings left them.
        again = complete(server, PROMPT)
        assert text_of(again) == twice
        assert details(again) == (again.usage.prompt_tokens - 1, 0)
        assert text_of(complete(server, words(0, 20))) == server.ask(words(0, 20), 6).strip()
        with pytest.raises(openai.BadRequestError, match="reading: Input should be 'auto'"):
            complete(server, PROMPT, {"reading": "thrice"})
    with serving(defaults=SETTINGS, reading="twice") as server:
        assert text_of(complete(server, PROMPT, None)) == twice
        assert text_of(complete(server, PROMPT, {"reading": "once"})) == once


def test_a_stream_counts_both_readings():
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "reading": "twice"}
    body["stream_options"] = {"include_usage": True}
    with serving(defaults=SETTINGS, chunk=100) as server:
        lines = exchange(server.port, "/v1/completions", body)[1].split("\n\n")
    progress = [line.split()[-1].split("/") for line in lines if line.startswith(": keepalive")]
    done, whole = zip(*((int(a), int(b)) for a, b in progress), strict=True)
    usage = json.loads([line for line in lines if line.startswith("data: {")][-1][6:])["usage"]
    count = usage["prompt_tokens_details"]["twice_read_tokens"]
    assert count == usage["prompt_tokens"] - NEWEST
    assert set(whole) == {usage["prompt_tokens"] + count}
    assert sorted(set(done)) == list(done)
    assert done[0] == 100
    assert done[-1] == whole[0] - 1  # generation begins with the last token


def test_a_long_turn_is_read_twice_and_a_short_one_once(embedded):
    """What earlier turns left is not read again."""
    with serving(defaults=SETTINGS) as server:
        first = complete(server, PROMPT)
        text = PROMPT + first.choices[0].text
        for turn, is_long in ((" " + words(400, 10), False), (" " + words(500, 200), True)):
            answer = complete(server, text + turn)
            cached, twice = details(answer)
            assert cached > 300
            new = answer.usage.prompt_tokens - cached
            assert twice == (new - NEWEST if is_long else 0)
            text += turn + answer.choices[0].text


def rendered(messages: Any, **_: Any) -> str:
    return "".join(f"{one['role']}: {one['content']}\n" for one in messages)


def test_a_long_system_prompt_is_read_twice_for_all_its_chats(embedded, monkeypatch):
    model, tokenizer = embedded
    chats = wrapped(tokenizer, chat_template=rendered)
    monkeypatch.setattr("mlx_h2o.serve.model.load", lambda name: (model, chats))
    system = {"role": "system", "content": PROMPT}
    with serving(defaults=SETTINGS) as server:
        counts = []
        for question in ("Who is Mary Lane?", "What do you remember?"):
            answer = server.client.chat.completions.create(
                model=MODEL, messages=[system, {"role": "user", "content": question}],
                max_tokens=4, extra_body=TWICE,
            )  # fmt: skip
            counts.append(details(answer))
    assert counts[0][0] == 0
    assert counts[0][1] > 300
    assert counts[1] == (counts[0][1], 0)


def test_several_answers_go_on_from_two_readings(embedded):
    with serving(defaults=SETTINGS) as server:
        answer = complete(server, PROMPT, n=2)
        texts = [choice.text.strip() for choice in answer.choices]
        assert texts == [goes_on(embedded, [PROMPT])] * 2
        assert details(answer) == (0, answer.usage.prompt_tokens - NEWEST)


def test_short_requests_pass_a_second_reading_and_a_client_that_left_frees_it(monkeypatch):
    """Each waits for one chunk; what the second reading took is free when its client hangs up."""
    steps, step = list[reading.TwoReadings](), reading.TwoReadings.step

    def slow(own: reading.TwoReadings) -> bool:
        steps.append(own)
        time.sleep(0.03)
        return step(own)

    monkeypatch.setattr(reading.TwoReadings, "step", slow)
    with serving(defaults=SETTINGS, chunk=8) as server:
        client = HTTPConnection("127.0.0.1", server.port, timeout=60)
        client.request("POST", "/v1/completions", json.dumps({"prompt": PROMPT} | TWICE))
        for again in (False, True):  # in the first reading, and in the second
            until(lambda again=again: steps and steps[0].done > again * steps[0].count)
            before = len(steps)
            assert server.ask("Anne", 3)
            # One for each token, for its prompt and its arrival, and one that was passed over.
            assert len(steps) - before <= 3 + 3
        client.sock.shutdown(socket.SHUT_RDWR)
        client.close()
        until(lambda: server.scheduler.ledger.running == 0)
        assert steps[0].done < 2 * steps[0].count
        assert server.scheduler.ledger.current.running == 0
        time.sleep(0.1)
        before = len(steps)
        time.sleep(0.1)
        assert len(steps) == before


def test_the_rows_of_a_second_reading_are_within_the_bound(embedded, monkeypatch):
    """It waits for them, gives them back, and is refused where they can never be free."""
    beyond, weigh = list[int](), Ledger.weigh

    def watched(own: Ledger, running: int, idle: int) -> None:
        beyond.append(running - own.reserved)
        weigh(own, running, idle)

    monkeypatch.setattr(Ledger, "weigh", watched)
    need = most_bytes(mlx_h2o.make_prompt_cache(embedded[0], **SETTINGS))
    with serving(defaults=SETTINGS, bound=2 * need) as server:
        with pytest.raises(openai.BadRequestError, match="While its prompt is read twice"):
            complete(server, PROMPT)
        assert details(complete(server, PROMPT, {"reading": "auto"}))[1] == 0
    with serving(defaults=SETTINGS, bound=12 * need) as server, ThreadPoolExecutor(4) as pool:
        prompts = [f"{words(20 * i, 40)} {PROMPT}" for i in range(4)]
        answers = list(pool.map(lambda one: complete(server, one), prompts))
        assert all(details(one)[1] > 300 for one in answers)
        until(lambda: server.scheduler.ledger.running == 0)
        assert need < server.scheduler.ledger.peak <= 12 * need
        assert server.scheduler.ledger.reserved == 0
    assert max(beyond) <= 0


def test_what_cannot_be_read_twice_is_refused_or_read_once():
    rolling = {"max_size": 80, "positions": "rolling", "remainder": False, "bits": 16}
    own = {"mlx_h2o": rolling}
    with serving(defaults=SETTINGS) as server:
        for prompt in (PROMPT, "short"):
            with pytest.raises(openai.BadRequestError, match="omit positions"):
                complete(server, prompt, own | TWICE)
        once = complete(server, PROMPT, own)
        auto = complete(server, PROMPT, own | {"reading": "auto"})
        assert auto.choices[0].text == once.choices[0].text
        assert details(auto)[1] == 0
        with pytest.raises(openai.BadRequestError, match="too few to keep"):
            complete(server, PROMPT, {"mlx_h2o": {"max_size": 18}} | TWICE)
    engine = EngineSettings((MODEL,), rolling, reading="twice")
    with pytest.raises(ValueError, match="omit positions"):
        serve(ServerSettings(engine, port=0))


def test_a_failed_step_is_computed_again_from_two_readings(embedded, monkeypatch):
    expected = goes_on(embedded, [PROMPT])
    raised = []

    def raises(own: Any, *_: Any) -> Any:
        if len(own.sequences) > 1 and not raised:
            raised.append(own)
            raise RuntimeError("out of memory")
        return step(own)

    step = scheduler.Batch.step
    monkeypatch.setattr(scheduler.Batch, "step", raises)
    with serving(defaults=SETTINGS) as server, ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.ask, words(0, 20), 200)
        until(lambda: server.scheduler.slots > 0)
        assert text_of(complete(server, PROMPT)) == expected
        assert raised
        assert other.result()
