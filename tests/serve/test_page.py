"""The server's page in a real Chromium: by mouse and keyboard, light and dark, wide and narrow."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import mlx_h2o
from mlx_h2o.evaluate.page import page as report_page
from mlx_h2o.evaluate.report import Curves, Section, Table
from mlx_h2o.serve.memory import most_bytes
from serving import MODEL, SIZE, Running, exchange, serving, until, words

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
#: A machine that does other work takes its time.
PATIENCE = 60_000
expect.set_options(timeout=PATIENCE)
#: Of text on its background, by WCAG 2.2, 1.4.3 (level AA).
LEAST_CONTRAST = 4.5


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(answer_tokens=12, bound=8 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def roomy() -> Iterator[Running]:
    """A server whose smallest layer has room for a short system prompt."""
    with serving(answer_tokens=12, defaults={"max_size": 112}) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser,
    server: Running,
    size: Any = WIDE,
    scheme: Any = "light",
    refused: bool = False,
) -> Any:
    """The page, on which nothing may go wrong unseen; where told, requests may be refused."""
    page = browser.new_page(viewport=size, color_scheme=scheme)
    wrong: list[str] = []

    def check(message: Any) -> None:
        if message.type == "error" and not (refused and "status of 400" in message.text):
            wrong.append(message.text)

    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", check)
    page.set_default_timeout(PATIENCE)
    try:
        page.goto(server.url)
        yield page
        assert wrong == []
    finally:
        page.close()


def say(page: Page, text: str) -> None:
    """Send a message by the keyboard, and wait until what is remembered of it is shown."""
    before = page.evaluate("last")
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")
    until(lambda: page.evaluate("last") != before)
    until(lambda: page.evaluate("view !== null && view.id === last && !view.running"))


def fetched(server: Running, path: str = "") -> Any:
    return exchange(server.port, f"/h2o/conversations{path}")[1]


def newest(server: Running) -> Any:
    """The conversation that was used last, as the server tells it."""
    return fetched(server, "/" + fetched(server)["conversations"][0]["id"])


def share(layers: list[Any], first: int, end: int) -> float:
    holders = sum(sum(layer["holders"][first:end]) for layer in layers)
    return holders / sum(layer["heads"] * (end - first) for layer in layers)


def shares_on_page(page: Page) -> list[tuple[int, int, float, float]]:
    """Each word's first token, the one past its last, what the page found, and what it paints."""
    return [
        tuple(word)
        for word in page.evaluate(
            "words.map(word => [word.first, word.end, word.then, "
            "+word.span.style.getPropertyValue('--share')])"
        )
    ]


def test_a_chat_is_watched_pinned_and_halved(browser, server):
    with opened(browser, server) as page:
        say(page, words(0, 90))
        outline = newest(server)
        answer = page.locator("#log .assistant .body").inner_text()
        assert answer
        assert "".join(outline["texts"]).rstrip().endswith(answer.rstrip())
        expect(page.locator("#status")).to_have_text(f"The model says: {answer}")
        expect(page.locator("#log .more")).to_contain_text("Cut at its limit.")
        expect(page.locator("#log .more")).to_contain_text("tokens/s")
        expect(page.locator("#bar-legend")).to_have_text("this chatother chatsbeing answered")
        expect(page.locator("#bar-legend")).to_be_visible()
        word = page.locator("#text .w:not(.gone)").first
        assert "of the heads" in word.get_attribute("aria-description")
        # As from another machine without TLS, where browsers give pages no clipboard.
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        page.locator("#log .more button").filter(has_text="Copy").click()
        page.locator("#question").press("Control+v")
        expect(page.locator("#question")).to_have_value(answer)
        page.locator("#question").fill("")
        spans = shares_on_page(page)
        assert (spans[0][0], spans[-1][1]) == (0, len(outline["texts"]))
        for first, end, shade, painted in spans:
            assert shade == pytest.approx(share(outline["layers"], first, end))
            assert painted == pytest.approx(0.04 + 0.56 * shade**0.5 if shade else 0, abs=1e-3)
        page.locator("#text .w:not(.gone)").nth(20).click()
        expect(page.locator("#pins button")).to_have_count(1)
        (pinned,) = newest(server)["pins"]
        page.locator("#half").check()
        expect(page.locator("#at-half")).to_contain_text("words would be lost")
        outline = newest(server)
        half = fetched(server, f"/{outline['id']}/half")["layers"]
        lost = sum(
            share(outline["layers"], a, b) > 0 and share(half, a, b) == 0 for a, b, *_ in spans
        )
        assert lost > 0
        expect(page.locator("#text .w.lost")).to_have_count(lost)
        page.locator("#half").uncheck()
        say(page, words(200, 30))
        expect(page.locator("#pins button")).to_have_count(1)
        assert newest(server)["pins"] == [pinned]
        page.locator("#pins button").click()
        expect(page.locator("#pins")).to_be_hidden()
        assert newest(server)["pins"] == []


# -- looks ----------------------------------------------------------------------------------------

# The contrast of each text that is seen, worst first. Backgrounds that let through are painted over
# what is behind them; what is switched off may be faint.
CONTRAST = """
(() => {
  const parse = text => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]);
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(parse(getComputedStyle(at).backgroundColor));
    }
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const light = colour => {
    const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    const [r, g, b] = colour.map(c => linear(c / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ratio = (colour, under) => {
    const [a, b] = [light(over(colour, under)), light(under)].sort((a, b) => b - a);
    return (a + .05) / (b + .05);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    const placeholder = element.placeholder && !element.value;
    if (!(words || placeholder) || !element.checkVisibility({visibilityProperty: true})) continue;
    if (element.closest(".unseen, :disabled, script, option")) continue;
    const colour = parse(getComputedStyle(element, placeholder ? "::placeholder" : null).color);
    const name = `${element.tagName} ${element.id || element.className}`;
    found.push([ratio(colour, behind(element)), name]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()
"""
OVERFLOW = """
[document.documentElement, document.body, ...document.querySelectorAll("section, #log, #text")]
  .filter(element => element.scrollWidth > element.clientWidth)
  .map(element => element.tagName + element.id)
"""


def check_looks(page: Page) -> None:
    assert page.evaluate(OVERFLOW) == []
    contrasts = page.evaluate(CONTRAST)
    assert len(contrasts) > 5
    assert contrasts[0][0] >= LEAST_CONTRAST, contrasts[:5]


@pytest.mark.slow
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_fits_and_can_be_read(browser, roomy, scheme, size):
    with opened(browser, roomy, size, scheme, refused=True) as page:
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 23, 26)"
        assert dark == (scheme == "dark")
        check_looks(page)

        def show(part: str) -> None:
            if size is NARROW:  # one part at a time
                page.locator(f"[data-show={part}]").click()

        page.locator("summary").click()
        page.locator("#system").fill("Be short.")
        check_looks(page)
        # Longer than any head at half the memory, one of which has 308 slots then.
        text = f"{words(0, 220)} {'unbreakable' * 20} end"
        page.locator("#question").fill(text)
        page.locator("#question").press("Enter")
        expect(page.locator("#status")).to_contain_text("The model says")
        check_looks(page)
        show("memory")
        expect(page.locator("#text")).to_be_visible()
        if size is WIDE:
            expect(page.locator("#chat")).to_be_visible()
        expect(page.locator("#pins button")).to_contain_text("Be short.")
        page.locator("#text .w:not(.gone):not(.pinned)").nth(5).click()
        expect(page.locator("#pins button")).to_have_count(2)
        check_looks(page)
        # Half of the smallest layer's room is less than what is pinned.
        page.locator("#half").click()
        expect(page.locator("#pin-problem")).to_contain_text("pinned tokens are too many")
        expect(page.locator("#half")).not_to_be_checked()
        check_looks(page)
        page.locator("#pins button").first.click()
        expect(page.locator("#pins button")).to_have_count(1)
        page.locator("#half").check()
        expect(page.locator("#at-half")).to_be_visible()
        expect(page.locator("#text .w.lost").first).to_be_visible()
        check_looks(page)
        page.locator("#layer").select_option("0")
        assert page.locator("#text .w.gone").count() > 0
        check_looks(page)
        box = page.locator("#text").bounding_box()
        assert box["height"] > 150
        show("chat")
        expect(page.locator("#question")).to_be_in_viewport()


def a_report() -> str:
    """A page of `evaluate` with a table wider than a phone and a chart."""
    columns = ["cache", *(f"{what}, {part}" for part in ("1/2", "1/4") for what in "abcd")]
    rows = Table("by part of the bytes", columns, [["sliding window", *["+0.17 % [0.1, 0.2]"] * 8]])
    lines = {"full cache": [1.0, 2.0], "mlx-h2o": [1.5, 2.5]}
    curves = Curves("Perplexity", [1, 2], lines, "tokens", "perplexity")
    facts = {"model": "builtin:recall-4m", "text": "sample.txt " * 9}
    sections = [Section("Perplexity", "What is measured. " * 9, [rows], [curves]) for _ in "ab"]
    return report_page("A model: what parts cost", facts, sections, ["nothing else"])


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_a_report_uses_the_width_and_scrolls_its_tables(browser, size, tmp_path):
    file = tmp_path / "evaluation.html"
    file.write_text(a_report(), encoding="utf-8")
    page = browser.new_page(viewport=size)
    page.goto(file.as_uri())
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= size["width"]
    box = page.locator("section").first.bounding_box()
    assert box["width"] > 0.9 * size["width"]
    table = page.locator(".wide").first
    scrolls = table.evaluate("at => [at.scrollWidth > at.clientWidth, at.clientWidth]")
    assert scrolls[1] <= size["width"]
    if size is NARROW:
        assert scrolls[0]
        table.focus()
        page.keyboard.press("ArrowRight")
        until(lambda: table.evaluate("at => at.scrollLeft") > 0)
    for picture in page.locator("svg").all():
        assert picture.bounding_box()["width"] <= size["width"]
    page.close()


def test_a_model_is_chosen_and_stays_chosen_after_a_reload(browser):
    with serving(models=(MODEL, "owner/other")) as server, opened(browser, server) as page:
        expect(page.locator("#models option")).to_have_text(["builtin:recall-4m", "other"])
        page.locator("#models").select_option("other")
        page.reload()
        expect(page.locator("#model")).to_have_text("other")
        assert page.evaluate("wanted") == "owner/other"


MARKDOWN = """\
# A title
- one **bold** and `a < b`
  * *two*
```py
x = 1 ** 2 ** 3
```
<img src=x onerror=alert(1)> [a](javascript:alert(1)) 2 * 3 * 4"""


def test_markdown_is_shown_and_html_stays_text(browser, server):
    with opened(browser, server) as page:
        messages = [{"role": role, "content": MARKDOWN} for role in ("user", "assistant")]
        page.evaluate("messages => show(messages, '')", messages)
        body = page.locator("#log .assistant .body")
        parts = {".title": "A title", "strong": "bold", "code": "a < b", "em": "two"}
        for part, text in parts.items():
            assert [one.strip() for one in body.locator(part).all_inner_texts()] == [text]
        assert body.locator("pre").inner_text().strip() == "x = 1 ** 2 ** 3"
        assert body.locator("img, a, script").count() == 0
        last = MARKDOWN.splitlines()[-1]
        assert body.inner_text().splitlines()[-1] == last
        assert "\u2022 one bold" in body.inner_text()
        assert page.locator("#log .user .body").inner_text() == MARKDOWN


# -- keyboard and assistive technology ------------------------------------------------------------

FOCUS = """
(() => {
  const at = document.activeElement, style = getComputedStyle(at);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [at.id || at.dataset.show || at.tagName, seen];
})()
"""


@pytest.mark.slow
def test_everything_is_reached_and_done_by_keyboard(browser, roomy):
    with opened(browser, roomy) as page:
        assert page.evaluate(FOCUS) == ["question", True]
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type(words(0, 40))
        assert page.locator("#question").input_value().startswith("one\n")
        page.keyboard.press("Enter")
        expect(page.locator("#pins")).to_be_attached()
        expect(page.locator("#text")).to_be_visible()
        assert page.evaluate(FOCUS)[0] == "question"
        reached = []
        for _ in range(5):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUS))
        names = ["send", "which", "layer", "half", "text"]
        assert reached == [[name, True] for name in names]
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Shift+ArrowRight")
        page.keyboard.press("Shift+ArrowRight")
        expect(page.locator("#text .w.range")).to_have_count(3)
        page.keyboard.press("Enter")
        expect(page.locator("#pins button")).to_have_count(1)
        expect(page.locator("#pin-status")).to_contain_text("Pinned.")
        spans = shares_on_page(page)
        assert newest(roomy)["pins"] == [[spans[1][0], spans[3][1]]]
        assert page.evaluate(FOCUS) == ["text", True]
        down = page.locator("#text").get_attribute("aria-activedescendant")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowUp")
        assert page.locator("#text").get_attribute("aria-activedescendant") == down
        page.keyboard.press("Tab")
        assert page.evaluate(FOCUS)[1]
        page.keyboard.press("Enter")
        expect(page.locator("#pins")).to_be_hidden()
        assert newest(roomy)["pins"] == []


@pytest.mark.slow
def test_every_control_has_a_name(browser, server):
    with opened(browser, server) as page:
        say(page, words(0, 30))
        page.locator("#text .w:not(.gone)").nth(3).click()
        expect(page.locator("#pins button")).to_have_count(1)
        tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
        roles = {}
        for node in tree:
            role = node.get("role", {}).get("value")
            if role in ("button", "combobox", "checkbox", "textbox", "listbox", "option", "image"):
                name = node.get("name", {}).get("value", "")
                assert name.strip(), node
                roles[role] = roles.get(role, 0) + 1
        assert roles["listbox"] == 1
        assert roles["option"] > 30
        assert {"button", "combobox", "checkbox", "textbox", "image"} <= roles.keys()
        chosen = page.locator("#text .w[aria-selected=true]")
        expect(chosen).to_have_count(1)
        assert "pinned" in chosen.get_attribute("aria-description")


# -- what may happen ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_said_is_text_and_nothing_else_is_loaded(browser, server):
    with opened(browser, server) as page:
        urls = []
        page.on("request", lambda request: urls.append(request.url))
        page.on("dialog", lambda dialog: urls.append("a dialog"))
        text = "<img src=x onerror=alert(1)><script>alert(2)</script> & end"
        say(page, text)
        assert page.locator("#log .user .body").inner_text() == text
        assert page.locator("#log img, #text img, #log script, #text script").count() == 0
        assert urls
        assert all(url.startswith(server.url) for url in urls)
    with serving() as other:
        page = browser.new_page()
        page.goto(server.url)
        attempt = f"fetch('{other.url}/v1/models').then(() => 'read', () => 'blocked')"
        assert page.evaluate(attempt) == "blocked"
        inline = (
            "document.body.append(Object.assign(document.createElement('script'), {text: '1'}))"
        )
        with pytest.raises(Exception, match="TrustedScript"):
            page.evaluate(inline)
        page.close()


@pytest.mark.slow
def test_an_answer_can_be_stopped_and_the_chat_goes_on(browser):
    with serving(answer_tokens=100_000) as server, opened(browser, server) as page:
        page.locator("#question").fill(words(0, 30))
        page.locator("#question").press("Enter")
        expect(page.locator("#log .assistant .body")).not_to_be_empty()
        expect(page.locator("#send")).to_have_text("Stop")
        page.locator("#send").click()
        expect(page.locator("#send")).to_have_text("Send")
        expect(page.locator("#log .stopped")).to_have_count(1)
        until(lambda: server.scheduler.ledger.running == 0)
        page.locator("#new").click()
        expect(page.locator("#log li")).to_have_count(1)
        expect(page.locator("#question")).to_be_focused()


def test_a_reload_keeps_the_chat_and_a_listed_conversation_goes_on(browser, roomy):
    """By the same tokens: what is continued is read from where it stands."""
    server = roomy
    with opened(browser, server) as page:
        page.locator("summary").click()
        page.locator("#system").fill("Be short.")
        say(page, words(0, 20))
        text = page.locator("#log .body").all_inner_texts()
        state = page.evaluate("[last, messages]")
        page.reload()
        until(lambda: page.evaluate("view !== null && view.id === last"))
        assert page.locator("#log .body").all_inner_texts() == text
        assert page.evaluate("[last, messages]") == state
        say(page, words(60, 10))
        assert len(newest(server)["texts"]) > len(text)
        page.locator("#new").click()
        expect(page.locator("#go-on")).to_be_hidden()
        urls = [{"role": "user", "content": f"Remember the ferret. {words(300, 20)}"}]
        answer = server.client.chat.completions.create(model=MODEL, messages=urls, max_tokens=4)
        option = page.locator("#which option", has_text="Remember the ferret")
        expect(option).to_have_count(1)
        page.locator("#which").select_option(option.get_attribute("value"))
        before = fetched(server, f"/{answer.id}")
        page.locator("#go-on").click()
        expect(page.locator("#log .user .body")).to_have_text(urls[0]["content"])
        until(lambda: page.evaluate("view !== null && view.id === last"))
        expect(page.locator("#go-on")).to_be_hidden()
        say(page, words(90, 10))
        after = newest(server)["texts"]
        assert after[: len(before["texts"]) - 1] == before["texts"][:-1]
        assert page.evaluate("messages.length") == 4


def test_stop_leaves_the_memory_view_whole(browser):
    with serving(answer_tokens=100_000) as server, opened(browser, server) as page:
        page.locator("#question").fill(words(0, 30))
        page.locator("#question").press("Enter")
        until(lambda: page.evaluate("view?.running === true"))
        page.locator("#send").click()
        expect(page.locator("#send")).to_have_text("Send")
        until(lambda: server.scheduler.ledger.running == 0)
        page.evaluate("look(false)")
        expect(page.locator("#text")).to_be_visible()
        expect(page.locator("#nothing")).to_be_hidden()
        assert page.locator("#text .w").count() > 20


# When each look at an answer that is being given began, in milliseconds.
LOOKS = """
performance.getEntriesByType("resource").filter(one => one.name.includes("from="))
  .map(one => one.startTime)
"""


# What is shown of an answer that is being given, in one piece: it changes with each look.
SHADED = """
(() => {
  const spans = [...document.querySelectorAll("#text .w")];
  return {
    tokens: view.texts.length,
    holders: view.layers.map(layer => layer.holders.length),
    first: words[0].span === window.first && window.first.isConnected,
    words: words.map(({first, end, span}) => [first, end, +span.style.getPropertyValue("--share")]),
    text: words.map(word => word.text).join("") === view.texts.join(""),
    spans: spans.length === words.length && spans.every((span, i) => span === words[i].span),
  };
})()
"""


@pytest.mark.slow
def test_the_text_is_shaded_while_it_is_said(browser):
    """A second apart at least, and what stands there already is left where it is."""
    with serving(answer_tokens=100_000) as server, opened(browser, server) as page:
        page.locator("#question").fill(words(0, 60))
        page.locator("#question").press("Enter")
        until(lambda: page.evaluate("view?.running === true"))
        page.evaluate("window.first = words[0].span")
        before = page.evaluate("view.texts.length")
        expect(page.locator("#text")).to_be_visible()
        until(lambda: page.evaluate("view.texts.length") > before)
        until(lambda: len(page.evaluate(LOOKS)) >= 3)
        # A slow machine says little between two looks: until some word is in no head.
        until(lambda: page.evaluate("words.some(word => word.now === 0)"))
        shade = page.evaluate(SHADED)
        assert set(shade["holders"]) == {shade["tokens"]}
        assert shade["first"]
        painted = shade["words"]
        assert (painted[0][0], painted[-1][1]) == (0, shade["tokens"])
        assert 0 < sum(share > 0 for *_, share in painted) < len(painted)
        assert shade["text"]
        assert shade["spans"]
        assert min(b - a for a, b in itertools.pairwise(page.evaluate(LOOKS))) >= 1000
        page.locator("#send").click()
        expect(page.locator("#send")).to_have_text("Send")
        page.wait_for_timeout(1200)  # a look may be on its way
        count = len(page.evaluate(LOOKS))
        page.wait_for_timeout(1200)
        assert len(page.evaluate(LOOKS)) == count


@pytest.mark.slow
def test_a_full_server_says_so_and_the_words_are_kept(browser):
    need = most_bytes(mlx_h2o.make_prompt_cache(mlx_h2o.load(MODEL)[0], SIZE))
    with serving(bound=need, queue=0) as server:
        page = browser.new_page()
        page.goto(server.url)
        stream = server.client.completions.create(
            model=MODEL, prompt=words(0, 20), max_tokens=100_000, stream=True
        )
        until(lambda: server.scheduler.ledger.running == 1)
        page.locator("#question").fill("Are you there?")
        page.locator("#question").press("Enter")
        expect(page.locator("#problem")).to_contain_text("The queue is full. Try again in")
        expect(page.locator("#question")).to_have_value("Are you there?")
        assert page.locator("#log .user").count() == 0
        expect(page.locator("#first")).to_be_visible()
        expect(page.locator("#bytes")).to_contain_text("for all conversations")
        stream.close()
        page.close()


@pytest.mark.slow
def test_an_answer_that_was_cut_is_continued_and_another_is_given(browser, server):
    with opened(browser, server) as page:
        say(page, words(700, 20))
        body, more = page.locator("#log .assistant .body"), page.locator("#log .more button")
        first = body.inner_text()
        for name in ("Continue", "Another answer"):
            before = page.evaluate("last")
            more.filter(has_text=name).click()
            until(lambda before=before: page.evaluate("last") != before)
            until(lambda: page.evaluate("view?.id === last && !view.running"))
            answer = page.evaluate("messages.at(-1).content")
            assert body.inner_text() == answer
            assert "".join(newest(server)["texts"]).rstrip().endswith(answer.rstrip())
            assert page.evaluate("messages.length") == 2
            expect(page.locator("#log .more")).to_have_count(1)
            if name == "Continue":
                assert [one["content"] for one in newest(server)["messages"]][1:] == [answer]
                assert answer.startswith(first)
                assert len(answer) > len(first)


@pytest.mark.slow
def test_what_is_refused_keeps_the_answer_and_its_buttons(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    say(page, words(720, 20))
    body, more = page.locator("#log .assistant .body"), page.locator("#log .more button")
    answer, problem = body.inner_text(), page.locator("#problem")
    for name in ("Continue", "Another answer"):
        page.locator("#warmth").evaluate("box => box.value = -1")
        more.filter(has_text=name).click()
        expect(problem).to_contain_text("temperature")
        expect(more).to_have_text(["Continue", "Copy", "Another answer"])
        assert body.inner_text() == page.evaluate("messages.at(-1).content") == answer
    page.locator("#warmth").evaluate("box => box.value = ''")
    more.filter(has_text="Continue").click()
    expect(problem).to_be_empty()
    page.close()


@pytest.mark.slow
def test_conversations_of_other_clients_are_shown(browser, server):
    with opened(browser, server) as page:
        say(page, words(0, 20))
        messages = [{"role": "user", "content": f"Remember the zebra. {words(400, 30)}"}]
        server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        option = page.locator("#which option", has_text="Remember the zebra")
        expect(option).to_have_count(1)
        page.locator("#which").select_option(option.get_attribute("value"))
        expect(page.locator("#text")).to_contain_text("zebra")
        page.locator("#which").select_option("")
        expect(page.locator("#text")).not_to_contain_text("zebra")


@pytest.mark.slow
def test_what_is_selected_is_pinned_by_a_button(browser, roomy):
    with opened(browser, roomy) as page:
        say(page, words(0, 30))
        page.evaluate(
            "getSelection().setBaseAndExtent("
            "words[2].span.firstChild, 0, words[4].span.firstChild, 1)"
        )
        page.locator("#pin-range").click()
        expect(page.locator("#pins button")).to_have_count(1)
        spans = shares_on_page(page)
        assert newest(roomy)["pins"] == [[spans[2][0], spans[4][1]]]
        expect(page.locator("#pin-range")).to_be_hidden()


@pytest.mark.slow
def test_pins_that_a_turn_did_not_carry_over_are_set_again(browser, server):
    """Another client asks the same, and its conversation, without pins, takes the other's place."""
    with opened(browser, server) as page:
        urls = words(500, 20)
        say(page, urls)
        page.locator("#text .w").nth(0).click()
        expect(page.locator("#pins button")).to_have_count(1)
        pins = newest(server)["pins"]
        assert pins
        server.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": urls}]
        )
        assert newest(server)["pins"] == []
        say(page, words(530, 20))
        until(lambda: newest(server)["pins"] == pins)
        expect(page.locator("#pins button")).to_have_count(1)
