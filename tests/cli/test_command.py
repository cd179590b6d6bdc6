"""The command as a stranger meets it: refusals before work, results kept, tables never cut."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from rich.console import Console

import mlx_h2o
from benchmarks import __main__ as benchmarks
from mlx_h2o import _files
from mlx_h2o.calibration import calibrate
from mlx_h2o.cli import main, tables
from mlx_h2o.evaluate.report import Table
from mlx_h2o.loading.load import SAMPLE_TEXT

EMBEDDED = ["--model", "builtin:recall-4m"]
PROMPT = ["generate", *EMBEDDED, "--prompt", "Anne and Toby"]
COMMAND = [sys.executable, "-c", "import sys; from mlx_h2o.cli import main; sys.exit(main())"]


@pytest.fixture
def no_model(monkeypatch):
    """A model that is loaded is work that was done too early."""

    def load(*_):
        raise AssertionError("the model was loaded before the options were checked")

    monkeypatch.setattr("mlx_h2o.cli.options.load", load)
    monkeypatch.setattr("mlx_h2o.evaluate.reader.load", load)
    monkeypatch.setattr("benchmarks.__main__.load", load)


def refusal(options, capsys, after_work=False):
    """The one line that a refused command prints; after work, the last one."""
    capsys.readouterr()
    command = main
    if options[0] == "benchmarks":  # not a command of the package, but it refuses alike
        command, options = benchmarks.main, options[1:]
    try:
        code = command(options)
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 or after_work
    return lines[-1]


# -- before any work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["generate", "--max-kv-sise", "3"], "--max-kv-sise. Did you mean --max-kv-size?"),
        (["generat"], "there is no command 'generat'. Did you mean generate?"),
        (["gen"], "there is no command 'gen'. Did you mean generate?"),
        (["generate", "words"], "there is no place for 'words'"),
        ([*PROMPT, "--policy", "snapkc"], "--policy: Unknown policy 'snapkc'; choose from"),
        ([*PROMPT, "--policy", "x"], "--policy: Unknown policy 'x'; choose from "),
        ([*PROMPT, "--kv-memory", "25"], "--kv-memory: it is '25' bytes, which is too little"),
        (["serve", "--conversation-memory", "5"], "memory: it is '5' bytes, which is too little"),
        ([*PROMPT, "--prompt-cache-file", "nowhere"], "there is no file nowhere; to begin it"),
        ([*PROMPT, "--max-kv-size", "999999999999"], "--max-kv-size: it must be at most 2,147,483"),
        ([*PROMPT, "--max-kv-size", "9" * 5000], "--max-kv-size: it must be at most 2,147,483,647"),
        ([*PROMPT, "--temp", "inf"], "--temp: it must be a finite number; got 'inf'"),
        ([*PROMPT, "--seed", "-1"], "--seed must be at least 0; got -1"),
        ([*PROMPT, "--policy", "h2o:evict_every=0"], "--policy: evict_every must be"),
        ([*PROMPT, "--policy", "h2o:sink=-1"], "--policy: sink must be"),
        ([*PROMPT, "--policy", "h2o:undo=-1"], "undo must be"),
        ([*PROMPT, "--policy", "h2o:bits=8"], "bits is no field of a policy: --kv-bits"),
        (["serve", "--port", "99999999"], "--port must be at most 65535; got 99999999"),
        (["serve", "--port", "-1"], "--port must be at least 0; got -1"),
        (["serve", *EMBEDDED, "--alias", "a=b"], "--alias a=b: there is no --model b"),
        (["inspect", "--tokens", "1e3"], "--tokens: it must be a whole number; got '1e3'"),
        (["benchmarks", "--rounds", "0"], "--rounds must be at least 1"),
        (["generate"], 'a prompt is needed: --prompt "Once upon a time", or --prompt -'),
        ([*PROMPT, "--save-prompt-cache", "folder"], "no file that could be replaced"),
        ([*PROMPT, "--save-prompt-cache", "file/chat"], "there is no folder"),
        ([*PROMPT, "--policy", "h2o:recent=few"], "--policy: recent must be"),
        (["compress", "x", "--out", "y", "--pin-span", "9:3"], "must be tokens such as 0:40"),
        ([*PROMPT, "--policy", "h2o:group_size=32"], "group_size needs bits"),
        ([*PROMPT, "--max-kv-size", "-7"], "--max-kv-size must be at least 1; got -7"),
        ([*PROMPT, "--policy", "salient:age_weight=nan"], "age_weight must be a finite number"),
        ([*PROMPT, "--policy", "salient:sonk=1"], "has no field sonk; it has sink, recent"),
        ([*PROMPT, "--policy", "salient:sink"], "is written FIELD=VALUE; got 'sink'"),
        ([*PROMPT, "--profile", "nowhere.json"], "Cannot read the profile nowhere.json"),
        (["evaluate", "--policies", "h2p"], "Unknown policy 'h2p'"),
        (["evaluate", "--policies", "h2o:sink=two"], "sink must be a whole number; got 'two'"),
        (["evaluate", "--profile", "nowhere.json"], "Cannot read the profile nowhere.json"),
        (["evaluate", "--out", "file"], "--out: cannot write into file"),
        (["benchmarks", "--only", "model", "--out", "file"], "--out: cannot write into file"),
        (["calibrate", "--out", "no/such/folder/p.json"], "--out: there is no folder"),
        (["calibrate", "--show", "3"], "--show must be at least 12; got 3"),
        (["inspect", "--out", "folder"], "no file that could be replaced"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    options, message, no_model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("something")
    assert message in refusal(options, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_where_nothing_can_be_written_is_refused(no_model, capsys):
    """Not even by root: the system makes that folder's files itself."""
    folder = "/proc" if Path("/proc").is_dir() else "/dev/fd"
    assert "cannot write" in refusal(["calibrate", "--out", f"{folder}/p.json"], capsys)


def test_a_missing_matplotlib_is_told_first(no_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # import fails
    assert "pip install matplotlib" in refusal(["evaluate", "--out", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/folder", "There is no folder 'no/such/folder'"),
        ("nowhere", "There is no folder 'nowhere'"),
        ("file", "'file' is a file: give the folder"),
        ("owner/absent", "'owner/absent': there is no such folder, and the hub says"),
    ],
)
def test_a_model_that_is_not_there_is_called_what_it_is(
    name, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").write_text("something")
    assert message in refusal([*PROMPT, "--model", name], capsys)


def test_sizes_are_called_by_their_options(capsys):
    line = refusal([*PROMPT, "--kv-memory", "200B"], capsys)
    assert "--kv-memory 200B is too small" in line or "--kv-memory 200 is too small" in line
    enough = line.split("make --kv-memory at least ")[1].split(",")[0]
    assert main([*PROMPT, "--kv-memory", enough, "-m", "2"]) == 0


def test_a_cache_that_cannot_be_saved_is_refused_before_it_is_filled(tmp_path, monkeypatch, capsys):
    class Foreign:
        """A model's own kind of cache, in a file that mlx-lm does not know."""

    monkeypatch.setattr("mlx_h2o.cli.generate.bounded_caches", lambda *_: [Foreign()])
    line = refusal([*PROMPT, "--save-prompt-cache", str(tmp_path / "chat")], capsys)
    assert "Cannot save a Foreign" in line


# -- what was computed is kept --------------------------------------------------------------------


def test_a_result_that_cannot_be_written_is_written_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    gone = tmp_path / "gone" / "profile.json"
    with pytest.raises(OSError, match=r"it is in .* instead") as failure:
        _files.write_kept(gone, lambda path: path.write_text("minutes of work"))
    kept = Path(str(failure.value).split("it is in ")[1].split(" instead")[0])
    assert kept.suffix == ".json"
    assert kept.read_text() == "minutes of work"


def test_a_calibration_survives_a_folder_that_went_away(tmp_path, monkeypatch, capsys):
    """The check passed, and then the folder was removed while heads were measured."""
    folder = tmp_path / "folder"
    folder.mkdir()
    text = tmp_path / "short.txt"
    text.write_text(SAMPLE_TEXT.read_text()[:400])
    measure = calibrate.calibrated

    def meanwhile(*args, **options):
        profile = measure(*args, **options)
        shutil.rmtree(folder)
        return profile

    monkeypatch.setattr("mlx_h2o.cli.calibrate.calibrated", meanwhile)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    line = refusal(
        ["calibrate", *EMBEDDED, "--text", str(text), "--out", str(folder / "p.json")],
        capsys,
        after_work=True,
    )
    kept = Path(line.split("it is in ")[1].split(" instead")[0])
    assert mlx_h2o.Profile.load(kept).details["tokens"] > 0


@pytest.mark.parametrize("name", ["chat.bin", "chat", "chat.safetensors"])
def test_a_prompt_cache_is_saved_under_the_name_it_was_given(name, tmp_path):
    cache = [mlx_h2o.H2OKVCache(24)]
    mlx_h2o.save_prompt_cache(str(tmp_path / name), cache)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(mlx_h2o.load_prompt_cache(tmp_path / name)) == 1


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "chat.bin"
    mlx_h2o.save_prompt_cache(path, [mlx_h2o.H2OKVCache(24)])
    before = path.read_bytes()

    def full(name, *_):
        Path(name).write_bytes(b"half")
        raise RuntimeError("[save] no space left")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match=r"Cannot write .*chat\.bin: \[save\] no space left"):
        mlx_h2o.save_prompt_cache(path, [mlx_h2o.H2OKVCache(24)])
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["chat.bin"]


def test_a_link_to_a_file_stays_a_link(tmp_path):
    real, link = tmp_path / "real.bin", tmp_path / "link.bin"
    real.write_bytes(b"old")
    link.symlink_to(real)
    mlx_h2o.save_prompt_cache(link, [mlx_h2o.H2OKVCache(24)])
    assert link.is_symlink()
    assert len(mlx_h2o.load_prompt_cache(real)) == 1


def test_a_resumed_cache_says_that_its_own_settings_stay(tmp_path, capsys):
    file = str(tmp_path / "chat.bin")
    first = [*PROMPT, "-m", "2", "--max-kv-size", "64", "--policy", "h2o"]
    assert main([*first, "--save-prompt-cache", file]) == 0
    capsys.readouterr()
    resumed = ["--prompt-cache-file", file]
    assert main([*PROMPT, "-m", "2", *resumed]) == 0
    assert main([*first, *resumed]) == 0
    assert "keeps the settings" not in capsys.readouterr().err
    assert main([*PROMPT, "-m", "2", *resumed, "--max-kv-size", "32"]) == 0
    said = capsys.readouterr().err
    assert "keeps the settings it was saved with, whatever the options say" in said
    assert "policy h2o" in said


# -- tables ---------------------------------------------------------------------------------------


@pytest.fixture
def table():
    return Table(
        "A title of several words, longer than a narrow terminal is wide",
        ("cache", "perplexity", "facts"),
        [
            ("distinct:recent=0.25:evict_every=8, uniform, no remainder", "46.87", "16/16"),
            ("full cache", "1,234,567.89", "9/16"),
        ],
    )


CELLS = ["distinct:recent=0.25:evict_every=8, uniform, no remainder", "1,234,567.89", "16/16"]


@pytest.mark.parametrize("width", [20, 40, 79, 80, 200])
@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "terminal"])
def test_no_name_and_no_figure_is_cut(width, terminal, table, monkeypatch, capsys):
    """A narrow terminal gets fewer columns, and a line that names the others."""

    def console(**options):
        return Console(**{"width": width, "force_terminal": terminal, **options})

    monkeypatch.setattr(tables, "Console", console)
    tables.show(table)
    printed = capsys.readouterr().out
    shown, _, dropped = printed.partition("Left out for want of width: ")
    for column, cell in zip(table.columns, CELLS, strict=True):
        assert (cell in shown) is (column not in dropped), (column, printed)
    assert bool(dropped) is (terminal and width < 90)
    assert "…" not in printed
    if dropped and width > 73:  # two columns and no more
        assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines())) <= width
    if not terminal:
        assert printed.isascii()
        assert "\x1b" not in printed
        assert len(printed.splitlines()) == 4
        assert len({line.rindex("/16") for line in printed.splitlines()[2:]}) == 1  # aligned


# -- an environment without MLX's backend ---------------------------------------------------------


@pytest.mark.parametrize("program", [
    "from mlx_h2o.cli import main; raise SystemExit(main(['describe']))",
    "import mlx_h2o; mlx_h2o.load",
])  # fmt: skip
def test_a_missing_backend_is_told_with_what_to_do(program, tmp_path):
    """As on Linux without an extra of MLX: its extension finds no libmlx.so."""
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(
        "raise ImportError('libmlx.so: cannot open shared object file: No such file or directory')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode in (1, 2)
    assert "pip install 'mlx[cpu]'" in run.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", ["starlette", "prometheus_client"])
def test_a_server_without_its_packages_names_them(package, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(name={package!r})")
    run = subprocess.run(
        [*COMMAND, "serve", *EMBEDDED],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert "pip install starlette uvicorn pydantic" in line


# -- ends -----------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_ends_it_quietly():
    found = subprocess.run(
        ["bash", "-c", '"$@" | true; echo "${PIPESTATUS[0]}"', "sh", *COMMAND, *PROMPT, "-m", "9"],
        capture_output=True,
        text=True,
    )
    assert found.stdout == "141\n"
    assert "Traceback" not in found.stderr
    assert "BrokenPipe" not in found.stderr


@pytest.mark.parametrize("start", [["-m", "mlx_h2o"], ["mlx_h2o"]], ids=" ".join)
def test_ctrl_c_while_modules_are_imported_ends_it_quietly(start, tmp_path):
    """mlx_lm, in its place, waits to be interrupted."""
    (tmp_path / "mlx_lm.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    if start == ["mlx_h2o"]:  # as pip's script of that name does it
        start = [str(tmp_path / "mlx_h2o")]
        Path(start[0]).write_text("from mlx_h2o.cli import main\nraise SystemExit(main())\n")
    process = subprocess.Popen(
        [sys.executable, *start, "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT  # which a shell calls 130
    assert said == ""


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_class_is_defined_is_no_error(kind, code, monkeypatch, capsys):
    """Python 3.11 reports it as a RuntimeError of `__set_name__`; libraries are imported late."""

    class Signalling:
        def __set_name__(self, owner, name):
            os.kill(os.getpid(), kind)

    def importing(_):
        type("Imported", (), {"attribute": Signalling()})

    monkeypatch.setattr("mlx_h2o.cli.describe.run", importing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["describe"]) == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "\nstopped\n"


def test_streamed_text_ends_with_a_newline(capsys):
    assert main([*PROMPT, "-m", "3"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_what_is_not_utf_8_is_told_in_one_line(monkeypatch, tmp_path, capsys):
    data = b"Anne \xff\xfe"
    line = refusal([*PROMPT[:-1], os.fsdecode(data)], capsys)
    assert "--prompt is not UTF-8" in line
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert "input is not UTF-8, from byte 5 on" in refusal([*PROMPT[:-1], "-"], capsys)
    (tmp_path / "text").write_bytes(data)
    command = ["inspect", *EMBEDDED, "--text", str(tmp_path / "text")]
    assert "is not UTF-8, from byte 5 on" in refusal(command, capsys)
    (tmp_path / "text").write_bytes(b" ")
    assert "is empty" in refusal(command, capsys)
    assert "Did you mean smollm2-135m?" in refusal([*PROMPT, "--model", "smollm2"], capsys)
