"""Which class of cache a layer gets: by what its model does, by hand, from a file."""

import json

import pytest

from mlx_h2o import H2OKVCache, load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_h2o.caches import kinds
from mlx_h2o.caches.base import BoundedKVCache
from mlx_h2o.caches.latent import LatentKVCache
from mlx_h2o.caches.plain_rows import PlainRowsKVCache
from tiny_models import prefill, prompt_tokens, tiny_model

KINDS = {
    "llama": H2OKVCache,
    "gemma2": H2OKVCache,
    "deepseek_v3": LatentKVCache,
    "gemma2_by_itself": PlainRowsKVCache,
}


@pytest.mark.parametrize("used", [False, True], ids=["unused", "in use"])
@pytest.mark.parametrize("family", KINDS)
def test_a_layer_gets_what_its_model_needs_and_gets_it_back_from_a_file(family, used, tmp_path):
    model = tiny_model(family)
    cache = make_prompt_cache(model, 32)
    if used:
        prefill(model, cache, prompt_tokens(60), 13)
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    loaded = load_prompt_cache(tmp_path / "cache.safetensors")
    bounded = [entry for entry in cache if isinstance(entry, BoundedKVCache)]
    assert {type(entry) for entry in bounded} == {KINDS[family]}
    assert [type(entry) for entry in loaded] == [type(entry) for entry in cache]
    prefill(model, loaded, prompt_tokens(60), 13)


def test_a_file_from_before_the_classes_says_by_own_how_its_model_attends():
    cache = LatentKVCache(32, remainder=False)
    arrays, text = cache.state
    assert json.loads(text)["own"] is False
    assert type(kinds.restored((arrays, text))) is LatentKVCache
    undecided = text.replace('"own": false', '"own": null')
    assert type(kinds.restored((arrays, undecided))) is H2OKVCache
    with pytest.raises(ValueError, match="another kind of cache than H2OKVCache"):
        H2OKVCache.from_state((arrays, text))
    with pytest.raises(ValueError, match="no state of a bounded cache"):
        kinds.restored((arrays, "[]"))


def test_by_hand():
    assert type(H2OKVCache(24)) is H2OKVCache
    plain = PlainRowsKVCache(24, policy="streaming")
    assert plain.attending is plain.settings.attending is False
    with pytest.raises(ValueError, match="must see attention"):
        PlainRowsKVCache(24)
    with pytest.raises(ValueError, match="remainder=False, no bits, no undo"):
        LatentKVCache(24)
    with pytest.raises(TypeError, match="attending"):
        H2OKVCache(24, policy="streaming", attending=False)


def test_a_subclass_stays_itself():
    class Mine(H2OKVCache):
        pass

    assert type(Mine(24)) is type(Mine.from_state(Mine(24).state)) is Mine
