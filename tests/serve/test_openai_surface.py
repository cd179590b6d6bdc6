"""What openai's, litellm's and anthropic's clients and their helpers expect, and send back.

`.ci/run` installs the last two, which are large; without them their tests are skipped.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import openai
import pytest
from mlx_lm.tool_parsers import json_tools
from pydantic import BaseModel

from mlx_h2o.serve.answer import AnswerText
from mlx_h2o.serve.pins import NO_PINS
from mlx_h2o.serve.protocol import Chat
from mlx_h2o.serve.request import Request
from serving import MODEL, Running, exchange, serving, words, wrapped

#: Tokens of an answer whose request gives no number.
ANSWER = 20
HELLO = [{"role": "user", "content": words(0, 20)}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    defaults = {"max_size": 4096, "budgets": "uniform"}
    with serving(defaults=defaults, answer_tokens=ANSWER) as running:
        yield running


def chat(server: Running, **options: Any) -> Any:
    options = {"messages": HELLO, "max_tokens": 6, "temperature": 0} | options
    return server.client.chat.completions.create(model=MODEL, **options)


@pytest.mark.parametrize("n", [1, 3])
def test_the_stream_helper_builds_the_message(server, n):
    """It adds up all deltas, and wants the first choice first."""
    text = chat(server, max_tokens=20).choices[0].message.content
    stop = text[-6:]  # the helper refuses answers that the limit cut
    options = {"model": MODEL, "messages": HELLO, "temperature": 0, "stop": stop, "n": n}
    with server.client.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    assert [choice.index for choice in final.choices] == list(range(n))
    for choice in final.choices:
        assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
        assert choice.message.content == text[: text.index(stop)]


def test_answers_are_sent_back_as_they_are(server):
    first = chat(server).choices[0].message
    messages = [*HELLO, first.to_dict(), {"role": "user", "content": "And then?"}]
    assert chat(server, messages=messages).choices
    empty = {"role": "assistant", "content": None}
    assert chat(server, messages=[*HELLO, empty, *HELLO]).choices
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "a cat"}
    assert chat(server, messages=[*HELLO, called, result]).choices


def test_parts_of_a_content_are_one_text_without_a_template_too(server):
    parts = [{"type": "text", "text": text} for text in (words(0, 9), f" {words(9, 11)}")]
    answer = chat(server, messages=[{"role": "user", "content": parts}])
    assert answer.usage.prompt_tokens == chat(server).usage.prompt_tokens
    assert answer.choices[0].message.content == chat(server).choices[0].message.content


def test_the_last_message_can_be_continued(server):
    whole = chat(server, max_tokens=12).choices[0].message.content
    begun = chat(server, max_tokens=6).choices[0].message.content
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    options = {"continue_final_message": True}
    rest = chat(server, messages=messages, extra_body=options).choices[0].message.content
    assert begun + rest == whole
    with pytest.raises(openai.BadRequestError, match="last message of the assistant"):
        chat(server, extra_body=options)


def test_top_p_of_zero_is_greedy(server):
    greedy = chat(server).choices[0].message.content
    assert chat(server, temperature=2.0, top_p=0).choices[0].message.content == greedy


def test_max_tokens_of_minus_one_is_to_the_end(server):
    stop = chat(server, max_tokens=80).choices[0].message.content[-9:]
    answer = chat(server, max_tokens=-1, stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > ANSWER


def test_logprobs_have_tokens_and_bytes(server):
    content = chat(server, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    text = chat(server).choices[0].message.content
    assert "".join(one.token for one in content).removeprefix(" ") == text
    for one in content:
        assert bytes(one.bytes).decode() == one.token
        for top in one.top_logprobs:
            assert bytes(top.bytes).decode(errors="replace") == top.token
    legacy = server.client.completions.create(
        model=MODEL, prompt=words(0, 20), max_tokens=4, logprobs=3
    )
    logprobs = legacy.choices[0].logprobs
    assert "".join(logprobs.tokens) == legacy.choices[0].text
    assert len(logprobs.token_logprobs) == 4
    assert [len(one) for one in logprobs.top_logprobs] == [3] * 4


class Word(BaseModel):
    word: Literal["key", "door"]


def test_the_parse_helper_gets_an_object(server):
    message = server.client.chat.completions.parse(
        model=MODEL, messages=HELLO, temperature=0, response_format=Word
    ).choices[0].message  # fmt: skip
    assert message.parsed.word in ("key", "door")


@pytest.mark.slow
def test_litellm_and_its_helper(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing from the network
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    where = {"api_base": f"{server.url}/v1", "api_key": "none"}
    options = {"model": f"openai/{MODEL}", "max_tokens": 6, "temperature": 0, **where}
    expected = chat(server)
    for n in (1, 2):
        pieces = list(litellm.completion(messages=HELLO, stream=True, n=n, **options))
        assert {piece.choices[0].index for piece in pieces if piece.choices} == set(range(n))
    whole = litellm.completion(messages=HELLO, **options)
    pieces = list(litellm.completion(messages=HELLO, stream=True, **options))
    for answer in (whole, litellm.stream_chunk_builder(pieces, messages=HELLO)):
        message = answer.choices[0].message
        assert message.content == expected.choices[0].message.content
        assert (message.role, answer.choices[0].finish_reason) == ("assistant", "length")
    back = [*HELLO, message.model_dump(), {"role": "user", "content": "And then?"}]
    assert litellm.completion(messages=back, **options).choices[0].message.content
    text = litellm.text_completion(
        prompt=words(0, 20), **options | {"model": f"text-completion-openai/{MODEL}"}
    )
    assert text.choices[0].text == server.ask(words(0, 20), 6)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(messages=HELLO, **options | {"model": "openai/none"})


def test_anthropics_client_hears_what_there_is(server):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    options = {"model": MODEL, "messages": HELLO}
    refused = partial(pytest.raises, anthropic.NotFoundError, match="/v1/chat/completions")
    with refused():
        client.messages.create(max_tokens=6, **options)
    with refused(), client.messages.stream(max_tokens=6, **options) as stream:
        stream.get_final_message()
    with refused():
        client.messages.count_tokens(**options)


def test_other_endpoints_say_what_there_is(server):
    for path in ("/v1/responses", "/v1/embeddings"):
        status, answer, _ = exchange(server.port, path, {})
        assert status == 404
        assert path in answer["error"]["message"]


# -- tool calls -----------------------------------------------------------------------------------


def answer_with(embedded: Any, text: str, **body: Any) -> tuple[str, list[Any], str]:
    """A chat answer's text, calls and reason to end, of a model that calls tools as JSON."""
    tokenizer = wrapped(
        embedded[1], tool_call_start="<tool_call>", tool_call_end="</tool_call>",
        tool_parser=json_tools.parse_tool_call,
    )  # fmt: skip
    request = Request(Chat.model_validate({"messages": HELLO, **body}), MODEL, "", {}, NO_PINS, [0])
    answer, pieces = AnswerText(tokenizer, request, [5], "normal"), []
    for token in tokenizer.encode(text):
        pieces.append(answer.add(token, None))
    last, reason = answer.finish("stop")
    pieces.append(last)
    calls = [call for piece in pieces for call in piece.calls]
    return "".join(piece.text for piece in pieces), calls, reason


def test_a_call_that_is_no_json_is_the_answers_text(embedded):
    text = 'Well <tool_call>{"name": look}</tool_call> so'
    assert answer_with(embedded, text, tools=[TOOL]) == (text, [], "stop")
    call = 'Well <tool_call>{"name": "look", "arguments": {}}</tool_call>'
    content, calls, reason = answer_with(embedded, call, tools=[TOOL])
    assert (content, calls[0]["function"]["name"], reason) == ("Well ", "look", "tool_calls")


def test_a_call_that_nobody_offered_is_text(embedded):
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert answer_with(embedded, text, tools=[TOOL], tool_choice="none") == (text, [], "stop")
