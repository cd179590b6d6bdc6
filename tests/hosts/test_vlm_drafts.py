"""mlx-vlm's speculative decoding with bounded caches gives the tokens of plain decoding."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed here")

from mlx_vlm.generate.ar import BatchGenerator, generate_step
from mlx_vlm.speculative.drafters import KNOWN_DRAFTER_KINDS, eagle3, qwen3_5_mtp
from mlx_vlm.speculative.drafters.gemma4_assistant import Gemma4AssistantDraftModel

import mlx_h2o
from mlx_h2o import H2OKVCache
from mlx_h2o.hosts.cache_lists import entries
from mlx_h2o.hosts.vlm_drafts import KINDS
from tiny_models import Characters, prompt_tokens, with_random_weights
from vlm_models import whole_vlm_model

SIZE, BLOCK, STEPS, LAYERS = 24, 4, 30, 4
PROMPT = mx.array([prompt_tokens(60)])
# The tokens that a drafter is to find, now and then.
expected: list[int] = []


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Qwen 3.5: every other layer has states."""
    mx.random.seed(3)
    return with_random_weights(
        whole_vlm_model("qwen3_5", 128, text_config={"num_hidden_layers": LAYERS})[0]
    )


class Knowing:
    """A drafter with random weights that knows 0, 1, 2, 3, 0, ... of the next tokens."""

    def draft_block(self, *args: Any, **kwargs: Any) -> mx.array:
        drafts = super().draft_block(*args, **kwargs)  # type: ignore[misc]
        rounds = self.accept_lens  # type: ignore[attr-defined]
        first = 1 + sum(rounds) + len(rounds)
        known = expected[first : first + min(len(rounds) % BLOCK, drafts.shape[1])]
        return mx.array([known + drafts.tolist()[0][len(known) :]], drafts.dtype)


class MTP(Knowing, qwen3_5_mtp.Qwen3_5MTPDraftModel):
    pass


class Eagle(Knowing, eagle3.Eagle3DraftModel):
    pass


def drafter(kind: str) -> Any:
    if kind == "mtp":
        text = whole_vlm_model("qwen3_5", 128)[1]["text_config"]
        config = qwen3_5_mtp.ModelConfig.from_dict({"text_config": text, "block_size": BLOCK})
        return with_random_weights(MTP(config))
    sizes = {"hidden_size": 128, "intermediate_size": 96, "vocab_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = eagle3.ModelConfig.from_dict(
        {
            "transformer_layer_config": {**sizes, **heads},
            "draft_vocab_size": 128,
            "capture_layer_ids": [0, 1, 2],
            "block_size": BLOCK,
        }
    )
    return with_random_weights(Eagle(config))


def generated(model: Any, **options: Any) -> list[int]:
    options = {"max_tokens": STEPS, "temperature": 0.0, "prefill_step_size": 16} | options
    return [int(token) for token, _ in generate_step(PROMPT, model, None, None, **options)]


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("size", [200, SIZE])
@pytest.mark.parametrize("installed", [True, False])
def test_tokens_are_plain_decodings(model, kind, size, installed):
    """Those of mlx-vlm's own caches while memory suffices, and of the bounded cache beyond."""
    settings = {"max_size": size, "undo": BLOCK - 1}
    own = {} if size > SIZE else {"prompt_cache": mlx_h2o.make_prompt_cache(model, **settings)}
    expected[:] = generated(model, **own)
    options: dict[str, Any] = {}
    if installed:
        mlx_h2o.install(**settings)
    else:
        options["prompt_cache"] = mlx_h2o.make_prompt_cache(model, **settings)
    draft = drafter(kind)
    options |= {"draft_model": draft, "draft_kind": kind, "draft_block_size": BLOCK}
    assert generated(model, **options) == expected
    assert {0, 1, 2, 3} <= set(draft.accept_lens)
    for _, entry in entries(draft._cache):
        assert isinstance(entry, H2OKVCache)
        assert entry.size() <= size
    assert "make_cache" not in vars(draft)


def test_what_cannot_be_drafted_is_refused_by_name(model):
    draft = drafter("mtp")
    refused = {
        "undo=0: give undo=3": {"draft_kind": "mtp"},
        "undo=0: give undo=1": {"draft_kind": "mtp", "draft_block_size": 2},
        "'dflash' changes the model's caches": {},
    }
    # Kinds that a later mlx-vlm has are refused, too.
    refused |= {
        f"drafter '{kind}'": {"draft_kind": kind} for kind in KNOWN_DRAFTER_KINDS - set(KINDS)
    }
    mlx_h2o.install(max_size=SIZE)
    for reason, options in refused.items():
        with pytest.raises(ValueError, match=reason):
            generate_step(PROMPT, model, None, None, draft_model=draft, **options)
    mlx_h2o.install(max_size=SIZE, undo=BLOCK)
    with pytest.raises(ValueError, match="row by row"):
        generate_step(
            mx.repeat(PROMPT, 2, 0), model, None, None, draft_model=draft, draft_kind="mtp"
        )
    with pytest.raises(ValueError, match="row by row"):
        BatchGenerator(model, None, draft_model=draft, draft_kind="mtp")
    assistant = Gemma4AssistantDraftModel.__new__(
        Gemma4AssistantDraftModel
    )  # it has no caches of its own
    assert assistant.make_cache() == []
    with pytest.raises(ValueError, match="reads or keeps whole caches"):
        generate_step(PROMPT, model, None, None, draft_model=assistant, draft_kind="mtp")


def test_the_server_goes_on_without_a_drafter_beside_bounded_caches(model, monkeypatch, caplog):
    pytest.importorskip("fastapi", reason="mlx-vlm's server is not installed here")
    from mlx_vlm.server import generation
    from mlx_vlm.speculative import drafters

    draft = drafter("mtp")
    resources = model, Characters(), SimpleNamespace(eos_token_id=0)
    monkeypatch.setattr(generation, "load_model_resources", lambda *_: resources)
    monkeypatch.setattr(drafters, "load_drafter", lambda *_, **__: (draft, "mtp"))
    server = generation.ResponseGenerator.__new__(generation.ResponseGenerator)
    server.model_path = server.draft_model_path = "folder"
    server.adapter_path = server.draft_kind_override = server.apc_manager = None
    server._initialize_model()
    assert server.draft_model is draft
    mlx_h2o.install(max_size=SIZE, undo=BLOCK)
    server._initialize_model()
    assert server.draft_model is None
    assert server.draft_kind is None
    assert "batches take drafts of MTP back row by row" in caplog.text
