"""What the trace of a text and its page say is what the caches really held."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.chat.retention import PAGE, Trace, bounded_layers, token_texts, trace
from mlx_h2o.cli import inspect, main
from mlx_h2o.loading.load import SAMPLE_TEXT

INSPECT = ["inspect", "--model", "builtin:recall-4m"]

TOKENS = 128
HOSTILE = (
    'She wrote <b>"1 & 2"</b></script><script>alert(1)</script> {{data}} naïve 🙂\r\n\n$& \\1 end'
)

CACHES: dict[str, Any] = {
    # Unequal heads, the smaller one's budget below the prefill: its prompt is reduced.
    "two budgets": lambda model: [H2OKVCache(budgets=[24, 70]) for _ in model.layers],
    "keys only": lambda model: mlx_h2o.make_prompt_cache(
        model, 48, policy="streaming", remainder=False, budgets="uniform"
    ),
    "two at once": lambda model: mlx_h2o.make_prompt_cache(
        model, 48, policy="h2o:evict_every=2", budgets="uniform"
    ),
}


@pytest.fixture(scope="module")
def builtin() -> tuple[Any, Any]:
    mlx_h2o.install()
    return mlx_h2o.load("builtin:recall-4m")


def positions_held(cache: list[Any]) -> list[set[int]]:
    """Per head, layer by layer, the positions that a cache holds."""
    return [
        set(np.array(entry.store.view(run, "positions"))[0, head].tolist())
        for entry in cache
        for run in entry.store.runs
        for head in range(run.heads)
    ]


@pytest.fixture(scope="module", params=CACHES)
def watched(request: Any, builtin: tuple[Any, Any]) -> tuple[Trace, dict[int, list[set[int]]]]:
    """A trace, and what its caches held after each number of tokens."""
    model, tokenizer = builtin
    text = SAMPLE_TEXT.read_text(encoding="utf-8")
    tokens = tokenizer.encode(text, truncation=True, max_length=TOKENS)
    cache = CACHES[request.param](model)
    seen: dict[int, list[set[int]]] = {}

    def watch(read: int, total: int) -> None:
        assert total == TOKENS
        seen[read] = positions_held(cache)

    return trace(model, tokenizer, tokens, cache, prefill=32, progress=watch), seen


def test_held_sets_are_the_caches(watched):
    traced, seen = watched
    assert sorted(seen) == [32, *range(33, TOKENS + 1)]
    for read, sets in seen.items():
        assert [set(np.flatnonzero(row).tolist()) for row in traced.presence(read)] == sets
    assert max(len(held) for held in seen[TOKENS]) < TOKENS


def test_dropped_tokens_were_held_before(watched):
    traced, seen = watched
    dropped = np.argwhere(traced.dropped_at >= 0)
    assert len(dropped)
    for head, position in dropped.tolist():
        step = int(traced.dropped_at[head, position])
        assert position not in seen[step][head]
        if step > 32:
            assert position in seen[step - 1][head]
            assert np.isfinite(traced.last_priority[head, position])


def test_sinks_and_recent_tokens_are_never_dropped(watched):
    traced, _ = watched
    assert (traced.dropped_at[:, : traced.sink] == -1).all()
    for head, row in zip(traced.heads, traced.dropped_at, strict=True):
        gone = np.flatnonzero(row >= 0)
        # A chunk is reduced at once; a victim is chosen after one step and overwritten in the next.
        chosen = row[gone] - (row[gone] > 32)
        assert (gone < chosen - head.recent).all()


def test_the_lowest_priority_goes_first(builtin):
    model, tokenizer = builtin
    tokens = tokenizer.encode(SAMPLE_TEXT.read_text(), truncation=True, max_length=60)
    cache = [H2OKVCache(budgets=[40, 40], policy="tova") for _ in model.layers]
    before = trace(model, tokenizer, tokens[:50], cache, prefill=16)
    # The next token overwrites what is lowest now among the unprotected.
    again = [H2OKVCache(budgets=[40, 40], policy="tova") for _ in model.layers]
    after = trace(model, tokenizer, tokens[:51], again, prefill=16)
    for head in range(len(before.heads)):
        gone = np.flatnonzero(after.dropped_at[head] == 51)
        held = np.flatnonzero(before.presence()[head])
        free = held[(held >= before.sink) & (held < 50 - before.heads[head].recent)]
        assert gone.tolist() == [free[before.last_priority[head, free].argmin()]]


def test_streaming_forgets_the_oldest_words(watched):
    traced, _ = watched
    words = traced.old_words(10)
    assert len(words) == 10
    assert all(0 <= share <= 1 and word in "".join(traced.texts) for word, share in words)
    if traced.policy == "streaming":
        assert all(share == 0 for _, share in words)
        assert np.isnan(traced.last_score).all()


def test_a_used_cache_is_refused(builtin):
    model, tokenizer = builtin
    cache = mlx_h2o.make_prompt_cache(model, 48)
    trace(model, tokenizer, [1, 2, 3], cache)
    with pytest.raises(ValueError, match="fresh cache"):
        trace(model, tokenizer, [1, 2, 3], cache)
    with pytest.raises(ValueError, match="at least one token"):
        trace(model, tokenizer, [], mlx_h2o.make_prompt_cache(model, 48))
    assert [layer for layer, _ in bounded_layers(cache)] == ["0", "1", "2", "3"]


def test_token_texts_make_up_the_text(builtin):
    _, tokenizer = builtin
    tokens = tokenizer.encode(HOSTILE)
    texts = token_texts(tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == tokenizer.decode(tokens)
    assert "🙂" in texts


class Page(HTMLParser):
    """The words of a page's text, its scripts and attributes; tags must be closed in order."""

    VOID = ("meta", "input", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.in_text: int | None = None
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag in self.VOID:
            return
        self.open.append(tag)
        if ("id", "text") in attrs:
            self.in_text = len(self.open)
        elif self.in_text:
            self.words.append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if self.in_text and len(self.open) < self.in_text:
            self.in_text = None

    def handle_data(self, data: str) -> None:
        if self.in_text:
            self.words[-1] += data
        elif self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def test_the_page_holds_every_token_and_loads_nothing(builtin):
    model, tokenizer = builtin
    tokens = tokenizer.encode(HOSTILE)
    cache = mlx_h2o.make_prompt_cache(model, 24)
    traced = trace(model, tokenizer, tokens, cache, prefill=8, name="<the & model>")
    markup = traced.html()
    page = Page(markup)
    assert page.words == traced.texts
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "srcset", "action"}
    for loader in ("http://", "https://", "src=", "@import", "url(", "fetch("):
        assert loader not in markup
    data, code = page.scripts
    assert json.loads(data)["dropped_at"] == traced.dropped_at.tolist()
    assert json.loads(data)["model"] == "<the & model>"
    assert '"use strict"' in code


def test_the_page_explains_its_colours_and_fits_a_phone():
    """Every colour of the strips has a legend in both views; the hint wraps on narrow screens.

    (How it looks, at 400 and 1280 pixels, light and dark, was seen in Chromium by hand.)
    """
    page = PAGE.read_text(encoding="utf-8")
    legend = page[page.index("function legend()") : page.index("const number")]
    kinds, views = legend.split("const rows = chosen < 0")
    for colour in re.findall(r'"(--\w+)"', page[page.index("const hue") :].split("};")[0]):
        assert f"var({colour})" in kinds
    all_heads, one_head = views.split("\n    : ")
    assert "kinds" in all_heads
    assert "kinds" in one_head
    style = page[: page.index("</style>")]
    wide, narrow = style.split("@media (max-width: 40rem)")  # last, so that nothing undoes it
    about = re.search(r"#about \{([^}]*)\}", narrow)
    assert about
    assert "white-space: normal" in about[1]
    assert "@media" not in narrow
    lines = int(re.findall(r"-webkit-line-clamp: (\d)", about[1])[0])
    hint = re.findall(r'<p id="about">(.*?)</p>', page)[0]
    assert len(hint) < lines * 45  # characters of that size in a line of 368 pixels, at the least


def test_the_command_writes_a_page(tmp_path, capsys):
    out = tmp_path / "page.html"
    options = ["--tokens", "100", "--max-kv-size", "40", "--out", str(out)]
    assert main([*INSPECT, *options]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(str(out))
    assert len(printed) == 5
    assert "100 tokens were read by builtin:recall-4m" in printed[1]
    assert "a KV head holds" in printed[2]
    assert "held by some head" in printed[3]
    assert "old words" in printed[4]
    assert main([*INSPECT, *options, "--all"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("layer 3: ")
    assert len(Page(out.read_text(encoding="utf-8")).words) == 100

    assert main([*INSPECT, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(out)
    assert len(found["texts"]) == 100
    assert np.array(found["dropped_at"]).shape == (len(found["heads"]), 100)


def test_a_short_text_is_remembered_whole(tmp_path, capsys):
    text = tmp_path / "short.txt"
    text.write_text("A short tale of Anne.", encoding="utf-8")
    assert main([*INSPECT, "--text", str(text), "--out", str(tmp_path / "page.html")]) == 0
    assert "nothing was dropped" in capsys.readouterr().out


def test_an_interrupted_command_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    options = [*INSPECT, "--tokens", "20", "--out", str(tmp_path / "page.html")]
    monkeypatch.setattr(Trace, "html", interrupted)
    assert main(options) == 130
    monkeypatch.setattr(inspect, "trace", interrupted)
    assert main(options) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "--tokens and --prefill must be at least 1"),
        (["--prefill", "0"], "--tokens and --prefill must be at least 1"),
        (["--text", "no such file"], "Cannot read the text"),
        (["--out", "no/such/folder/page.html"], "there is no folder"),
        (["--max-kv-size", "6", "--profile", "uniform"], "make --max-kv-size at least 8"),
    ],
)
def test_bad_options_say_what_to_do(options, message, capsys):
    assert main([*INSPECT, *options]) == 2
    assert message in capsys.readouterr().err
