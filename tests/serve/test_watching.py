"""What the server tells of its idle conversations, to whom, and pins set there."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

import mlx_h2o
from mlx_h2o.caches.conversation import bounded_entries
from mlx_h2o.serve.access import AccessRules, is_loopback
from mlx_h2o.serve.conversations import pieces_of
from mlx_h2o.serve.errors import ApiError
from mlx_h2o.serve.keys import tokens_of
from serving import MODEL, Running, exchange, serving, words


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def fetch(server: Running, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and answer."""
    return exchange(server.port, path, body, **headers)[:2]


def chat(server: Running, *chat_answer: str, tokens: int = 6, **options: Any) -> Any:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(chat_answer)]
    return server.client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=tokens, temperature=0, **options
    )


def place(answer: Any) -> str:
    return f"/h2o/conversations/{answer.id}"


def view_of(server: Running, answer: Any) -> dict[str, Any]:
    """A conversation, but for the time that telling it took."""
    view = fetch(server, place(answer))[1]
    assert view.pop("seconds") >= 0
    return view


@pytest.fixture(scope="module")
def chat_answer(server) -> Any:
    """An answer of some 80 tokens of conversation."""
    return chat(server, words(800, 60), tokens=2)


def idle_of(server: Running, answer: Any) -> Any:
    return server.scheduler.conversations.named(answer.id)


# -- what is told ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["batched", "alone"])
def test_a_conversation_is_told_by_the_name_of_its_answer(server, options):
    answer = chat(server, words(0, 70), **options)
    status, view = fetch(server, place(answer))
    assert status == 200
    idle = idle_of(server, answer)
    tokens = tokens_of(idle.place.key)
    assert "".join(view["texts"]) == server.scheduler.models.loaded[0].tokenizer.decode(tokens)
    assert view["title"] == words(0, 70)[: len(view["title"]) - 1].rstrip() + "…"
    assert view["bytes"] == sum(entry.nbytes for entry in idle.cache)
    assert len(view["layers"]) == len(idle.cache)
    for layer, entry in zip(view["layers"], idle.cache, strict=True):
        holders = np.zeros(len(tokens), int)
        for run in entry.store.runs:
            for head in np.array(entry.slots(run).positions[0]):
                holders[head] += 1
        assert layer["holders"] == holders.tolist()
        assert 0 < max(layer["holders"]) <= layer["heads"]
        assert sum(layer["holders"]) < layer["heads"] * len(tokens)


def test_an_answer_is_watched_while_it_is_given(server):
    """As far as it is; nobody's tokens change, and texts that are known are not told again."""
    prompt = words(0, 60)

    def complete(**options: Any) -> Any:
        return server.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=250, temperature=0, **options
        )

    expected = complete().choices[0].text
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(complete)
        text, looks = "", []
        for event in complete(stream=True):
            text += event.choices[0].text
            if len(looks) < 4:
                count = len(looks[-1]["texts"]) if looks else 0
                status, view = fetch(server, f"{place(event)}?from={count}")
                assert status == 200
                view["texts"] = (looks[-1]["texts"] if looks else []) + view["texts"]
                looks.append(view)
        assert text == expected == beside.result().choices[0].text
    while_running = [view for view in looks if view["running"]]
    assert while_running
    assert [len(view["texts"]) for view in looks] == [view["tokens"] for view in looks]
    last = fetch(server, place(event))[1]
    assert not last["running"]
    for view in looks:
        assert last["texts"][: view["tokens"] - 1] == view["texts"][:-1]
        for layer in view["layers"]:
            assert len(layer["holders"]) == view["tokens"]
            assert 0 < sum(layer["holders"]) <= layer["heads"] * view["tokens"]
    assert fetch(server, f"{place(event)}?from=x")[0] == 400


def test_all_conversations_and_their_bytes_are_listed(server):
    first, second = chat(server, words(100, 20)), chat(server, words(200, 20))
    status, view = fetch(server, "/h2o/conversations")
    assert status == 200
    assert [one["id"] for one in view["conversations"]][:2] == [second.id, first.id]
    assert view["bytes"]["idle"] == server.scheduler.conversations.nbytes
    assert view["bytes"]["bound"] is None
    assert view["models"] == [MODEL]


def test_a_conversation_goes_by_the_name_of_its_last_answer(server):
    first = chat(server, words(300, 30))
    text = first.choices[0].message.content
    second = chat(server, words(300, 30), text, words(330, 5))
    assert fetch(server, place(second))[0] == 200
    if second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens:
        status, view = fetch(server, place(first))
        assert status == 404
        assert "later answer" in view["error"]["message"]
    # A client that asked the same and got the same is told the same.
    again = chat(server, words(300, 30), text, words(330, 5))
    assert fetch(server, place(again))[1]["texts"] == fetch(server, place(second))[1]["texts"]


def test_what_half_the_memory_would_hold_is_what_shrinking_leaves(server):
    answer = chat(server, words(400, 90))
    before = view_of(server, answer)
    idle = idle_of(server, answer)
    status, half = fetch(server, place(answer) + "/half")
    assert status == 200
    smaller = copy.deepcopy(idle.cache)
    mlx_h2o.resize(smaller, max_bytes=sum(entry.nbytes for entry in smaller) // 2)
    for layer, entry, whole in zip(half["layers"], smaller, before["layers"], strict=True):
        assert sum(layer["holders"]) == sum(
            np.array(entry.slots(run).positions).size for run in entry.store.runs
        )
        assert all(a <= b for a, b in zip(layer["holders"], whole["holders"], strict=True))
    assert half["bytes"] <= before["bytes"] / 2
    assert view_of(server, answer) == before  # nothing shrank
    small = chat(server, words(500, 30), extra_body={"mlx_h2o": {"max_size": 12}})
    status, view = fetch(server, place(small) + "/half")
    assert status == 400
    assert view["error"]["message"]


# -- pins -----------------------------------------------------------------------------------------


def test_pins_hold_through_the_turns_that_follow(server):
    prompt = words(600, 40)
    answer = chat(server, prompt)
    before = fetch(server, place(answer))[1]
    whole = [layer["heads"] for layer in before["layers"]]
    span = next(
        [i, i + 1]
        for i in range(8, len(before["texts"]))
        if [layer["holders"][i] for layer in before["layers"]] == whole
    )
    status, view = fetch(server, place(answer) + "/pins", {"pin": [span]})
    assert (status, view) == (200, {"pins": [span], "partly": [], "gone": []})
    text = answer.choices[0].message.content
    for start in (640, 700):
        prompt_of = [prompt, text, words(start, 60)]
        later = chat(server, *prompt_of)
        state = fetch(server, place(later))[1]
        if later.usage.prompt_tokens_details.cached_tokens < len(before["texts"]):
            pytest.fail("The conversation was not gone on with.")
        assert state["pins"] == [span]
        assert [layer["holders"][span[0]] for layer in state["layers"]] == whole
    status, view = fetch(server, place(later) + "/pins", {"unpin": [span]})
    assert (status, view["pins"]) == (200, [])


def test_a_layer_that_is_too_small_for_a_pin_gets_slots_of_the_others():
    with serving(defaults={"max_size": 112}) as server:
        answer = chat(server, words(0, 200))
        before = fetch(server, place(answer))[1]
        holders = np.array([layer["holders"] for layer in before["layers"]])
        everywhere = (holders > 0).all(axis=0)
        first = next(i for i in range(8, len(everywhere)) if everywhere[i : i + 4].all())
        span = [first, first + 4]
        alone = copy.deepcopy(idle_of(server, answer).cache)
        with pytest.raises(ValueError, match="too many"):
            [entry.pin([span]) for entry in alone]
        status, view = fetch(server, place(answer) + "/pins", {"pin": [span]})
        assert (status, view["pins"]) == (200, [span])
        assert fetch(server, place(answer))[1]["bytes"] <= before["bytes"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "EOF"),
        (b"\xff", "expected value"),
        ([], "The body must be"),
        ({}, "The body must be"),
        ({"pins": [[0, 1]]}, "The body must be"),
        ({"pin": [[0, 1]], "unpin": [[0, 1]]}, "The body must be"),
        ({"pin": []}, "names no tokens"),
        ({"pin": "all"}, "must be a list"),
        ({"pin": 5}, "must be a list"),
        ({"pin": [[3, 3]]}, "first below last"),
        ({"pin": [[-1, 3]]}, "pin[0]"),
        ({"pin": [[0.5, 3]]}, "pin[0]"),
        ({"pin": [[True, 3]]}, "pin[0]"),
        ({"pin": [[0, 10**30]]}, "pin[0][1] must be at most"),
        ({"pin": [[0, 79]]}, "pin"),
        ({"unpin": {"a": 1}}, "unpin"),
    ],
)
def test_pins_that_cannot_be_are_refused_with_the_reason(server, chat_answer, body, why):
    before = view_of(server, chat_answer)
    status, view = fetch(server, place(chat_answer) + "/pins", body)
    assert status == 400
    assert why in view["error"]["message"]
    assert view_of(server, chat_answer) == before


def test_what_every_head_forgot_cannot_be_pinned(server):
    answer = chat(server, words(900, 150), tokens=2)
    layers = fetch(server, place(answer))[1]["layers"]
    lost = next(
        i for i in range(len(layers[0]["holders"])) if not any(of["holders"][i] for of in layers)
    )
    status, view = fetch(server, place(answer) + "/pins", {"pin": [[lost, lost + 1]]})
    assert status == 400
    assert "cannot be pinned" in view["error"]["message"]


def test_pins_are_in_the_file_of_a_conversation_also_after_it_shrank(tmp_path):
    with serving(sessions=tmp_path) as server:
        answer = chat(server, words(0, 60))
        path = place(answer)
        assert fetch(server, f"{path}/pins", {"pin": [[1, 3]]})[0] == 200
        conversations = server.scheduler.conversations
        idle = idle_of(server, answer)
        half = sum(idle.pieces.values()) - 1
        server.scheduler.call(lambda: room(conversations, half)).result()
        assert fetch(server, path)[1]["shrunk"]
        status, view = fetch(server, f"{path}/pins", {"pin": [[0, 1]]})
        assert status == 200, view
        assert (status, view["pins"]) == (200, [[0, 3]])
        (saved,) = conversations.sessions.notes
        whole = server.scheduler.call(lambda: conversations.sessions.load(saved)).result()
        assert [entry.pins for entry in bounded_entries(whole)] == [((0, 3),)] * len(whole)
        assert pieces_of(whole).keys().isdisjoint(pieces_of(idle.cache))
        assert whole[0].size() > idle.cache[0].size()


def room(conversations: Any, left: int) -> None:
    own = conversations._left
    conversations._left = lambda: left
    conversations.make_room()
    conversations._left = own


# -- to whom --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/h2o/", "/h2o/conversations/", "/h2o/conversations/x", "/h2o/conversations/../../etc/passwd",
     "/h2o/conversations/x/half", "/h2o/conversations/%2e%2e/half", "/h2o/sessions",
     "/h2o/conversations/" + "x" * 3000],
)  # fmt: skip
def test_there_is_nothing_at_other_paths(server, path):
    assert fetch(server, path)[0] == 404
    assert fetch(server, path + "/pins", {"pin": [[0, 1]]})[0] == 404


def test_to_watch_an_answer_that_is_over_is_no_failure(server):
    assert fetch(server, "/h2o/conversations/x?from=0") == (200, None)
    assert fetch(server, "/h2o/conversations/x?from=few")[0] == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"},
        {"Host": "localhost.evil.example"},
        {"Host": "10.0.0.5"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_pages_of_elsewhere_are_told_nothing(server, chat_answer, headers):
    for path, body in (
        ("/h2o/conversations", None),
        (place(chat_answer), None),
        (f"{place(chat_answer)}/half", None),
        (f"{place(chat_answer)}/pins", {"pin": [[0, 1]]}),
    ):
        status, view = fetch(server, path, body, **headers)
        assert status == 403
        assert set(view) == {"error"}
    assert fetch(server, place(chat_answer))[1]["pins"] == []


@pytest.mark.parametrize(
    ("host", "nearby"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True),
        ("localhost", True), ("LOCALHOST.", True), ("a.localhost", True),
        ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False), ("", False), ("0.0.0.0", False),
        ("192.168.1.2", False), ("localhost.evil.example", False), ("127.0.0.1.nip.io", False),
    ],
)  # fmt: skip
def test_what_is_the_machine_itself(host, nearby):
    assert is_loopback(host) == nearby


def request_from(peer: str, host: str, **headers: str) -> Request:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return Request(
        {
            "type": "http", "method": "GET", "path": "/h2o/conversations", "client": (peer, 1),
            "server": ("0.0.0.0", 8123), "headers": [(b"host", host.encode()), *raw],
        }
    )  # fmt: skip


def test_other_machines_are_shown_nothing_without_a_key():
    rules = AccessRules()
    rules.require_page_reader(request_from("127.0.0.1", "localhost:8123"))
    for peer in ("192.168.1.2", "fe80::1%eth0", "::ffff:10.0.0.1"):
        with pytest.raises(ApiError, match=r"on the machine that serves.*-L 8123:localhost:8123"):
            rules.require_page_reader(request_from(peer, "localhost:8123"))


def test_a_phone_with_the_key_sees_the_page():
    """The middleware has checked the key; another site's page is refused all the same."""
    rules = AccessRules("sesame")
    rules.require_page_reader(request_from("192.168.1.2", "10.0.0.5:8123"))
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        with pytest.raises(ApiError, match="other origins"):
            rules.require_page_reader(request_from("192.168.1.2", "10.0.0.5:8123", **headers))


def test_the_page_runs_nothing_but_its_own(server):
    status, text, headers = exchange(server.port, "/")
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    # Nothing is loaded from anywhere, and no markup runs or styles by itself.
    assert "src=" not in text
    assert "@import" not in text
    assert " style=" not in text
    assert " onclick" not in text
    assert ".innerHTML" not in text
