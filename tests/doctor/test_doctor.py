"""`mlx_h2o doctor`: the whole command at a small size, and the faults that it finds."""

import json

import mlx.core as mx
import pytest

from mlx_h2o.attention.backends.self_check import Error, Verdict
from mlx_h2o.cli import main
from mlx_h2o.doctor import examination, variants
from mlx_h2o.doctor.examination import Section

NOTHING = Section("nothing", [{"a": 1}])


@pytest.fixture
def small(monkeypatch):
    """Some variants, and small layers."""
    all_checks = list(variants.every_check())
    monkeypatch.setattr(examination, "every_check", lambda: all_checks[::8])
    monkeypatch.setattr(examination, "KV_HEADS", 2)
    monkeypatch.setattr(examination, "QUERY_HEADS", 4)
    monkeypatch.setattr(examination, "WIDTH", 64)


def only(part, monkeypatch):
    """Leaves the other parts of the examination out."""
    for name in {"kernels", "conversation", "memory"} - {part}:
        monkeypatch.setattr(examination, f"{name}_section", lambda *_: NOTHING)


def test_the_whole_command(small, capsys):
    assert main(["doctor", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        *("machine", "kernels", "conversation", "memory", "failures", "seconds")
    ]
    assert report["failures"] == []
    assert report["machine"]["versions"]["mlx"]
    assert report["machine"]["memory"] > 1 << 28
    assert report["machine"]["kernels"].startswith("CPU")
    assert sum(row["variants"] for row in report["kernels"]) > 3
    assert [row["words alike"] for row in report["conversation"]] == [48] * 3
    assert {row["rows"] for row in report["memory"]} == {"dense", "8 bits", "4 bits"}


def test_what_people_read(small, monkeypatch, capsys):
    only("memory", monkeypatch)
    assert main(["doctor", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "blas: " in printed
    assert "peak of the prompt" in printed
    assert "no fault was found" in printed


@pytest.mark.parametrize("broken", ["attention", "a fused step"])
def test_a_kernel_that_is_off_fails(broken, small, monkeypatch, capsys):
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
        monkeypatch.setattr(CPUDecoder, "step", lambda self, s: 1.1 * step(self, s))
    only("kernels", monkeypatch)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert f"FAILED: kernel variants beside the definition: {broken}" in printed
    assert "differs by" in printed
    assert "checks failed" in printed


def test_a_kernel_that_raises_fails(small, monkeypatch):
    monkeypatch.setattr(
        "mlx_h2o.attention.backends.cpu.attention_with_mass",
        lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no such instruction")),
    )
    failures = examination.kernels_section().failures
    assert any("raised RuntimeError: no such instruction" in line for line in failures)


def test_other_words_in_the_conversation_fail(monkeypatch):
    logits = iter([mx.array([[0.0, 1.0]] * 4), mx.array([[1.0, 0.0]] * 4)] * 3)
    monkeypatch.setattr(examination, "_next_logits", lambda *_: next(logits))
    monkeypatch.setattr(examination, "CONVERSATION", (8, 4, 96))
    section = examination.conversation_section()
    assert len(section.failures) == 3
    assert "4 words of 4 differ" in section.failures[0]


def test_memory_beyond_nbytes_fails(monkeypatch):
    monkeypatch.setattr(examination, "_layer_memory", lambda *_: (10 << 20, 12 << 20, 20 << 20))
    assert len(examination.memory_section().failures) == 3


def test_every_option_of_the_kernels_is_checked():
    attention = list(variants.attention_variants())
    assert {v.mask for v in attention} == {
        "none",
        "causal",
        "bool",
        "float32",
        "float16",
        "bfloat16",
    }
    fused = list(variants.fused_variants())
    policies = {settings.policy for _, settings in fused}
    assert len(policies) == len(variants.POLICIES) - 1  # one policy's kernels are a GPU's alone
    for some in (attention, [variant for variant, _ in fused]):
        assert len({v.widths for v in some}) == len(variants.SHARED["widths"])
        assert len({(v.dtype, v.group, v.sinks) for v in some}) == 3 * 3 * 2
    assert len({v.packing for v in attention}) == len(variants.SHARED["bits"])
    pairs = {(s.policy, s.packing.k_bits, s.packing.v_bits) for _, s in fused}
    assert len(pairs) > 0.5 * len(policies) * len(variants.SHARED["bits"])


def test_an_error_is_no_crash():
    assert not Error(float("nan"), "").tolerable
    assert Verdict.of("a variant", lambda: Error(0.5, "")).usable
