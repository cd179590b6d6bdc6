"""Continuing a conversation from the tokens that its caches hold, also after a crash."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_h2o.caches.conversation import pin
from mlx_h2o.serve.conversations import Conversations
from mlx_h2o.serve.fields import label_of
from mlx_h2o.serve.marks import Mark, mark
from mlx_h2o.serve.plans import Plans
from mlx_h2o.serve.served_model import ServedModel
from mlx_h2o.serve.sessions import Saved, tokens_of
from mlx_h2o.serve.stop_texts import stopped
from mlx_h2o.serve.ticket import Place, Ticket
from mlx_h2o.serve.transcripts import Transcripts
from mlx_h2o.serve.turn_text import Content, TurnText
from mlx_h2o.storage.pins import Span


class GoingOn:
    """The texts of all conversations, and the notes of their turns.

    Args:
        conversations: The idle conversations.
    """

    def __init__(self, conversations: Conversations):
        self._conversations, self._transcripts = conversations, Transcripts()
        if conversations.sessions is not None:
            for note in conversations.sessions.notes:
                for text in note.texts:
                    self._transcripts.add(text, note.key)
            conversations.sessions.notes.clear()

    def spelled(self, said: TurnText, empty_for: Callable[[list[int]], list[Any]]) -> list[int]:
        """A prompt's tokens, spelled as in the conversation whose caches hold most of it.

        Args:
            said: The prompt as text.
            empty_for: Makes empty caches for a prompt's tokens, with its pins.
        """
        best, most = said.tokens, -1
        found = self._transcripts.spellings(said.text)
        for tokens in (*(said.goes_on_from(n, tokens_of(key)) for n, key in found), said.tokens):
            try:
                empty = empty_for(tokens)
            except ValueError:  # invalid pins: reported elsewhere, for all requests alike
                continue
            known = self._conversations.known(empty, tokens)
            if known > most:
                best, most = tokens, known
        return best

    def told(
        self,
        responses: Iterable[Any],
        ticket: Ticket,
        context: Any,
        stops: Sequence[str],
        tokenizer: Any,
        alive: Callable[[], bool],
    ) -> Iterator[Any]:
        """An answer as its client receives it; its end comes when its turn is on disk.

        Args:
            responses: mlx-lm's responses.
            ticket: The request's ticket.
            context: mlx-lm's context of the generation.
            stops: Texts that end the answer.
            tokenizer: The model's tokenizer.
            alive: Whether the thread that generates still runs.
        """
        content = Content(context.text_sm, context.initial_state)
        shown = stopped(responses, stops, tokenizer) if stops else responses
        for response in shown:
            if response.finish_reason == "stop":
                response = replace(response, text="")
            content.add(response)
            if response.finish_reason is None:
                yield response
                continue
            cut = response.finish_reason == "stop"
            ticket.noted = self._remember(ticket, content.text, cut, alive)
            yield response

    def _remember(
        self, ticket: Ticket, content: str, cut: bool, alive: Callable[[], bool]
    ) -> Place | None:
        """Note a conversation so that it is found again, after a crash too.

        Args:
            ticket: The request's ticket.
            content: The answer as its client receives it.
            cut: Whether it ended before it had its most tokens.
            alive: Whether the thread that generates still runs.

        Returns:
            The place of the noted conversation; None if nothing was noted.
        """
        kept = ticket.kept.wait(alive)
        if kept is None or ticket.said is None:
            return None
        place, prompt = kept
        texts, goes_on = ticket.said.continued(tokens_of(place.key), content, cut)
        for text in texts:
            self._transcripts.add(text, place.key)
        if not goes_on and prompt is not None:
            # The chat template leaves out some of the answer, such as thoughts: the next turn
            # continues from this turn's prompt.
            place, texts = prompt, []
        sessions, turn = self._conversations.sessions, ticket.turn
        if sessions is None or not place.key:
            return None
        name, title = (turn.name, turn.title) if turn is not None else ("", "")
        try:
            sessions.note(place.mark, place.key, texts, title, name)
        except OSError as error:
            logging.error("A turn could not be noted: %s", error)
            return None
        return place


def with_pins(empty: list[Any], label: str, pins: tuple[Span, ...]) -> list[Any]:
    """Empty caches with a prompt's pins and their mark; the given caches if there are no pins.

    Args:
        empty: Caches without pins.
        label: The label of their settings.
        pins: The prompt's pins.
    """
    if pins:
        empty = copy.deepcopy(empty)
        pin(empty, pins)
        mark(empty, Mark(label, pins))
    return empty


def restore(
    conversations: Conversations, plans: Plans, provider: ServedModel, defaults: Mapping[str, Any]
) -> None:
    """Compute the caches of conversations that a killed server noted but did not write.

    Args:
        conversations: The idle conversations.
        plans: The plans of empty caches.
        provider: The provider of the model.
        defaults: The server's settings of caches.
    """
    sessions = conversations.sessions
    for saved in sessions.without_caches() if sessions is not None else ():
        try:
            _read_again(saved, conversations, plans, provider, defaults)
        except Exception as error:
            # Its tokens are still known: its next turn is read whole.
            logging.warning("Cannot restore the conversation %s: %s", saved.path.stem, error)


def _read_again(
    saved: Saved,
    conversations: Conversations,
    plans: Plans,
    provider: ServedModel,
    defaults: Mapping[str, Any],
) -> None:
    own, tokens = saved.mark, tokens_of(saved.key)
    same = own.label == label_of(defaults)
    empty = plans.of(own.label, defaults if same else json.loads(own.label))[0]
    conversations.begin(with_pins(empty, own.label, own.pins))
    # (One token is always left to read; the appended one comes after all of them.)
    cache, rest = conversations.fetch_nearest_cache(None, [*tokens, tokens[-1]])
    count, size = len(rest) - 1, int(provider.cli_args.prefill_step_size)
    logging.info("Reading %d tokens of %s again", count, saved.path.stem)
    model = provider.require()
    for first in range(0, count, size):
        model(mx.array([rest[first : min(first + size, count)]]), cache=cache)
        mx.eval([entry.state for entry in cache])
    conversations.insert_cache(None, tokens, cache)
