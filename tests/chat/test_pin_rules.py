"""What to pin, said in words, and where that stands in a prompt's tokens."""

import pytest

import mlx_h2o
from mlx_h2o.chat.pin_rules import DEFINITIONS, PinRules, sentences_of, spans_for

TEXT = """You are a clerk. Answer in French, always.

"Goods" means anything that is sold. He said: "Go!" Then he went (at last).
The Fee shall mean ten ducats – ünd no more 🙂! Nothing else matters
"""


class Letters:
    """A tokenizer: a token a byte, so that some characters are several tokens."""

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def pinned(rules: PinRules, text: str = TEXT, first: int = 0, messages=()) -> list[str]:
    tokens = tokens_of(text)
    spans = spans_for(rules, Letters(), tokens, messages, first)
    return [bytes(tokens[a - first : b - first]).decode() for a, b in spans]


def test_sentences():
    found = [TEXT[a:b] for a, b in sentences_of(TEXT)]
    assert found == [
        "You are a clerk.",
        "Answer in French, always.",
        '"Goods" means anything that is sold.',
        'He said: "Go!"',
        "Then he went (at last).",
        "The Fee shall mean ten ducats – ünd no more 🙂!",
        "Nothing else matters",
    ]
    assert sentences_of("") == []


def test_patterns_pin_whole_sentences():
    assert pinned(PinRules(patterns=(DEFINITIONS,))) == [
        '"Goods" means anything that is sold.',
        "The Fee shall mean ten ducats – ünd no more 🙂!",
    ]
    assert pinned(PinRules(patterns=("unheard",))) == []
    # A match across sentences takes all of them.
    assert pinned(PinRules(patterns=(r"said.*\bwent",))) == [
        'He said: "Go!" Then he went (at last).'
    ]


def test_texts_pin_themselves_everywhere():
    assert pinned(PinRules(texts=("He", "ünd no more 🙂"))) == ["He", "ünd no more 🙂"]
    assert pinned(PinRules(texts=("an",)), "an ant and a man", first=100) == ["an"] * 4
    spans = spans_for(PinRules(texts=("ant",)), Letters(), tokens_of("an ant"), first=100)
    assert spans == ((103, 106),)
    for text in ("unheard", ""):
        with pytest.raises(ValueError, match="does not contain"):
            pinned(PinRules(texts=(text,)))


def test_a_predicate_is_asked_of_sentences():
    assert pinned(PinRules(predicate=lambda s: s.startswith("Answer"))) == [
        "Answer in French, always."
    ]


def test_roles():
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Be brief."},
        {"role": "system", "content": "Now be long."},
    ]
    text = "<sys>Be brief.</s><user>Be brief.</s><sys>Now be long.</s>"
    assert pinned(PinRules(roles=("system",)), text, messages=messages) == [
        "<sys>Be brief.",
        "Now be long.",
    ]
    assert pinned(PinRules(roles=("user",)), text, messages=messages) == ["Be brief."]
    with pytest.raises(ValueError, match="no assistant message"):
        pinned(PinRules(roles=("assistant",)), text, messages=messages)
    with pytest.raises(ValueError, match="as it was written"):
        pinned(PinRules(roles=("system",)), "<sys>BE BRIEF</s>", messages=messages[:1])


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ValueError, match="regular expression"):
        PinRules(patterns=("(",))
    assert not PinRules()
    assert spans_for(PinRules(), Letters(), tokens_of("abc")) == ()


def test_a_real_tokenizer():
    _, tokenizer = mlx_h2o.load("builtin:recall-4m")
    tokens = tokenizer.encode(TEXT)
    spans = spans_for(PinRules(patterns=("Fee",), texts=("French",)), tokenizer, tokens)
    texts = [tokenizer.decode(tokens[a:b]) for a, b in spans]
    assert "French" in texts[0]
    assert texts[1].strip().startswith("The Fee")
    assert texts[1].strip().endswith("!")


def test_tokens_by_their_numbers():
    tokens = tokens_of("an ant and a man")
    rules = PinRules(texts=("ant",), spans=((0, 1), (4, 8)))
    assert spans_for(rules, Letters(), tokens, first=100) == ((100, 101), (103, 108))
    assert rules
    with pytest.raises(ValueError, match="0:99 cannot be pinned: the prompt has 16 tokens"):
        spans_for(PinRules(spans=((0, 99),)), Letters(), tokens)
    with pytest.raises(ValueError, match=r"spans\[0\] must be"):
        PinRules(spans=((3, 3),))
