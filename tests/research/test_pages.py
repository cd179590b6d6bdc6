"""A cache without pages is today's; with them it holds no more rows, and loses less."""

import mlx.core as mx

from mlx_h2o import install
from research.pages import PagedCache, Paging
from research.simulation import SILENT, Setting, SimulatedCache
from tiny_models import tiny_model

TOKENS, BUDGET, PAGES = 128, 24, 8


def logits_of(model, caches, tokens):
    outs = []
    for i in range(tokens.shape[1]):
        outs.append(model(tokens[:, i : i + 1], cache=caches))
        mx.eval(outs[-1], [cache.state for cache in caches])
    return mx.concatenate(outs, axis=1)


def tiny_run():
    install(max_size=1 << 20)
    model = tiny_model("llama")
    return model, mx.random.randint(0, 100, (1, TOKENS), key=mx.random.key(2))


def test_without_digests_it_is_the_cache_with_one_remainder():
    model, tokens = tiny_run()
    for saturation in (SILENT, 0.0, 4.0):
        setting = Setting("x", [[BUDGET] * 2] * 2, saturation)
        today = logits_of(model, [SimulatedCache([setting], i, TOKENS) for i in range(2)], tokens)
        caches = [PagedCache([setting], [Paging()], i, TOKENS) for i in range(2)]
        assert mx.abs(logits_of(model, caches, tokens) - today).max().item() < 1e-3


def test_pages_come_back_within_the_budget_and_help():
    model, tokens = tiny_run()
    setting = Setting("x", [[BUDGET] * 2] * 2, 0.0)
    full = model(tokens)
    apart = {}
    for most in (0, 2):
        paging = Paging(digests=PAGES, most=most, share=0.0, stay=8)
        caches = [PagedCache([setting], [paging], i, TOKENS) for i in range(2)]
        apart[most] = mx.square(logits_of(model, caches, tokens) - full).mean().item()
        for cache in caches:
            assert cache.trial.kept.sum(axis=-1).max().item() <= BUDGET
            assert (cache.trial.returned.item() > 0) == (most > 0)
    assert apart[2] < 0.97 * apart[0]
