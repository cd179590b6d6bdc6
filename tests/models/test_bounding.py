"""`install(max_size=...)`: every cache that mlx-lm makes is bounded, where it makes them."""

import io
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from urllib.request import Request, urlopen

import mlx.core as mx
import mlx_lm.chat
import mlx_lm.server
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import mamba
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.loading.load import SAMPLE_TEXT, model_path
from tiny_models import tiny_model

STOCK = mlx_lm_cache.make_prompt_cache
WORDS = SAMPLE_TEXT.read_text(encoding="utf-8").split()
PROMPT = " ".join(WORDS[:80])
SIZE = 48
MAMBA = {
    "model_type": "mamba", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
    "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4, "use_bias": False,
    "use_conv_bias": True, "time_step_rank": 2,
}  # fmt: skip


@pytest.fixture
def installed():
    mlx_h2o.install(max_size=SIZE)
    yield
    mlx_h2o.uninstall()
    mlx_h2o.install()


@pytest.fixture(scope="module")
def loaded():
    return mlx_lm.load(model_path("builtin:recall-4m"))


def kinds(cache):
    return {type(entry) for entry in cache}


def generated(loaded, prompt, tokens=8, **options):
    model, tokenizer = loaded
    options = {"prompt_cache": mlx_h2o.make_prompt_cache(model, SIZE)} | options
    return "".join(
        response.text
        for response in mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens=tokens, **options
        )
    )


# -- what stands in mlx-lm's places ---------------------------------------------------------------


def test_a_file_of_mlx_lms_growing_caches_is_refused(tmp_path):
    """It would run past the bound, without a word."""
    model, file = tiny_model("llama"), str(tmp_path / "stock.safetensors")
    stock = stock_caches(model)
    mx.eval(model(mx.array([[1, 2, 3]]), cache=stock))
    mlx_lm_cache.save_prompt_cache(file, stock, {"model": "tiny"})
    mlx_h2o.install(max_size=SIZE)
    try:
        for arguments in ((file,), (file, True)):
            with pytest.raises(ValueError, match=r"KVCache, which would grow .*uninstall"):
                mlx_lm_cache.load_prompt_cache(*arguments)
    finally:
        mlx_h2o.uninstall()
        mlx_h2o.install()
    assert mlx_lm_cache.load_prompt_cache(file)[0].offset == 3


def test_every_holder_of_mlx_lms_function_gets_ours_and_its_own_back():
    """By module, by name, and under another name, as STOCK and make_prompt_cache here."""
    own, here = mlx_lm_cache.make_prompt_cache, sys.modules[__name__]
    model = tiny_model("llama")
    mlx_h2o.install(max_size=40, policy="h2o", remainder=False)
    try:
        for module in (
            mlx_lm_cache,
            sys.modules["mlx_lm.generate"],
            mlx_lm.chat,
            mlx_lm.server,
            here,
        ):
            if hasattr(module, "make_prompt_cache"):  # mlx-lm 0.31's generate reaches it by module
                cache = module.make_prompt_cache(model)
                assert kinds(cache) == {H2OKVCache}
                assert cache[0].policy.name == "h2o"
                assert cache[0].budgets == [40] * len(cache[0].budgets)
                assert not cache[0].answers
        assert here.STOCK is here.make_prompt_cache is not own
        mlx_h2o.install(
            max_size=30, policy="h2o", remainder=False
        )  # new settings, in the same places
        assert here.STOCK(model)[0].budgets[0] == 30
        assert here.STOCK(model, max_kv_size=20)[0].budgets[0] == 20
        mlx_h2o.install()  # asks for nothing new
        assert here.STOCK(model)[0].budgets[0] == 30
    finally:
        mlx_h2o.uninstall()
    for module in (mlx_lm_cache, mlx_lm.chat, mlx_lm.server, here):
        assert module.make_prompt_cache is own
    assert kinds(make_prompt_cache(model)) == {mlx_lm_cache.KVCache}
    mlx_h2o.install()


def test_models_without_a_plain_cache_keep_their_own(installed):
    model = mamba.Model(mamba.ModelArgs(**MAMBA))
    assert kinds(make_prompt_cache(model)) == {mlx_lm_cache.ArraysCache}


def test_a_model_that_asks_mlx_lm_for_its_parts_caches_is_bounded_once(installed):
    """Its make_cache, asked for the model's own caches, must not get bounded ones."""
    model = tiny_model("llama")
    model.make_cache = lambda: mlx_lm_cache.make_prompt_cache(tiny_model("llama"))
    cache = mlx_h2o.make_prompt_cache(model, 30, policy="h2o", remainder=False)
    assert [entry.budgets for entry in cache] == [[30] * len(cache[0].budgets)] * len(cache)


def test_what_our_own_package_calls_a_full_cache_stays_full(installed, loaded):
    from mlx_h2o.evaluate.methods import FULL, Method

    assert kinds(Method(FULL).make(loaded[0], 64)) == {mlx_lm_cache.KVCache}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "h2o"}, "needs max_size or max_bytes"),
        ({"policy": "h2o:sink=2"}, "needs max_size or max_bytes"),
        ({"max_size": 64, "max_bytes": 10**6}, "exactly one of max_size, max_bytes"),
        ({"max_size": 64, "policy": "h2p"}, "Unknown policy 'h2p'"),
        ({"max_size": 64, "sonk": 2}, "There is no option sonk"),
        ({"max_size": 64, "policy": "h2o:sonk=2"}, "has no field sonk"),
        ({"max_size": 64, "budgets": "nowhere.json"}, "Cannot read the profile nowhere.json"),
        ({"max_size": "64"}, "max_size must be a whole number; got '64'"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_installed(settings, message):
    with pytest.raises(ValueError, match=message):
        mlx_h2o.install(**settings)
    assert mlx_lm_cache.make_prompt_cache is STOCK


# -- people's own patches -------------------------------------------------------------------------


def test_a_patched_make_prompt_cache_does_not_call_itself(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(
        mlx_lm_cache,
        "make_prompt_cache",
        lambda model, _=None: mlx_h2o.make_prompt_cache(model, 40),
    )
    assert kinds(mlx_lm_cache.make_prompt_cache(model)) == {H2OKVCache}
    assert kinds(mlx_h2o.make_prompt_cache(model, 40)) == {H2OKVCache}


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_patched_make_cache_does_not_call_itself(name):
    """Of a model with a make_cache of its own, and of one without."""
    model = tiny_model(name)
    before = [type(entry) for entry in make_prompt_cache(model)]
    model.make_cache = lambda: mlx_h2o.make_prompt_cache(model, 40)
    for cache in (make_prompt_cache(model), mlx_h2o.make_prompt_cache(model, 40)):
        assert [type(entry) for entry in cache] == [
            H2OKVCache if kind is mlx_lm_cache.KVCache else kind for kind in before
        ]


def test_a_make_cache_lost_with_its_class_is_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(
        type(model), "make_cache", lambda self: mlx_h2o.make_prompt_cache(self, 40), raising=False
    )
    with pytest.raises(ValueError, match=r"mlx_h2o\.install\(max_size=\.\.\.\)"):
        make_prompt_cache(model)


# -- mlx-lm's own programs ------------------------------------------------------------------------


def test_generate_without_a_cache_is_bounded(installed, loaded):
    """The text is that of a cache made by hand, and not that of an unbounded one."""
    ours = generated(loaded, PROMPT, 24)
    assert generated(loaded, PROMPT, 24, prompt_cache=None) == ours
    assert generated(loaded, PROMPT, 24, prompt_cache=stock_caches(loaded[0])) != ours


def test_chat_is_bounded(installed, loaded, monkeypatch, capsys):
    """Two turns of mlx_lm.chat, the second over a cache that has evicted."""
    made = []
    bounded = mlx_lm.chat.make_prompt_cache
    monkeypatch.setattr(
        mlx_lm.chat, "make_prompt_cache", lambda *args: made.append(bounded(*args)) or made[-1]
    )
    argv = ["chat", "--model", model_path("builtin:recall-4m"), "--max-tokens", "5", "--temp", "0"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PROMPT}\nAnd Anne?\nq\n"))
    with_template(monkeypatch, mlx_lm.chat)
    mlx_lm.chat.main()
    assert [kinds(cache) for cache in made] == [{H2OKVCache}]
    assert made[0][0].offset > 2 * SIZE
    assert sum(entry.evicted for entry in made[0]) > 0


def with_template(monkeypatch, module):
    """The embedded model has no chat template; mlx_lm.chat needs one."""
    load = module.load

    def load_with_template(*args, **kwargs):
        model, tokenizer = load(*args, **kwargs)
        tokenizer._tokenizer.chat_template = (
            "{% for message in messages %}{{ message.content }} {% endfor %}"
        )
        return model, tokenizer

    monkeypatch.setattr(module, "load", load_with_template)


@pytest.fixture
def server(installed, monkeypatch, request):
    """mlx_lm.server over HTTP, with more options: its prompt cache, and a function that asks it."""
    providers = []
    monkeypatch.setattr(
        mlx_lm.server, "run", lambda host, port, provider: providers.append(provider)
    )
    command = ["server", "--model", model_path("builtin:recall-4m")]
    monkeypatch.setattr(sys, "argv", [*command, *getattr(request, "param", [])])
    mlx_lm.server.main()
    kept = LRUPromptCache(10)
    generator = mlx_lm.server.ResponseGenerator(providers[0], kept)
    httpd = ThreadingHTTPServer(
        ("127.0.0.1", 0),
        lambda *args: mlx_lm.server.APIHandler(generator, *args, system_fingerprint="test"),
    )
    threading.Thread(target=httpd.serve_forever, daemon=True).start()

    def ask(prompt, tokens=8, **options):
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0} | options
        url = f"http://127.0.0.1:{httpd.server_port}/v1/completions"
        request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["text"]

    yield kept, providers[0], ask
    httpd.shutdown()
    httpd.server_close()
    generator.stop_and_join()


def test_the_server_is_bounded_and_batches_requests(server, loaded):
    """Three at once, and a second turn that goes on from a cache in the LRU prompt cache."""
    kept, provider, ask = server
    prompts = [" ".join(WORDS[start : start + 80]) for start in (0, 100, 200)]
    expected = [generated(loaded, prompt) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, prompts)) == expected
    assert provider.is_batchable
    assert len(kept) >= 3

    turn = f"{prompts[0]} {expected[0]}" + " And then Anne said to Toby that"
    tokens = loaded[1].encode(turn)
    cache, rest = kept.fetch_nearest_cache(provider.model_key, tokens)
    assert kinds(cache) == {H2OKVCache}
    assert 0 < len(rest) < 20
    assert cache[0].evicted > 0
    assert ask(turn) == generated(loaded, rest, prompt_cache=cache)


@pytest.mark.parametrize(
    "server", [["--draft-model", model_path("builtin:recall-4m")]], indirect=True
)
def test_the_server_drafts_within_the_bound(server, loaded, capfd):
    """Its answers are plain bounded decoding's; a draft longer than the undo is refused."""
    kept, provider, ask = server
    mlx_h2o.install(max_size=SIZE, undo=3)
    for prompt in (PROMPT, " ".join(WORDS[100:180])):
        plain = mlx_h2o.make_prompt_cache(loaded[0], SIZE, undo=3)
        expected = generated(loaded, prompt, prompt_cache=plain)
        assert plain[0].evicted > 0
        assert ask(prompt, num_draft_tokens=3) == expected
    assert provider.draft_model is not None
    assert kept.nbytes > 0
    with pytest.raises(ConnectionError):  # as mlx-lm's server answers whatever fails
        ask(f"{PROMPT} and", num_draft_tokens=4)
    assert "num_draft_tokens=4 takes up to 4 tokens back" in capfd.readouterr().err
    assert ask(prompt, num_draft_tokens=2) == expected


# -- what bounded caches refuse -------------------------------------------------------------------


def test_mlx_lms_save_refuses_what_its_load_could_not_read(tmp_path, loaded):
    cache = mlx_h2o.make_prompt_cache(loaded[0], SIZE)
    path = str(tmp_path / "chat.safetensors")
    for entries in (cache, [mlx_lm_cache.CacheList(*cache)]):
        with pytest.raises(ValueError, match=r"mlx_h2o\.save_prompt_cache"):
            mlx_lm_cache.save_prompt_cache(path, entries)
    assert not list(tmp_path.iterdir())
    plain = stock_caches(loaded[0])
    mx.eval(loaded[0](mx.array([[1, 2]]), cache=plain))
    mlx_lm_cache.save_prompt_cache(path, plain)
    assert len(mlx_lm_cache.load_prompt_cache(path)) == len(plain)


def test_kv_bits_is_refused(loaded):
    with pytest.raises(ValueError, match="bits=8"):
        generated(loaded, PROMPT, kv_bits=8)


# -- threads --------------------------------------------------------------------------------------


def test_a_cache_may_be_made_here_and_used_in_another_thread(loaded):
    """MLX's streams belong to threads; what a thread leaves unevaluated, another cannot compute."""
    expected = generated(loaded, PROMPT)
    cache = mlx_h2o.make_prompt_cache(loaded[0], SIZE)

    def elsewhere(prompt):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: generated(loaded, prompt, prompt_cache=cache)).result()

    again = mlx_h2o.make_prompt_cache(loaded[0], SIZE)
    assert elsewhere(PROMPT) == expected == generated(loaded, PROMPT, prompt_cache=again)
    # Each turn in a thread that did not see the last one.
    assert elsewhere(" And Anne") == generated(loaded, " And Anne", prompt_cache=again)
