"""`mlx_h2o doctor`: the whole command at a small size, what it finds broken, what Ctrl-C leaves."""

import json
import signal
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_h2o._utils import interrupts
from mlx_h2o._utils.progress import Told
from mlx_h2o.attention.backends.verification.compared import Error
from mlx_h2o.attention.backends.verification.verdicts import Verdict
from mlx_h2o.cli import main
from mlx_h2o.doctor import checks, examination, machine, timings, variants
from mlx_h2o.doctor.chips import CHIPS, NOT_APPLE, chip_named, chip_of
from mlx_h2o.doctor.cover import pairs_covered
from mlx_h2o.doctor.page import page
from mlx_h2o.doctor.report import Report, Section

SMALL = ["--slots", "64", "--rounds", "1"]


@pytest.fixture
def few_checks(monkeypatch):
    """Some variants, and small layers."""
    all_checks = list(variants.checks())
    monkeypatch.setattr(examination, "every_check", lambda: all_checks[::5])
    monkeypatch.setattr(timings, "CYCLED_BYTES", 1 << 20)
    monkeypatch.setattr("mlx_h2o.doctor.held_memory.PROMPT", 512)
    monkeypatch.setattr("mlx_h2o.doctor.held_memory.SLOTS", 256)


def test_the_whole_command(few_checks, tmp_path, capsys):
    assert main(["doctor", "--quick", *SMALL, "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written == printed
    assert printed["held"]
    assert printed["complete"]
    assert list(printed["sections"]) == list(examination.PARTS)
    assert printed["machine"]["versions"]["mlx"]
    assert {row["arm"] for row in printed["sections"]["timings"]["data"]} >= {
        "MLX's attention",
        "attention with scores",
        "RotatingKVCache and MLX's attention",
    }
    assert all(row["seconds"] > 0 for row in printed["sections"]["timings"]["data"])
    html = (tmp_path / "doctor.html").read_text()
    assert "everything held" in html


def test_what_people_read(few_checks, capsys):
    assert main(["doctor", "--parts", "timings", "memory", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "BLAS: " in said
    assert "held / told" in said
    assert "over MLX's" in said
    assert "everything held" in said


@pytest.mark.parametrize("broken", ["attention", "a fused step"])
def test_a_kernel_that_is_off_fails(broken, few_checks, monkeypatch, capsys):
    """The check itself is real; what the kernels hand out is not."""
    from mlx_h2o.attention.backends import cpu

    if broken == "attention":
        real = cpu.attention_with_mass
        monkeypatch.setattr(
            cpu, "attention_with_mass", lambda *a, **o: (1.1 * (r := real(*a, **o))[0], *r[1:])
        )
    else:
        from mlx_h2o.attention.backends.cpu_decoder import CPUDecoder

        step = CPUDecoder.step
        monkeypatch.setattr(
            CPUDecoder, "step", lambda self, s: (1.1 * (r := step(self, s))[0], *r[1:])
        )
    assert main(["doctor", "--parts", "kernels"]) == 1
    said = capsys.readouterr().out
    assert f"FAILED: kernel variants beside the definition: {broken}" in said
    assert "differs by" in said
    assert "checks failed" in said


def test_a_kernel_that_raises_fails(few_checks, monkeypatch):
    monkeypatch.setattr(
        "mlx_h2o.attention.backends.cpu.attention_with_mass",
        lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no such instruction")),
    )
    report = examination.examine(examination.Plan(("kernels",)), Told("examining"))
    assert any("raised RuntimeError: no such instruction" in line for line in report.failures)


def test_other_words_in_the_conversation_fail(monkeypatch):
    from mlx_h2o.doctor import conversation

    logits = iter([mx.array([[0.0, 1.0]] * 4), mx.array([[1.0, 0.0]] * 4)] * 3)
    monkeypatch.setattr(conversation, "_logits", lambda *_: next(logits))
    report = Report({})
    conversation.section(report.begun, tokens=4, prompt=8)
    assert len(report.failures) == 3
    assert "4 words of 4 differ" in report.failures[0]


def test_time_that_is_over_leaves_the_rest_out(monkeypatch):
    report = Report({})
    found = [checks.Check(name, lambda: Verdict("a step of x", True)) for name in "abc"]
    checks.section(report.begun, found, lambda *_: None, lambda: True)
    assert report.sections[0].notes == ["2 of 3 variants were not reached."]
    monkeypatch.setattr(timings, "CYCLED_BYTES", 1)
    timings.section(report.begun, (32, 64, 96), 1, None, lambda *_: None, lambda: True)
    assert "No time was left for 64, 96 slots." in report.sections[1].notes


@pytest.mark.parametrize("stop", [KeyboardInterrupt, interrupts.Terminated])
def test_what_is_broken_off_keeps_what_was_found(stop, monkeypatch, tmp_path, capsys):
    def interrupted():
        raise stop

    made = [
        checks.Check("one", lambda: Verdict("a step of one", False, "output differs by much", 3.0)),
        checks.Check("two", interrupted),
    ]
    monkeypatch.setattr(examination, "every_check", lambda: made)
    code = 130 if stop is KeyboardInterrupt else 143
    assert main(["doctor", "--out", str(tmp_path)]) == code
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert not found["complete"]
    assert list(found["sections"]) == ["kernels"]
    assert "output differs by much" in found["failures"][0]
    assert "FAILED" in capsys.readouterr().out


def test_ctrl_c_of_the_process(tmp_path):
    program = "import sys; from mlx_h2o.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "doctor", "--parts", "kernels", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr.readline().startswith("examining")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert not json.loads((tmp_path / "doctor.json").read_text())["complete"]


def test_memory_that_is_not_told_fails(monkeypatch):
    from mlx_h2o.doctor import held_memory

    monkeypatch.setattr(held_memory, "layer", lambda _: (10 << 20, 12 << 20, 20 << 20))
    report = Report({})
    held_memory.section(report.begun)
    assert len(report.failures) == 3


def test_every_kind_of_variant_is_checked():
    """All pairs of options: each policy with each width of rows, each mask with each dtype."""
    attention = {(v.dtype, v.mask) for v in variants.attention_variants()}
    assert {mask for _, mask in attention} >= {"none", "causal", "bool", "float32", "float16"}
    fused = variants.fused_variants()
    pairs = {
        (settings.policy, settings.packing.k_bits, settings.packing.v_bits) for _, settings in fused
    }
    assert len(pairs) == 10 * len(variants.BITS)  # one policy's kernels are a GPU's alone
    names = [check.name for check in variants.checks()]
    assert len(names) == len(set(names))


def test_pairs_are_covered_by_few_combinations():
    choices = {name: range(4) for name in "abcde"}
    found = pairs_covered(choices, lambda c: c["a"] != c["b"])
    assert len(found) < 45  # of 768
    for x, y in ("ac", "cd", "be"):
        assert len({(c[x], c[y]) for c in found}) == 16
    assert len({(c["a"], c["b"]) for c in found}) == 12
    assert pairs_covered(choices, lambda _: False) == []


def test_a_page_escapes_what_it_shows():
    report = Report({"device": "<GPU>"}, [Section("a", "b & c", ("x",), [("<y>",)])])
    report.sections[0].failures.append("<z>")
    html = page(report)
    assert "&lt;GPU&gt;" in html
    assert "<y>" not in html
    assert "1 checks failed" in html


def test_the_machine_is_told():
    found = machine.machine()
    assert found["memory"] > 1 << 28
    assert found["kernels"].startswith("CPU")
    assert json.loads(json.dumps(found)) == found


def test_predictions(capsys):
    assert main(["doctor", "--predict", "Apple M2  pro", "--slots", "1024", "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    by_arm = {row["arm"]: row for row in rows}
    dense = by_arm["MLX's attention"]
    assert dense["seconds"] == pytest.approx(dense["bytes"] / 200e9)
    assert by_arm["the same, rows in 4 bits"]["bytes"] < dense["bytes"] / 3
    assert main(["doctor", "--predict", "M2 Pro"]) == 0
    assert "nothing here is measured" in capsys.readouterr().out
    assert main(["doctor", "--predict", "M2 Prp"]) == 2
    assert "Did you mean 'M2 Pro'?" in capsys.readouterr().err


def test_chips_have_a_source_each():
    assert len(CHIPS) == 23
    sources = [s for chip in CHIPS.values() for s in (chip.bandwidth_from, chip.operations_from)]
    assert all(source.startswith(("Apple's ", NOT_APPLE)) for source in sources)
    # Apple names no bandwidth of M1 and of A chips, and arithmetic of three chips only.
    silent = {name for name, chip in CHIPS.items() if chip.bandwidth_from.startswith(NOT_APPLE)}
    assert silent == {"M1", *(name for name in CHIPS if name[0] == "A")}
    told = {name for name, chip in CHIPS.items() if not chip.operations_from.startswith(NOT_APPLE)}
    assert told == {"M1", "M1 Pro", "M1 Max"}
    assert NOT_APPLE in CHIPS["M2"].note
    assert CHIPS["M2"].operations == pytest.approx(3.6e12, rel=0.01)
    assert all(30e9 < chip.bandwidth < 1e12 for chip in CHIPS.values())
    assert chip_of("Apple M4 Max") == chip_named("M4 Max")
    assert chip_of("AMD EPYC") is None


def test_measured_stands_beside_predicted(monkeypatch):
    monkeypatch.setattr(timings, "CYCLED_BYTES", 1)
    report = Report({})
    timings.section(report.begun, (64,), 1, CHIPS["M1"], lambda *_: None, lambda: False)
    row = report.sections[0].data[0]
    assert row["of_chip"] == pytest.approx(row["bytes_per_second"] / 68.25e9)
    assert row["predicted_seconds"] > 0
    assert "M1, published figures" in report.sections[0].notes[1]


def test_an_error_is_no_crash():
    assert not Error(float("nan"), "").held
