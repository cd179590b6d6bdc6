"""What the Swift package carries of this repository is what this repository says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_h2o
from mlx_h2o.caches.kv_cache import H2OKVCache
from mlx_h2o.chat.dialogue import TOKENS, Dialogue
from mlx_h2o.loading.load import EMBEDDED_MODEL

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "swift/Tests/MLXH2OTests/Fixtures"


@pytest.mark.parametrize("tool", ["embed_metal.py", "record_launches.py"])
def test_generated_files_are_up_to_date(tool):
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), "--check"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_what_swift_saved_is_what_python_saved():
    ours, _ = mlx_h2o.load_prompt_cache(FIXTURES / "python-caches.safetensors", True)
    theirs, metadata = mlx_h2o.load_prompt_cache(FIXTURES / "swift-caches.safetensors", True)
    assert metadata == {"from": "swift"}
    assert len(ours) == len(theirs) == 6
    assert "frame.scale" in ours[3].arrays()
    # Beside dense values alone; positions are narrow.
    assert "slots.value_lengths" not in ours[3].arrays()
    assert "slots.value_lengths" in ours[4].arrays()
    assert theirs[4].arrays()["slots.positions"].dtype == mx.int16
    assert ours[4].settings.filling == ((96, (18, 30)),)
    for a, b in zip(ours[:5], theirs[:5], strict=True):
        assert isinstance(b, H2OKVCache)
        assert a.config() == b.config()
        assert a.arrays().keys() == b.arrays().keys()
        for name, array in a.arrays().items():
            assert array.dtype == b.arrays()[name].dtype
            assert mx.array_equal(array, b.arrays()[name]).item(), name
    for a, b in zip(ours[5].keys_and_values(), theirs[5].keys_and_values(), strict=True):
        assert mx.array_equal(a, b).item()


def metadata(file: Path) -> dict[str, Any]:
    """What a file says about its caches, with the tokens of its conversation."""
    texts = mlx_h2o.load_prompt_cache(file, return_metadata=True)[1]
    return texts | {TOKENS: json.loads(texts[TOKENS])}


def test_a_conversation_that_swift_saved_goes_on():
    """Swift read the compressed document, answered a question as Python does, and saved."""
    expected = json.loads((FIXTURES / "compressed.json").read_text())
    model, tokenizer = mlx_h2o.load(EMBEDDED_MODEL)
    dialogue = Dialogue(model, tokenizer, lambda: mlx_h2o.make_prompt_cache(model, max_size=64))
    dialogue.load(FIXTURES / "swift-conversation.safetensors", EMBEDDED_MODEL)
    document = metadata(FIXTURES / "compressed.safetensors")[TOKENS]["tokens"]
    assert dialogue.tokens == [*document, *expected["prompt"], *expected["tokens"][:-1]]
    assert expected["kept"] == [
        [sorted(row) for run in cache.store.runs for row in cache.slots(run).positions[0].tolist()]
        for cache in dialogue.cache
    ]
    assert len(list(dialogue.reply(" And then", max_tokens=4))) == 4


def test_swift_is_given_a_compressed_document_as_it_is_made_now(tmp_path):
    """The command makes that file still, and Python goes on from it as Swift's test expects."""
    sys.path.insert(0, str(ROOT / "tools"))
    import record_caches

    recorded = FIXTURES / "compressed.safetensors"
    assert record_caches.continued(recorded) == json.loads(
        (FIXTURES / "compressed.json").read_text()
    )
    record_caches.compress(tmp_path / "now.safetensors")
    then, now = (
        mlx_h2o.load_prompt_cache(file) for file in (recorded, tmp_path / "now.safetensors")
    )
    assert metadata(recorded) == metadata(tmp_path / "now.safetensors")
    for a, b in zip(then, now, strict=True):
        assert isinstance(b, H2OKVCache)
        assert a.budgets == b.budgets
        assert a.pins == b.pins == ((20, 24),)
        assert a.arrays().keys() == b.arrays().keys()
