"""The options of caches: one type, which editors show, names and explains all that there are."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import mlx_h2o
from mlx_h2o.budgets import options
from mlx_h2o.budgets.settings import DEFAULTS, ModelSettings
from mlx_h2o.policies import make_policy, policy_names
from tiny_models import tiny_model

TAKES_THEM = (mlx_h2o.make_prompt_cache, mlx_h2o.install, ModelSettings.of)


@pytest.mark.parametrize("function", TAKES_THEM, ids=lambda function: function.__qualname__)
def test_a_signature_names_the_type_and_no_option_beside_it(function):
    parameters = inspect.signature(function).parameters
    assert parameters["options"].annotation == "Unpack[CacheOptions]"
    assert set(parameters) <= {"model", "max_size", "options"}


def test_no_field_of_a_policy_is_an_option():
    """It is given with the policy; where it is not, the error says how."""
    named = {field.name for name in policy_names() for field in fields(make_policy(name))}
    assert not named & set(options.NAMES)
    for policy, own in (("distinct", "Distinct"), ("h2o:recent=8", "H2O"), (None, "Salient")):
        with pytest.raises(ValueError, match=rf"policy={own}\(sink=\.\.\.\)"):
            mlx_h2o.make_prompt_cache(tiny_model("llama"), 32, policy=policy, sink=2)


def test_every_option_is_explained_where_it_is_written():
    tree = ast.parse(Path(options.__file__).read_text(encoding="utf-8"))
    explained = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(text, ast.Expr), ast.unparse(field)
                    explained.append(field.target.id)
    assert set(explained) == set(options.NAMES)
    text = inspect.getdoc(mlx_h2o.make_prompt_cache)  # which help() shows
    for name in options.NAMES:
        assert re.search(rf"^ +([\w, ]+, )?{name}(, \w+)*: ", text, re.MULTILINE), name


def test_every_default_is_what_the_function_takes_for_it():
    """Given or not given, an option's default means the same."""
    defaults = dict.fromkeys(options.NAMES) | DEFAULTS
    assert ModelSettings.of(64) == ModelSettings.of(64, **defaults)
    assert set(DEFAULTS) <= set(options.NAMES)


@pytest.mark.parametrize(
    ("given", "meant"), [("polcy", "policy"), ("max_siz", "max_size"), ("remaindr", "remainder")]
)
def test_an_unknown_option_is_answered_with_what_was_probably_meant(given, meant):
    with pytest.raises(ValueError, match=f"Did you mean {meant}"):
        mlx_h2o.make_prompt_cache(tiny_model("llama"), 32, **{given: 1})
    with pytest.raises(ValueError, match=f"Did you mean {meant}"):
        mlx_h2o.install(**{given: 1})
