"""What the server does with every model of mlx-lm: a tiny folder, asked over HTTP."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

import mlx_h2o
from mlx_h2o import make_prompt_cache
from mlx_h2o.hosts.refusals import NothingToBound
from mlx_h2o.hosts.stock_caches import stock_caches
from mlx_h2o.serve.memory import most_bytes
from model_configs import VOCABULARY, config_of
from model_coverage import coverage_model, fit_for_tests
from serving import Running, alone, serving, words

YES, WITHOUT_BOUND = "yes", "without --kv-memory"
#: Slots of a conversation, fewer than a prompt has tokens; a chunk; tokens of an answer.
SETTINGS, CHUNK, TOKENS = {"max_size": 48, "undo": 0}, 25, 6


def server(name: str) -> str:
    """Serve a model, and ask as clients do.

    Returns:
        The cell of docs/reference/models.md.

    Raises:
        AssertionError: An answer is not what the model gives by itself, or the bound is exceeded.
    """
    with model_folder(name) as folder:
        loaded = mlx_h2o.load(str(folder))
        choice: dict[str, Any] = {"models": (str(folder),), "defaults": SETTINGS}
        choice |= {"chunk": CHUNK, "bound": bound_of(loaded[0])}
        sessions, copied = folder / "sessions", folder / "copied"
        with serving(**choice, sessions=sessions) as running:
            ask_all(running, loaded)
            prompt = words(160, 12)
            before = complete(running, prompt)[1]
            shutil.copytree(sessions, copied)
            more = f"{prompt}{before} and so"
            known, after = complete(running, more)
            assert known, "the conversation is not known"
            peak = running.scheduler.ledger.peak
            assert peak <= (choice["bound"] or peak), f"{peak} bytes exceed {choice['bound']}"
        with serving(**choice, sessions=copied) as restarted:
            assert complete(restarted, more) == (known, after), "after a restart it is another"
    return YES if choice["bound"] else WITHOUT_BOUND


def bound_of(model: nn.Module) -> int | None:
    """The bytes of eight conversations, or None if they are not known beforehand."""
    try:
        caches = make_prompt_cache(model, **SETTINGS)
    except NothingToBound:
        caches = stock_caches(model)
    try:
        return 8 * most_bytes(caches, model, CHUNK)
    except ValueError:
        return None


def ask_all(running: Running, loaded: Any) -> None:
    """Two requests alone, four at once, with a seed and without, and a stop."""
    prompts = [words(40 * i, 12) for i in range(4)]
    expected = [alone(loaded, prompt, TOKENS, CHUNK, **SETTINGS) for prompt in prompts]
    for i in (0, 1, 0):
        assert complete(running, prompts[i])[1] == expected[i], "alone it is another answer"
    with ThreadPoolExecutor(4) as pool:
        together = [text for _, text in pool.map(lambda one: complete(running, one), prompts)]
        assert together == expected, "four at once have other answers"
        hot = {"temperature": 1.0, "max_tokens": 20}
        seeds = [{"seed": 3}, {}, {}, {"seed": 3}]
        drawn = [
            text
            for _, text in pool.map(lambda one: complete(running, prompts[2], **hot | one), seeds)
        ]
    assert drawn[0] == drawn[3], "the same seed draws otherwise"
    assert len(set(drawn)) > 1, "all draw the same"
    prompt, text = max(zip(prompts, expected, strict=True), key=lambda pair: len(pair[1]))
    stop = text[-2:]
    cut = complete(running, prompt, stop=stop)[1]
    assert cut == text[: text.index(stop)], f"a stop text is overrun: {text!r}, {cut!r}"


def complete(running: Running, prompt: str, **options: Any) -> tuple[int, str]:
    """Tokens of a prompt that are known, and its answer."""
    body = {"max_tokens": TOKENS, "temperature": 0} | options
    answer = running.client.completions.create(model="default_model", prompt=prompt, **body)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].text


@contextmanager
def model_folder(name: str) -> Iterator[Path]:
    """A folder of a tiny model with random weights, and a tokenizer of characters."""
    # transformers checks configs before it reads a tokenizer, and knows other fields than mlx-lm.
    config = mock.patch.object(AutoConfig, "from_pretrained", return_value=PreTrainedConfig())
    with tempfile.TemporaryDirectory() as path, fit_for_tests(name), config:
        folder = Path(path)
        weights = dict(tree_flatten(coverage_model(name).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        fields = config_of(name) | {"eos_token_id": VOCABULARY - 1}
        (folder / "config.json").write_text(json.dumps(fields))
        characters_tokenizer().save_pretrained(path)
        yield folder


def characters_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of as many tokens as the models have, each a character."""
    letters = [chr(code) for code in range(0x20, 0x20 + VOCABULARY - 1)]
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<end>": VOCABULARY - 1}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
