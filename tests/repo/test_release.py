"""A release: its text and version, what it allows, what it knows of itself, and what makes it."""

import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import yaml

from mlx_h2o.attention.backends import choice, reference
from mlx_h2o.cli import main
from mlx_h2o.doctor import commit as commits
from mlx_h2o.hosts import routing
from mlx_h2o.loading import tested_versions
from mlx_h2o.loading.tested_versions import TESTED, UntestedVersion, numbers, warn_if_newer

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
notes = runpy.run_path(str(ROOT / "tools/release_notes.py"))
backend = runpy.run_path(str(ROOT / "python/backend/recording_commit.py"))
CHANGELOG = (
    "# Changelog\n\n## 0.2.0 (unreleased)\n\n- c\n\n## 0.1.1\n\n## 0.1.0 (2026-11-25)\n\n- a\n- b\n"
)


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository with the files that know the commit, and its commit."""
    for name in ("pyproject.toml", ".gitattributes", ".git_archival.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    package = tmp_path / "python/mlx_h2o"
    (package / "data").mkdir(parents=True)
    (package / "py.typed").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "one")
    return tmp_path, package, git(tmp_path, "rev-parse", "HEAD")[:12]


def test_a_release_has_its_section():
    assert notes["section"](CHANGELOG, "0.1.0") == "- a\n- b\n"


@pytest.mark.parametrize(
    ("version", "reason"),
    [("0.2.0", "unreleased"), ("0.1.1", "says nothing"), ("0.1", "no section")],
)
def test_without_a_section_there_is_no_release(version, reason):
    with pytest.raises(notes["NotReady"], match=reason):
        notes["section"](CHANGELOG, version)


def test_a_tag_is_the_version_of_all_sources():
    version = PROJECT["project"]["version"]
    notes["check_versions"](ROOT, version)
    with pytest.raises(notes["NotReady"], match=rf"pyproject\.toml says {version}; .*; Package"):
        notes["check_versions"](ROOT, "9.9.9")


def test_the_oldest_versions_are_those_tested_and_newer_ones_are_allowed():
    """What is compiled against MLX is built with a tested one."""
    required = PROJECT["project"]["dependencies"]
    for name, tested in TESTED.items():
        assert f"{name}>={tested.oldest}" in required
    assert not any("<" in requirement for requirement in required)
    mlx = [part for part in PROJECT["build-system"]["requires"] if part.startswith("mlx")]
    bound = f">={TESTED['mlx'].oldest},<={TESTED['mlx'].newest}"
    assert [bound in part for part in mlx] == [True, True]
    makefile = (ROOT / "Makefile").read_text()
    assert f"OLD_MLX := {TESTED['mlx'].oldest}\n" in makefile
    assert f"OLD_MLX_LM := {TESTED['mlx-lm'].oldest}\n" in makefile


@pytest.fixture
def with_versions(monkeypatch):
    """Sets the versions that are installed, as far as the warning can tell."""

    def pretend(**found):
        monkeypatch.setattr(tested_versions, "version", lambda name: found[name.replace("-", "_")])
        warn_if_newer.cache_clear()

    yield pretend
    warn_if_newer.cache_clear()


def test_a_newer_one_warns_once_at_first_use(with_versions):
    with_versions(mlx="0.33.0.dev20270101", mlx_lm=TESTED["mlx-lm"].newest)
    was_installed = routing.installed()
    routing.uninstall()
    try:
        with pytest.warns(UntestedVersion, match=r"^mlx 0\.33\.0.* newer") as said:
            routing.install()
        assert len(said) == 1
        routing.uninstall()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            routing.install()
    finally:
        if not was_installed:
            routing.uninstall()


def test_kernels_for_another_mlx_are_not_used_and_one_warning_says_so(with_versions, monkeypatch):
    with_versions(mlx="0.33.0", mlx_lm=TESTED["mlx-lm"].newest)
    monkeypatch.setitem(sys.modules, "mlx_h2o.attention.backends.cpu", None)
    monkeypatch.delattr("mlx_h2o.attention.backends.cpu")
    choice.cpu.cache_clear()
    try:
        with pytest.warns(match="built for another MLX and are not used") as warned:
            modules = [choice.cpu(), choice.cpu(), choice.backend(), warn_if_newer("mlx")]
        assert modules == [None, None, reference, None]
        assert len(warned) == 1
    finally:
        choice.cpu.cache_clear()


def test_tested_ones_and_imports_are_silent(with_versions):
    with_versions(mlx=TESTED["mlx"].oldest, mlx_lm=TESTED["mlx-lm"].newest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_newer("mlx")
    program = "import mlx_h2o; from mlx_h2o.loading import tested_versions as t; t.version = "
    program += "lambda name: '99.0'; mlx_h2o.H2OKVCache, mlx_h2o.make_prompt_cache"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_numbers_of_versions():
    assert numbers("0.32.10") > numbers("0.32.4") == numbers("0.32.4.dev1") > numbers("0.32")


def test_version_and_commit_are_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said == f"mlx-h2o {PROJECT['project']['version']} (commit {commits.commit()})\n"


def test_a_checkout_says_its_commit(checkout):
    root, package, commit = checkout
    assert commits.commit(package) == commit
    (package / "py.typed").write_text("changed")
    assert commits.commit(package) == f"{commit}, changed"


def test_a_package_says_what_its_build_recorded(checkout, tmp_path_factory):
    root, package, commit = checkout
    record = package / "data/commit.txt"
    with backend["recorded"](root):
        assert record.read_text() == f"{commit}\n"
        installed = tmp_path_factory.mktemp("site-packages") / "mlx_h2o"
        (installed / "data").mkdir(parents=True)
        (installed / "data/commit.txt").write_text(record.read_text())
    assert not record.exists()
    assert commits.commit(installed) == commit


def test_an_sdist_and_an_archive_go_on_knowing_it(checkout, tmp_path_factory):
    root, package, commit = checkout
    archive = tmp_path_factory.mktemp("archive")
    packed = subprocess.run(["git", "-C", root, "archive", "HEAD"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", archive], input=packed.stdout, check=True)
    record = archive / "python/mlx_h2o/data/commit.txt"
    record.parent.mkdir()
    with backend["recorded"](archive):
        assert record.read_text() == f"{commit}\n"
    (archive / ".git_archival.txt").unlink()
    record.write_text("0123456789ab\n")
    with backend["recorded"](archive):
        assert record.read_text() == "0123456789ab\n"
    assert commits.commit(archive / "python/mlx_h2o") == "0123456789ab"
    record.unlink()
    assert commits.commit(archive / "python/mlx_h2o") == "unknown"


def test_the_build_takes_mlx_for_another_libc():
    made = runpy.run_path(str(ROOT / "tools/install_mlx_to_build.py"))["commands"]
    mlx, others = made(PROJECT, "aarch64", "/site-packages")
    assert mlx[mlx.index("--platform") + 1] == "manylinux_2_35_aarch64"
    bound = f">={TESTED['mlx'].oldest},<={TESTED['mlx'].newest}"
    assert mlx[-2:] == [f"mlx{bound}", f"mlx-cpu{bound}"]
    assert [part for part in others if "mlx" in part] == []
    assert any(part.startswith("nanobind") for part in others)


def test_the_workflow_is_made_of_what_there_is():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert {"sdist", "wheels", "installed", "release"} <= jobs.keys()
    assert all(set(_listed(job.get("needs", []))) <= jobs.keys() for job in jobs.values())
    for tool in re.findall(r"tools/\w+\.\w+", text):
        assert (ROOT / tool).exists(), tool
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert built == "cp311-* cp312-* cp313-* cp314-*"
    tested = jobs["installed"]["strategy"]["matrix"]["python"]
    assert {f"cp{version.replace('.', '')}-*" for version in tested} == set(built.split())


def _listed(value):
    return [value] if isinstance(value, str) else value
