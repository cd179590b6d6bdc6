"""Stop texts: found in the text wherever tokens and characters begin, cut out, and the end."""

from collections.abc import Iterator
from typing import Any

import pytest

import mlx_h2o
from mlx_h2o.serve.memory import most_bytes
from serving import MODEL, Running, serving, until, words


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(defaults={"max_size": 4096, "budgets": "uniform"}) as running:
        yield running


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
    until(lambda: server.scheduler.ledger.running == 0)


def test_logprobs_are_cut_with_the_text(server):
    """Those of the tokens whose text the client has; all tokens were generated, and count."""
    options = {"model": MODEL, "prompt": words(9, 50), "max_tokens": 20, "temperature": 0}
    whole = server.client.completions.create(**options, logprobs=1)
    text = whole.choices[0].text
    cut = server.client.completions.create(**options, logprobs=1, stop=text[20:26])
    ids = [token["id"] for token in whole.choices[0].logprobs.content]
    logprobs = cut.choices[0].logprobs
    assert [token["id"] for token in logprobs.content] == ids[: len(logprobs.content)]
    assert text.startswith("".join(logprobs.tokens))
    assert cut.choices[0].text.startswith("".join(logprobs.tokens))
    assert len(logprobs.tokens) < cut.usage.completion_tokens <= len(ids)


@pytest.mark.parametrize(("size", "is_full"), [(4096, False), (48, False), (48, True)])
def test_a_conversation_goes_on_after_a_stop(size, is_full, embedded, tmp_path):
    """From its own last token before the stop text, or, where tokens were evicted, from the end of
    its prompt: caches that have read more than the text says never serve it.

    If running answers need all the memory, the end of the prompt is in a file.
    """
    settings = {"defaults": {"max_size": size, "budgets": "uniform"}}
    if is_full:
        bound = most_bytes(mlx_h2o.make_prompt_cache(embedded[0], size, budgets="uniform"))
        settings |= {"bound": bound, "sessions": tmp_path}
    with serving(**settings) as server:
        ask = server.client.completions.create
        options = {"model": MODEL, "max_tokens": 24, "temperature": 0}
        fresh = words(120, 90)
        other = ask(prompt=fresh, **options).choices[0].text
        first = ask(prompt=fresh, stop=other[12:17], **options)
        assert first.choices[0].text == other[: other.index(other[12:17])]
        again = ask(prompt=f"{fresh}{first.choices[0].text} And Anne", **options)
        cached = again.usage.prompt_tokens_details.cached_tokens
        prompt = first.usage.prompt_tokens
        assert prompt - 1 <= cached < prompt + first.usage.completion_tokens
        assert (cached > prompt) == (size == 4096)
        # The same question again gets all of its answer.
        assert ask(prompt=fresh, **options).choices[0].text == other
