"""Stop texts: found in the text wherever tokens and characters begin, cut out, and the end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from mlx_lm.server import Response

import mlx_h2o
from mlx_h2o.serve.stop_texts import StopFinder, TextMatcher, ends_of, stopped
from serving import MODEL, Running, serving, until, words


@pytest.fixture(scope="module")
def loaded() -> Any:
    return mlx_h2o.load(MODEL)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(defaults={"max_size": 4096, "budgets": "uniform"}) as running:
        yield running


class Never:
    """In the place of mlx-lm's matcher of ends of text."""

    def advance(self, token: int) -> bool:
        return False


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where a text is cut, character after character."""
    for end in range(len(text) + 1):
        ended = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return min(ended)
    return None


def responses(tokenizer: Any, tokens: list[int], stops: list[str]) -> list[Response]:
    """What the thread that generates would say of an answer that could be as long as this."""
    matcher, said = TextMatcher(Never(), tokenizer, stops), list[Response]()
    for i, token in enumerate(tokens):
        reason = "length" if i + 1 == len(tokens) else None
        reason = "stop" if matcher.advance(token) else reason
        said.append(Response("not read", token, -float(i), reason, ({"id": token},)))
        if reason is not None:
            break
    return said


TEXTS = ["The capital of France is Paris. 🙂🙂 ẞo it is.", "aaabaab abab", "  two  spaces \n\n¶"]


@pytest.mark.parametrize("text", TEXTS)
def test_an_answer_is_cut_at_the_stop_that_is_complete_first(loaded, text):
    """Whatever its tokens: those of the text, of its words, of its characters and of its bytes."""
    tokenizer, drawn = loaded[1], random.Random(7)
    whole = tokenizer.encode(text)
    by_characters = [token for c in text for token in tokenizer.encode(c)]
    for tokens in (whole, by_characters):
        full, _ = ends_of(tokenizer, tokens)
        for _ in range(60):
            places = [drawn.randrange(len(full)) for _ in range(drawn.randint(1, 3))]
            stops = [full[place : place + drawn.randint(1, 6)] for place in places]
            stops += ["never said"] * drawn.randint(0, 1)
            cut = first_stop(full, stops)
            given = list(stopped(responses(tokenizer, tokens, stops), stops, tokenizer))
            assert "".join(response.text for response in given) == full[:cut]
            assert [r.finish_reason for r in given[:-1]] == [None] * (len(given) - 1)
            assert given[-1].finish_reason == "stop"
            assert given[-1].text == ""
            # One response for each token, in order; those of the stop text but its last are cut.
            kept = [response.logprob for response in given]
            assert kept == sorted(kept, reverse=True)
            assert len(set(kept)) >= len(kept) - (len(kept) == 2)


def test_nothing_is_shown_before_it_is_clear_and_all_of_it_then(loaded):
    tokenizer = loaded[1]
    tokens = [token for c in "one two three" for token in tokenizer.encode(c)]
    shown = []
    for count in range(1, len(tokens) + 1):
        said = [Response("", t, 0.0, None, ()) for t in tokens[:count]]
        shown.append("".join(r.text for r in stopped(said, ["two thick"], tokenizer)))
    text = ends_of(tokenizer, tokens)[0]
    at = text.index("two")
    assert shown[-1] == text[: len(shown[-1])]
    assert not any("t" in part[at:] and len(part) < at + 6 for part in shown)
    assert len(shown[-1]) >= len(text) - 2  # the last token waits for the next one
    finder = StopFinder(["two thick", "ee!"])
    assert finder.sure("one two th") == 4
    assert finder.sure("one two three") == 11
    assert finder.sure("one two") == 4


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_stop_ends_the_answer_where_its_text_begins(server, chat, stream, seed):
    def ask(**options: Any) -> tuple[str, str, Any]:
        options |= {"model": MODEL, "max_tokens": 24, "temperature": 0, "seed": seed}
        if chat:
            messages = [{"role": "user", "content": words(0, 60)}]
            create, options = (
                server.client.chat.completions.create,
                options | {"messages": messages},
            )
        else:
            create, options = server.client.completions.create, options | {"prompt": words(0, 60)}
        if not stream:
            answer = create(**options)
            (choice,) = answer.choices
            text = choice.message.content if chat else choice.text
            return text or "", choice.finish_reason, answer.usage.completion_tokens
        text, reason = "", ""
        for chunk in create(**options, stream=True):
            (choice,) = chunk.choices
            text += (choice.delta.content if chat else choice.text) or ""
            reason = choice.finish_reason or reason
        return text, reason, None

    whole, reason, count = ask()
    assert reason == "length"
    for first, last in ((5, 9), (len(whole) - 4, len(whole)), (0, 2), (11, 24)):
        stop = whole[first:last]
        text, reason, used = ask(stop=["never said", stop])
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
        assert used is None or used <= count
    until(lambda: server.generator.accountant.running == 0)
    assert server.generator.batch is None or not len(server.generator.batch._generation_batch)


def test_logprobs_are_cut_with_the_text(server):
    options = {"model": MODEL, "prompt": words(9, 50), "max_tokens": 20, "temperature": 0}
    whole = server.client.completions.create(**options, logprobs=True)
    stop = whole.choices[0].text[20:26]
    cut = server.client.completions.create(**options, logprobs=True, stop=stop)
    ids = [token["id"] for token in whole.choices[0].logprobs.content]
    said = [token["id"] for token in cut.choices[0].logprobs.content]
    assert cut.usage.completion_tokens == len(said) < len(ids)
    assert said[:-1] == ids[: len(said) - 1]  # the last one is that which completed the stop text


@pytest.mark.parametrize("size", [4096, 48])
def test_a_conversation_goes_on_after_a_stop(size):
    """The caches are without the stop text where nothing was evicted, else with it: found both."""
    with serving(defaults={"max_size": size, "budgets": "uniform"}) as server:
        ask = server.client.completions.create
        prompt, options = words(0, 90), {"model": MODEL, "max_tokens": 24, "temperature": 0}
        whole = ask(prompt=prompt, **options).choices[0].text
        fresh = words(120, 90)
        assert whole
        other = ask(prompt=fresh, **options).choices[0].text
        first = ask(prompt=fresh, stop=other[12:17], **options)
        assert first.choices[0].text == other[: other.index(other[12:17])]
        told = fresh + first.choices[0].text
        again = ask(prompt=f"{told} And Anne", **options)
        known = again.usage.prompt_tokens_details.cached_tokens
        assert known > first.usage.prompt_tokens
        said = first.usage.completion_tokens
        held = known - first.usage.prompt_tokens
        assert held < said if size == 4096 else held >= said
