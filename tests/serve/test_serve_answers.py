"""Answers of `mlx_h2o serve` as clients expect them: several, of a form, with tools."""

import json
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.tool_parsers import json_tools, minimax_m2, pythonic, qwen3_coder

import mlx_h2o
from mlx_h2o.serve.grammar import GrammarCompiler
from mlx_h2o.serve.memory import most_bytes
from mlx_h2o.serve.protocol import Chat
from serving import MODEL, SIZE, Running, alone, serving, until, words, wrapped

TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{{ reasoning_effort }}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Anne", "Toby"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("look", "weigh")
]
HELLO = [{"role": "user", "content": "Who is there?"}]


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with serving() as running:
        yield running


def with_tools(embedded: Any, module: Any = json_tools) -> Any:
    """The embedded model's tokenizer, as if its model could call tools."""
    made = wrapped(
        embedded[1], chat_template=rendered, tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end, tool_parser=module.parse_tool_call,
    )  # fmt: skip
    return embedded[0], made


def rendered(messages: Any, **kwargs: Any) -> str:
    import jinja2

    text = jinja2.Template(TEMPLATE).render(messages=messages, **kwargs)
    return text[-400:]


@pytest.fixture(scope="module")
def caller(embedded) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        pair = with_tools(embedded)
        patch.setattr("mlx_h2o.serve.model.load", lambda name: pair)
        with serving() as running:
            yield running


def chat(running: Running, tokens: int = 120, **options: Any) -> Any:
    options.setdefault("messages", HELLO)
    return running.client.chat.completions.create(model=MODEL, max_tokens=tokens, **options)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


# -- forms ----------------------------------------------------------------------------------------


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "age"}
        and value["name"] in ("Anne", "Toby")
        and isinstance(value["age"], int)
        and value["age"] <= 99
    )


def test_answers_of_a_schema_in_a_batch_beside_free_ones(plain, embedded):
    """Each has its own form; free ones say what they say alone."""
    prompts = [words(100 * i, 40) for i in range(2)]
    with ThreadPoolExecutor(6) as pool:
        free = [pool.submit(plain.ask, prompt, 30) for prompt in prompts]
        formed = [
            pool.submit(chat, plain, temperature=i, seed=i, response_format=schema_format(SCHEMA))
            for i in range(3)
        ]
        listed = pool.submit(
            chat, plain, temperature=1, seed=1,
            response_format=schema_format({
                "type": "object", "required": ["all"], "additionalProperties": False,
                "properties": {"all": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4}},
            }),
        )  # fmt: skip
        for answer in formed:
            (choice,) = answer.result().choices
            assert choice.finish_reason == "stop"
            assert is_of_schema(choice.message.content)
        assert set(json.loads(listed.result().choices[0].message.content)["all"]) <= {1, 2}
        assert [one.result() for one in free] == [alone(embedded, one, 30) for one in prompts]


def test_the_same_alone_and_streamed(plain):
    """A seed takes a request out of the batch."""
    options = {"response_format": schema_format(SCHEMA), "temperature": 1, "seed": 3}
    whole = chat(plain, **options).choices[0].message.content
    assert is_of_schema(whole)
    chunks = chat(plain, stream=True, **options)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole


def test_a_json_object_is_one_as_far_as_it_goes(plain):
    text = chat(plain, 30, response_format={"type": "json_object"}).choices[0].message.content
    assert text.lstrip().startswith("{")
    assert chat(plain, 4, response_format={"type": "text"}).choices[0].message.content


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"type": "yaml"}, "response_format.type: Input should be"),
        ({"type": "json_schema"}, "json_schema must be"),
        ("json", "response_format: Input should be"),
        (schema_format({"$ref": "http://127.0.0.1:1/x.json"}), "form of the answer is invalid"),
        (schema_format({"type": "string", "pattern": "(a"}), "form of the answer is invalid"),
        (schema_format({"type": "rope"}), "form of the answer is invalid"),
        (schema_format({"not": {}, "type": "object"}), "form of the answer is invalid"),
    ],
)
def test_forms_that_cannot_be_are_refused(plain, form, why):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(plain, response_format=form)
    assert why in str(refused.value)
    assert plain.scheduler.ledger.running == 0


def test_without_llguidance_a_form_is_a_501_that_names_it(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(openai.APIStatusError) as refused:
        chat(plain, response_format={"type": "json_object"})
    assert refused.value.status_code == 501
    assert "pip install llguidance" in str(refused.value)
    assert chat(plain, 2).choices


def test_the_mask_follows_the_tokens_back_and_ends_what_is_whole(embedded):
    """As a sequence that is computed again, and beyond the tokenizer's own tokens."""
    tokenizer = embedded[1]
    step = GrammarCompiler(tokenizer).processor('start: "ab" | "cd"', reasons=False)
    V = tokenizer.vocab_size + 40
    logits, prompt = mx.zeros((1, V)), [5, 6, 7]

    def allowed(text: str) -> set[str]:
        tokens = list(prompt)
        for letter in text:
            tokens += tokenizer.encode(letter, add_special_tokens=False)
        out = step(mx.array(tokens), logits)
        assert out.shape == (1, V)
        return {tokenizer.decode([i]) for i in range(V) if math.isfinite(out[0, i].item())}

    before = allowed("")
    assert "a" in before
    assert "b" not in before
    after = allowed("a")
    assert after == {"b"}
    assert allowed("") == before
    assert allowed("a") == after
    (end,) = tokenizer.eos_token_ids
    assert allowed("ab") == {tokenizer.decode([end])}


def test_reasoning_is_free_and_the_answer_after_it_is_not(embedded):
    tokenizer = embedded[1]
    step = GrammarCompiler(tokenizer).processor('start: "ab"', reasons=False)
    step._until = tokenizer.encode("end", add_special_tokens=False)
    logits = mx.zeros((1, tokenizer.vocab_size))
    tokens = [1, 2]
    assert mx.isfinite(step(mx.array(tokens), logits)).all()
    for token in tokenizer.encode("x end", add_special_tokens=False):
        tokens.append(token)
        out = step(mx.array(tokens), logits)
    if step._until:
        tokens += step._until
        out = step(mx.array(tokens), logits)
    assert 0 < mx.isfinite(out).sum().item() < 10


# -- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "weigh"])
def test_a_tool_is_called_where_it_must_be(caller, choice, stream):
    wanted = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    answer = chat(
        caller, 200, tools=TOOLS, tool_choice=wanted, parallel_tool_calls=False,
        temperature=1, stream=stream,
    )  # fmt: skip
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert chunks[-1].finish_reason == "tool_calls"
        assert [call.index for call in calls] == [0]
    else:
        assert answer.choices[0].finish_reason == "tool_calls"
        assert not (answer.choices[0].message.content or "").strip()
        calls = answer.choices[0].message.tool_calls
    (call,) = calls
    assert call.function.name in (["look", "weigh"] if choice == "required" else [choice])
    assert is_of_schema(call.function.arguments)
    assert call.id
    assert call.type == "function"


def test_tools_beside_a_form_give_one_or_the_other(caller):
    for seed in range(3):
        answer = chat(
            caller, 200, tools=TOOLS, response_format=schema_format(SCHEMA), temperature=1,
            seed=seed,
        )  # fmt: skip
        message = answer.choices[0].message
        value = message.content or message.tool_calls[0].function.arguments
        assert is_of_schema(value)


def test_tools_are_offered_or_not(caller):
    def prompt(**options: Any) -> int:
        return chat(caller, 1, **options).usage.prompt_tokens

    bare = prompt()
    assert prompt(tools=TOOLS[:1], tool_choice="none") == bare
    assert prompt(tools=TOOLS[:1]) > bare
    assert prompt(tools=[]) == bare
    assert prompt(reasoning_effort="high") > bare


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": {"a": 1}}, "tools: Input should be"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": "often"}, "tool_choice: Input should be"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "eat"}}},
            "tool_choice must be",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs"),
    ],
)
def test_tools_that_are_none_are_refused(caller, options, why):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(caller, 1, **options)
    assert why in str(refused.value)


def test_tools_are_refused_where_the_model_cannot_call_them(plain):
    with pytest.raises(openai.BadRequestError, match="tools are not served with this model"):
        chat(plain, tools=TOOLS)
    assert chat(plain, 2, tools=TOOLS, tool_choice="none").choices


@pytest.mark.parametrize("module", [pythonic, qwen3_coder])
def test_a_call_is_required_of_other_families_too(embedded, monkeypatch, module):
    """Their own writing comes back as JSON; tests/serve/test_tool_forms.py has all of them."""
    pair = with_tools(embedded, module)
    monkeypatch.setattr("mlx_h2o.serve.model.load", lambda name: pair)
    with serving() as running:
        answer = chat(
            running, 200, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
            temperature=1,
        )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in ("look", "weigh")
    assert is_of_schema(call.function.arguments)


def test_a_call_of_another_form_cannot_be_required(embedded, monkeypatch):
    pair = with_tools(embedded, minimax_m2)
    monkeypatch.setattr("mlx_h2o.serve.model.load", lambda name: pair)
    with serving() as running:
        with pytest.raises(openai.BadRequestError, match="are read by minimax_m2"):
            chat(running, tools=TOOLS, tool_choice="required")
        assert chat(running, 2, tools=TOOLS).choices


# -- several answers ------------------------------------------------------------------------------


def test_several_answers_to_one_request(plain, embedded):
    answer = plain.client.completions.create(
        model=MODEL, prompt=words(0, 40), max_tokens=12, temperature=0, n=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.text for choice in answer.choices} == {alone(embedded, words(0, 40), 12)}
    assert answer.usage.completion_tokens == 36
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 36
    warm = plain.client.completions.create(
        model=MODEL, prompt=words(0, 40), max_tokens=12, temperature=1, n=4
    )
    assert len({choice.text for choice in warm.choices}) > 1


def test_several_answers_with_a_seed_are_those_of_the_seeds_that_follow(plain):
    options = {"model": MODEL, "prompt": words(9, 30), "max_tokens": 8, "temperature": 1.0}
    several = plain.client.completions.create(**options, n=3, seed=-5)
    one_by_one = [plain.client.completions.create(**options, seed=-5 + i) for i in range(3)]
    texts = [choice.text for choice in several.choices]
    assert texts == [one.choices[0].text for one in one_by_one]
    assert len(set(texts)) > 1


def test_several_answers_are_streamed_side_by_side(plain):
    options = {"model": MODEL, "prompt": words(30, 30), "max_tokens": 9, "temperature": 0, "n": 3}
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(plain.client.completions.create(**options))
    texts, ends = ["", "", ""], []
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends.append(choice.index)
    assert sorted(ends) == [0, 1, 2]
    assert len(set(texts)) == 1
    assert texts[0] == plain.ask(words(30, 30), 9)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 27


def test_several_are_admitted_together_or_not_at_all(embedded, monkeypatch):
    """Room for three: a second request of two waits until one of the first's is complete."""
    need = most_bytes(mlx_h2o.make_prompt_cache(embedded[0], SIZE))
    with serving(bound=3 * need) as running:
        ledger, counts = running.scheduler.ledger, list[int]()
        reserve = ledger.reserve

        def reserved(owner, need):
            reserve(owner, need)
            counts.append(ledger.running)

        monkeypatch.setattr(ledger, "reserve", reserved)
        with ThreadPoolExecutor(2) as pool:
            options = {"model": MODEL, "max_tokens": 60, "temperature": 0, "n": 2}
            answers = [
                pool.submit(running.client.completions.create, prompt=words(50 * i, 20), **options)
                for i in range(2)
            ]
            assert all(len(one.result().choices) == 2 for one in answers)
        assert counts[:2] == [1, 2]
        assert counts[2:] in ([2, 3], [1, 2])  # once one of the first's, or both, had ended
        with pytest.raises(openai.BadRequestError, match="n=4 answers may take"):
            running.client.completions.create(model=MODEL, prompt="x", n=4)
        until(lambda: ledger.reserved == 0)
        assert running.scheduler.waiting == 0


# -- logprobs -------------------------------------------------------------------------------------


def test_logprobs_are_finite_and_those_of_the_tokens(plain):
    answer = chat(plain, 5, logprobs=True, top_logprobs=20, temperature=0)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5
    for token in content:
        assert len(token.top_logprobs) == 20
        top = [one.logprob for one in token.top_logprobs]
        assert top == sorted(top, reverse=True)
        assert token.logprob == pytest.approx(top[0])
        assert token.token == token.top_logprobs[0].token
    formed = chat(plain, 40, top_logprobs=20, response_format=schema_format(SCHEMA))
    least = min(
        one.logprob for token in formed.choices[0].logprobs.content for one in token.top_logprobs
    )
    assert math.isfinite(least)
    streamed = chat(plain, 5, logprobs=True, temperature=0, stream=True)
    value = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [one.logprob for one in value] == pytest.approx([one.logprob for one in content])


# -- fields ---------------------------------------------------------------------------------------


def test_what_a_template_is_told():
    body: dict[str, Any] = {"messages": HELLO}
    assert Chat.model_validate(body).template_arguments() == {}
    body |= {"reasoning_effort": "low", "chat_template_kwargs": {"x": 1}}
    assert Chat.model_validate(body).template_arguments() == {"reasoning_effort": "low", "x": 1}


def test_an_answers_fields_are_those_of_openai(plain):
    answer = chat(plain, 3).to_dict()
    assert set(answer) == {
        "id", "system_fingerprint", "object", "model", "created", "choices", "usage"
    }  # fmt: skip
    assert answer["object"] == "chat.completion"
    assert re.fullmatch(r"chatcmpl-[0-9a-f-]{36}", answer["id"])
    assert set(answer["choices"][0]) == {"index", "finish_reason", "message", "logprobs"}
    assert set(answer["choices"][0]["message"]) == {"role", "content"}
    chunks = [chunk.to_dict() for chunk in chat(plain, 3, stream=True)]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
