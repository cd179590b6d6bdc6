"""A model without a profile is measured when a size in bytes first asks for one, and only once."""

import sys

import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_h2o
from mlx_h2o import _progress, make_prompt_cache
from mlx_h2o.budgets import profile_store
from mlx_h2o.calibration.first_use import profile_at_load
from mlx_h2o.cli import main, parser
from mlx_h2o.cli.evaluate import methods_of
from mlx_h2o.cli.options import profile_choice
from mlx_h2o.evaluate.tuning import tuned_methods
from mlx_h2o.hosts.layer_probe import layer_kinds
from mlx_h2o.hosts.recorder import Watcher, require_weighable, watched
from mlx_h2o.serve.model import ServedModel
from tiny_models import prompt_tokens, tiny_model

SIZE = {"max_bytes": "40%", "context": 96}


class Unnamed(nn.Module):
    """An output projection that nothing gives away."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


class Tokenizer:
    """Some tokens of whatever text."""

    def encode(self, text):
        return prompt_tokens(96)


def model_of(seed, family="qwen2", **changes):
    """A tiny model as `mlx_h2o.load` leaves it, unlike any other test's."""
    width = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model(family, seed, **width, **changes)
    model.mlx_h2o_tokenizer = Tokenizer()
    return model


def kept():
    folder = profile_store.kept_folder()
    return sorted(path.name for path in folder.glob("*.profile.json")) if folder.exists() else []


def budgets(cache):
    return [entry.budgets for entry in cache]


def told(cache):
    return mlx_h2o.describe(cache)[0].reason


@pytest.fixture
def no_computing(monkeypatch):
    """Fails a test that begins to measure."""

    def begun(*args, **kwargs):
        pytest.fail("a pass over a text began")

    for name in ("frames_of_text", "retrieval_losses", "sensitivities"):
        monkeypatch.setattr(f"mlx_h2o.calibration.calibrate.{name}", begun)


def test_a_size_in_bytes_has_a_model_measured_once(capsys, monkeypatch):
    monkeypatch.setattr(_progress, "FIRST", 0.01)
    monkeypatch.setattr(_progress, "EVERY", 0.01)
    model = model_of(100)
    cache = make_prompt_cache(model, **SIZE)
    said = capsys.readouterr().err
    assert 'profile="never"' in said
    assert "--profile never" in said
    assert "measuring heads, " in said  # no terminal: lines
    assert "measuring heads: ended after" in said
    (name,) = kept()
    profile = mlx_h2o.Profile.load(profile_store.kept_folder() / name)
    assert profile.details["text"] == "calibration.txt"
    again = make_prompt_cache(model_of(100), **SIZE)
    assert capsys.readouterr().err == ""
    assert budgets(again) == budgets(cache)
    assert "expected loss" in told(cache)
    explicit = make_prompt_cache(model, **SIZE, budgets=profile)
    assert budgets(explicit) == budgets(cache)


def test_what_is_found_is_not_measured_again(no_computing):
    """Neither by another process, which finds the file, nor where the model ships with one."""
    model, _ = mlx_h2o.load("builtin:recall-4m")
    make_prompt_cache(model, **SIZE)
    assert not kept()


def test_it_can_be_refused(no_computing):
    model = model_of(101)
    cache = make_prompt_cache(model, **SIZE, profile="never")  # makes no frames either
    assert len({tuple(b) for b in budgets(cache)}) == 1
    assert all(entry.settings.frame is None for entry in cache)
    assert 'profile="never"' in told(cache)
    with pytest.raises(ValueError, match="profile must be"):
        make_prompt_cache(model, **SIZE, profile="sometimes")
    with pytest.raises(ValueError, match="with profile"):
        mlx_h2o.install(profile="never")


def test_a_size_in_tokens_measures_nothing(no_computing):
    make_prompt_cache(model_of(102), max_size=48)
    make_prompt_cache(model_of(102), **SIZE, budgets="uniform", frames="none")


def test_without_a_tokenizer_the_description_says_why(no_computing):
    model = model_of(103)
    del model.mlx_h2o_tokenizer
    assert "its tokenizer is not known" in told(make_prompt_cache(model, **SIZE))


def test_heads_that_cannot_be_weighed_are_known_before_anything_is_computed(no_computing, capsys):
    model = model_of(104)
    for layer in model.layers:
        layer.self_attn.o_proj = Unnamed(layer.self_attn.o_proj)
    with pytest.raises(ValueError, match="No output projection was found"):
        require_weighable(model)
    with pytest.raises(ValueError, match="No output projection was found"):
        mlx_h2o.calibrate(model, prompt_tokens(96))
    cache = make_prompt_cache(model, **SIZE, frames="none")
    assert "No output projection" in told(cache)
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_keeps_the_profile_for_this_process(
    capsys, monkeypatch, tmp_path
):
    (tmp_path / "a file").write_text("")
    monkeypatch.setattr(profile_store, "kept_folder", lambda: tmp_path / "a file" / "profiles")
    cache = make_prompt_cache(model_of(105), **SIZE)
    assert "could not be kept" in capsys.readouterr().err
    assert budgets(make_prompt_cache(model_of(105), **SIZE)) == budgets(cache)
    assert capsys.readouterr().err == ""


def test_a_measurement_that_fails_leaves_one_size_for_all(capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr("mlx_h2o.calibration.first_use.calibrated", broken)
    model = model_of(106)
    cache = make_prompt_cache(model, **SIZE, frames="none")
    assert "no memory" in capsys.readouterr().err
    assert "RuntimeError: no memory" in told(cache)
    make_prompt_cache(model, **SIZE, frames="none")
    assert capsys.readouterr().err == ""  # it is not tried again


def test_a_damaged_profile_of_another_model_is_passed_over():
    folder = profile_store.kept_folder()
    folder.mkdir(exist_ok=True)
    (folder / "other.profile.json").write_text("{")
    model, _ = mlx_h2o.load("builtin:recall-4m")
    assert "expected loss" in told(make_prompt_cache(model, **SIZE))


def test_the_server_measures_when_it_loads_and_in_no_request(capsys):
    model = model_of(107)
    served = ServedModel.__new__(ServedModel)
    served.model, served._plans = model, {}
    cache = served.plan(SIZE).empty
    assert "no key scaling" in told(cache)
    assert not kept()
    profile_at_load(model)
    assert len(kept()) == 1
    cache = served.plan({**SIZE, "policy": "salient:sink=4"}).empty
    assert "expected loss" in told(cache)
    assert 'profile="never"' in capsys.readouterr().err


def test_models_that_need_no_profile_are_left_alone(no_computing):
    for family in ("deepseek_v3", "gemma2_by_itself"):
        model = tiny_model(family)
        model.mlx_h2o_tokenizer = Tokenizer()
        profile_at_load(model)
        make_prompt_cache(model, max_bytes=50_000)


def test_blocks_are_as_they_were_after_looking_whatever_happens():
    model, other = model_of(108), model_of(109)
    classes = [type(layer) for layer in model.layers]
    watcher = Watcher()

    def looked_at():
        with watched(model, watcher):
            assert isinstance(model.layers[0], classes[0])
            assert type(model.layers[0]) is not classes[0]
            other(mx.array([[1]]))
            assert watcher.layer is None
            raise KeyError

    with pytest.raises(KeyError):
        looked_at()
    assert [type(layer) for layer in model.layers] == classes


def test_a_config_that_mlx_lm_cannot_run_is_named():
    """gemma3_text looks for the cache of its first full layer, and this one has none."""
    model = tiny_model("gemma3_text", num_hidden_layers=2, sliding_window_pattern=6)
    with pytest.raises(ValueError, match="does not run with mlx-lm's own caches either"):
        layer_kinds(model)


def test_the_command_refuses_by_name_before_it_computes(
    monkeypatch, capsys, no_computing, tmp_path
):
    model = tiny_model("deepseek_v3")
    monkeypatch.setattr("mlx_h2o.cli.calibrate.load_model", lambda _: (model, Tokenizer()))
    assert main(["calibrate", "--out", str(tmp_path / "profile.json")]) == 2
    said = capsys.readouterr().err
    assert "keys that are made of the cached rows" in said
    assert "same number of slots" in said


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with _progress.progress_bar("measuring") as tell:
        tell(1, 2)
    assert "measuring" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate --preset compare", "evaluate", "tune"])
def test_the_measuring_commands_can_refuse_it(command):
    """Each of their caches that would have a model measured is told not to, and says so."""
    for given, profile in (([], "first use"), (["--profile", "never"], "never")):
        args = parser().parse_args([*command.split(), *given])
        if command == "tune":
            methods = tuned_methods(args.policies, args.bits, args.shares, *profile_choice(args))
        else:
            methods = methods_of(args)
        ours = [method for method in methods if method.policy and "bits" in method.described()]
        assert any("bits by bytes" in method.described() for method in ours)
        for method in ours:
            assert method.model_settings().measures == profile
            assert ("profile never" in method.described()) == bool(given)
