"""Several models on demand: loaded when they are asked for, within one bound for their weights."""

import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import openai
import pytest

import mlx_h2o
from mlx_h2o._byte_size import Share
from mlx_h2o.cli import parser
from mlx_h2o.cli.serve import settings_of
from mlx_h2o.loading.load import MODELS
from mlx_h2o.serve.models import file_bytes
from mlx_h2o.serve.sessions import Limits
from serving import MODEL, Running, alone, serving, until, words

PROMPT = words(0, 30)
BOUND = 8 << 20


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of another model: the embedded one with other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(MODELS / "recall-4m", folder)
    (file,) = folder.glob("*.safetensors")
    weights: Any = mx.load(str(file))
    mx.save_safetensors(str(file), {k: 0.7 * v.astype(mx.float32) for k, v in weights.items()})
    return str(folder)


def ask(server: Running, model: str, prompt: str = PROMPT, tokens: int = 6) -> Any:
    return server.client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0
    )


def cached(server: Running, model: str, prompt: str) -> int:
    """The prompt's tokens that caches have read."""
    return int(ask(server, model, prompt).usage.prompt_tokens_details.cached_tokens)


def names(server: Running) -> list[str]:
    return [one.name for one in server.scheduler.models.loaded]


def weights(server: Running) -> int:
    return sum(one.nbytes for one in server.scheduler.models.loaded)


def test_each_model_is_loaded_when_it_is_asked_for(other, embedded):
    with serving(models=(MODEL, other), aliases={"gpt-4o": other}) as server:
        assert [one.id for one in server.client.models.list()] == [MODEL, other, "gpt-4o"]
        assert ask(server, "default_model").model == MODEL
        assert names(server) == [MODEL]
        answers = {name: ask(server, name).choices[0].text for name in (MODEL, other, "gpt-4o")}
        assert names(server) == [MODEL, other]
        assert answers[MODEL] == alone(embedded, PROMPT, 6)
        assert answers[other] == answers["gpt-4o"] == alone(mlx_h2o.load(other), PROMPT, 6)
        # Each goes on from its own caches alone.
        more = f"{PROMPT}{answers[MODEL]} and"
        assert cached(server, MODEL, more) > cached(server, other, more)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            ask(server, "gpt-9")
        with ThreadPoolExecutor(4) as pool:
            both = list(pool.map(lambda name: ask(server, name), (MODEL, other) * 2))
        assert [one.choices[0].text for one in both] == [answers[MODEL], answers[other]] * 2


def test_a_model_that_no_request_uses_makes_room_for_another(other, embedded):
    """Room for one of them at a time."""
    room = int(1.2 * file_bytes(other))
    with (
        serving(models=(MODEL, other), bound=BOUND, memory=BOUND + room) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        first = ask(server, MODEL).choices[0].text
        gone = weakref.ref(server.scheduler.models.loaded[0].model)
        ask(server, other)
        assert names(server) == [other]
        assert gone() is None
        # Its conversations stay, and go on when it is loaded again.
        assert cached(server, MODEL, f"{PROMPT}{first} and") > cached(server, MODEL, PROMPT)
        assert weights(server) <= room
        # A model whose request runs stays, and who asks for another comes next.
        long = pool.submit(ask, server, MODEL, words(40, 30), 120)
        until(lambda: server.scheduler.ledger.running == 1)
        waits = pool.submit(ask, server, other)
        until(lambda: server.scheduler.waiting == 1)
        last = pool.submit(ask, server, MODEL)
        until(lambda: server.scheduler.waiting == 2)
        assert names(server) == [MODEL]
        assert long.result().usage.completion_tokens == 120
        assert waits.result().choices[0].text != last.result().choices[0].text == first
        assert names(server) == [MODEL]


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone(other, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with serving(models=(MODEL, str(tmp_path), other), memory=20 << 20) as server:
        for name in (str(tmp_path), other):
            text = ask(server, MODEL).choices[0].text
            if name == other:
                server.scheduler.models.reserve(20 << 20)
            with pytest.raises(openai.InternalServerError, match="cannot be loaded") as refused:
                ask(server, name)
            assert refused.value.status_code == 503
            assert ask(server, MODEL).choices[0].text == text
        assert "--memory leaves" in refused.value.message


def test_a_share_is_of_the_first_models_16_bit_cache():
    with serving(bound=Share(0.5), defaults={"max_size": 48, "context": 1000}) as server:
        (model,) = server.scheduler.models.loaded
        args = model.model.args
        width = args.num_key_value_heads * (args.hidden_size // args.num_attention_heads)
        assert server.scheduler.ledger.bound == 1000 * args.num_hidden_layers * width * 2
        assert server.ask(PROMPT)


def test_the_options_of_models_and_memory():
    given = ["serve", "--model", MODEL, "--model", MODEL, "--kv-memory", "25%", "--memory", "1GB"]
    settings = settings_of(parser().parse_args([*given, "--alias", f"a={MODEL}", "--alias", "b"]))
    assert settings.engine.models == (MODEL,)
    assert (settings.engine.bound, settings.engine.memory) == (Share(0.25), 10**9)
    assert settings.aliases == {"a": MODEL, "b": MODEL}
    assert settings.engine.limits == Limits(10_000_000_000, 30)  # of one-off questions, too
