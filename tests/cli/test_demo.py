"""The demonstration: what it asks, and what it does without a network."""

from mlx_h2o.cli import demo, main
from mlx_h2o.cli.options import default_model
from mlx_h2o.evaluate.facts import recall_task
from mlx_h2o.evaluate.methods import FULL, WINDOW, Method
from mlx_h2o.evaluate.planting import demo_methods, plant_and_ask
from mlx_h2o.loading import demo_model
from mlx_h2o.loading.load import EMBEDDED_MODEL, SAMPLE_TEXT, load


def test_without_a_network_the_embedded_model_is_asked(tmp_path, monkeypatch, capsys):
    def refuse():
        raise ValueError("no network here")

    monkeypatch.setattr("mlx_h2o.cli.options.default_model", default_model)
    monkeypatch.setattr(demo_model, "path", refuse)
    for name, number in (("TOKENS", 200), ("PREFILL", 150), ("MAX_SIZE", 64)):
        monkeypatch.setattr(demo, name, number)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["demo", "--prompts", "2", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "no network here" in shown.err
    assert f"Going on with {EMBEDDED_MODEL}" in shown.err
    for method in demo_methods(demo.DEFAULT):
        assert method.label in shown.out
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert main(["demo", "--model", demo_model.NAME]) == 2
    assert main(["demo", "--prompts", "0"]) == 2


def test_answers_are_the_models_own_and_the_bytes_are_counted():
    """The full cache knows what was planted; a window too short for it does not."""
    model, tokenizer = load("builtin:recall-4m")
    task = recall_task(tokenizer, SAMPLE_TEXT.read_text(), prompts=4, tokens=300, facts=2)
    steps = []
    full, window = plant_and_ask(
        model,
        tokenizer,
        [Method(FULL), Method(WINDOW, tokens=24)],
        task,
        prefill=280,
        chunk=8,
        progress=lambda done, whole: steps.append((done, whole)),
    )
    assert sum(full.right) >= 3
    wanted = [tokenizer.decode(list(answer)).strip() for answer in task.answers]
    assert [said == want for said, want in zip(full.texts, wanted, strict=True)] == list(full.right)
    assert sum(window.right) <= 1
    assert window.nbytes < full.nbytes / 4
    # 308 tokens (answers included; mlx-lm's cache grows by 256), 4 layers of 2 heads, in 16 bits.
    assert full.nbytes == 512 * 4 * 2 * 2 * 64 * 2
    assert steps[-1] == (616, 616)
    assert len(steps) == 2 * (1 + 3 + 8)


def test_ours_comes_last():
    assert demo_methods(demo.DEFAULT)[-1] is demo.DEFAULT
