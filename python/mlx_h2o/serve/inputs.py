"""A request's inputs: its prompt's tokens, its grammar and its caches, as its model needs them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from mlx_h2o.caches.conversation import pin
from mlx_h2o.serve import reading
from mlx_h2o.serve.answer import AnswerText
from mlx_h2o.serve.conversations import Conversations
from mlx_h2o.serve.errors import ApiError
from mlx_h2o.serve.grammar import grammar_of
from mlx_h2o.serve.keys import Mark, Place, key_of, token_count, tokens_of
from mlx_h2o.serve.model import CachePlan, ServedModel
from mlx_h2o.serve.prompt import Prompt
from mlx_h2o.serve.protocol import MAX_TOKENS, Body, Chat
from mlx_h2o.serve.request import Request
from mlx_h2o.serve.sampling import Sampler, check_for_model
from mlx_h2o.serve.sequence import Sequence
from mlx_h2o.serve.settings import EngineSettings
from mlx_h2o.slots.pins import Span


def sequences_of(
    request: Request, served: ServedModel, conversations: Conversations, settings: EngineSettings
) -> list[Sequence]:
    """The sequences of a request.

    Args:
        request: The request.
        served: Its model.
        conversations: The idle conversations, from one of which the prompt may go on.
        settings: The engine's settings.

    Raises:
        ValueError: This model cannot do what the request asks for.
    """
    body = request.body
    check_for_model(body, served.vocabulary)
    if isinstance(body, Chat) and body.offered_tools and not served.tokenizer.has_tool_calling:
        raise ValueError(
            "tools are not served with this model: its chat template, or mlx-lm, knows of no "
            "tool calls."
        )
    plan = served.plan(request.settings)
    grammar = grammar_of(body, served.tokenizer)
    prompt = Prompt.of(served.tokenizer, body)
    if not settings.long_prompts:
        _require_trained_length(prompt, plan, served.trained)
    how = body.reading or settings.reading
    how = reading.supported(how, served.model, plan.empty, prompt)
    label = plan.label if how == "once" else f"{plan.label} {how}"
    mark = Mark(label, (), served.fingerprint)
    mark, empty = _spell(prompt, request, plan.empty, mark, conversations)
    limit = _limit(body, len(prompt.tokens), served.trained, settings.answer_tokens)
    sequences = []
    for index in range(request.count):
        processors = []
        if grammar is not None:
            thinks = prompt.state == "reasoning"
            processors.append(served.grammars.processor(grammar, thinks))
        sampler = Sampler.of(body, request.seeds[index], processors)
        text = AnswerText(served.tokenizer, request, prompt.tokens, prompt.state)
        sequences.append(
            Sequence(request, index, served, prompt, plan, mark, empty, sampler, text, limit, how)
        )
    return sequences


def _require_trained_length(prompt: Prompt, plan: CachePlan, trained: int) -> None:
    """Raise ApiError for a prompt longer than those of training."""
    count = len(prompt.tokens)
    if not trained or count <= trained or plan.rolls:
        return
    raise ApiError(
        400,
        f"The prompt has {count:,} tokens, and the model was trained on {trained:,}: beyond "
        "that its answers are worth little. Send less; or let positions roll "
        '(--positions rolling, or {"mlx_h2o": {"positions": "rolling"}}); or start the server '
        "with --long-prompts to get them all the same.",
        code="context_length_exceeded",
    )


def _limit(body: Body, prompt: int, trained: int, usual: int) -> int:
    """The most tokens of an answer, `usual` where the request gives no number."""
    limit = body.max_completion_tokens or body.max_tokens or usual
    if limit > 0:
        return limit
    return trained - prompt if trained > prompt else MAX_TOKENS


def _spell(
    prompt: Prompt,
    request: Request,
    unpinned: list[Any],
    mark: Mark,
    conversations: Conversations,
) -> tuple[Mark, list[Any]]:
    """Give a prompt the tokens of the conversation that it goes on from; its mark and caches.

    A model's tokens are seldom those into which its text is tokenized. So a prompt that begins
    with the text of a known conversation gets that one's tokens, and only the rest is
    tokenized.
    """
    spellings: list[tuple[list[int], tuple[str, int] | None]] = []
    for count, key in conversations.spellings(mark.model, prompt.text):
        tokens = prompt.spelled_from(count, tokens_of(key))
        if tokens and all(tokens != other for other, _ in spellings):
            spellings.append((tokens, (prompt.text[:count], token_count(key))))
    # Of those with equal prefixes the first is taken, wherever the caches are by now.
    spellings.append((prompt.tokens, None))
    best: tuple[Mark, list[Any]] | None = None
    most, error = -1, None
    for tokens, spelling in spellings:
        try:
            pins = request.pins.in_prompt(prompt.tokenizer, tokens, prompt.messages)
            empty = _with_pins(unpinned, pins)
        except ValueError as raised:
            error = error or raised
            continue
        own = replace(mark, pins=pins)
        prefix = conversations.prefix_length(Place(own, key_of(tokens)))
        if prefix > most:
            best, most = (own, empty), prefix
            prompt.tokens, prompt.spelling = tokens, spelling
    if best is None:
        assert error is not None
        raise error
    return best


def _with_pins(empty: list[Any], pins: tuple[Span, ...]) -> list[Any]:
    """Empty caches with a prompt's pins; the given caches if there are no pins."""
    if pins:
        empty = copy.deepcopy(empty)
        pin(empty, pins)
    return empty
