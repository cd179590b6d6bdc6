"""`mlx_h2o profile`: what is published is fetched whole, or refused, and nothing is lost."""

from __future__ import annotations

import functools
import http.server
import json
import threading

import pytest

from mlx_h2o.budgets import shared_profiles
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import kept_place
from mlx_h2o.budgets.shared_profiles import INDEX, fetched, name_for
from mlx_h2o.cli import main
from mlx_h2o.loading.load import shipped_profiles

MODEL = "builtin:recall-4m"
EMBEDDED = next(path for path in shipped_profiles() if "recall-4m" in str(path))


@pytest.fixture(autouse=True)
def of_this_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """A folder with the embedded model's profile, called "small"."""
    made = tmp_path / "shared"
    assert main(["profile", "publish", str(EMBEDDED), "--to", str(made), "--name", "small"]) == 0
    return made


def refused(options, capsys):
    capsys.readouterr()
    assert main(["profile", *options]) == 2
    return capsys.readouterr().err


def kept():
    return kept_place(Profile.load(EMBEDDED).model)


def test_what_was_published_comes_back_whole_and_is_found(folder, capsys):
    capsys.readouterr()
    assert main(["profile", "fetch", "small", "--from", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["profile"] == str(kept())
    assert Profile.load(kept()).digest == Profile.load(EMBEDDED).digest == told["sha256"]
    main(["profile", "list", "--json"])
    assert told["sha256"] in [one["sha256"] for one in json.loads(capsys.readouterr().out).values()]


def test_a_model_is_published_by_its_name(tmp_path, capsys):
    assert main(["profile", "publish", MODEL, "--to", str(tmp_path)]) == 0
    assert main(["profile", "list", "--from", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    (name,) = json.loads(out[out.index("{") :])
    assert name == name_for(MODEL) == "builtin-recall-4m"
    assert main(["profile", "list", "--from", str(tmp_path)]) == 0
    assert name in capsys.readouterr().out


def test_publishing_keeps_the_others_of_the_folder(folder):
    main(["profile", "publish", str(EMBEDDED), "--to", str(folder), "--name", "another"])
    assert list(shared_profiles.entries_of(str(folder))) == ["another", "small"]


def test_an_address_serves_as_a_folder_does(folder, capsys):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        assert fetched(address, "small").digest == Profile.load(EMBEDDED).digest
        assert "404" in refused(["list", "--from", address + "nothing"], capsys)
        server.shutdown()


@pytest.mark.parametrize("address", ["http://example.org/x", "ftp://127.0.0.1/x", "file:///etc"])
def test_only_https_leaves_this_machine(address, capsys):
    assert "not an https address" in refused(["list", "--from", address], capsys)


def test_another_digest_keeps_nothing(folder, capsys):
    path = folder / "small.profile.json"
    entry = shared_profiles.entries_of(str(folder))["small"]
    asked = ["fetch", "small", "--from", str(folder)]
    assert "was asked for" in refused([*asked, "--sha256", "0" * 64], capsys)
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.2", 1))
    assert path.stat().st_size == entry.nbytes
    assert "its index says" in refused(asked, capsys)
    assert not kept().exists()


def test_a_larger_file_than_the_index_says_is_not_read(folder, capsys):
    with (folder / "small.profile.json").open("ab") as file:
        file.truncate(1 << 40)  # a hole
    assert "larger than" in refused(["fetch", "small", "--from", str(folder)], capsys)


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 2},
        {"profiles": []},
        {"profiles": {"../small": {}}},
        {"profiles": {"small": {"sha256": "x"}}},
        {"nbytes": shared_profiles.LARGEST_PROFILE + 1},
        {"nbytes": 3.0},
        {"sha256": "../.."},
        {"quick": "no"},
        {"layers": -1},
        {"model_type": 3},
        {"more": 1},
    ],
)
def test_a_damaged_index_is_refused(folder, damage, capsys):
    index = json.loads((folder / INDEX).read_text())
    target = index if damage.keys() <= index.keys() else index["profiles"]["small"]
    target.update(damage)
    (folder / INDEX).write_text(json.dumps(index))
    said = refused(["fetch", "small", "--from", str(folder)], capsys)
    assert "Cannot read the index" in said
    assert len(said.splitlines()) == 1


def test_a_file_that_is_no_profile_is_refused(folder, capsys, monkeypatch):
    (folder / "small.profile.json").write_text("{}")
    index = json.loads((folder / INDEX).read_text())
    entry = index["profiles"]["small"]
    entry["sha256"], entry["nbytes"] = shared_profiles.hashlib.sha256(b"{}").hexdigest(), 2
    (folder / INDEX).write_text(json.dumps(index))
    assert "no mlx-h2o profile" in refused(["fetch", "small", "--from", str(folder)], capsys)


def test_a_profile_that_a_user_measured_is_not_replaced_unasked(folder, capsys):
    own = Profile.load(EMBEDDED)
    own.details["date"] = "2020-01-01"
    kept().parent.mkdir(parents=True)
    own.save(kept())
    asked = ["fetch", "small", "--from", str(folder)]
    assert "--replace" in refused(asked, capsys)
    assert Profile.load(kept()).digest == own.digest
    assert main(["profile", *asked, "--replace"]) == 0
    assert Profile.load(kept()).digest != own.digest


def test_another_models_profile_is_refused(folder, tmp_path, capsys):
    other = json.loads(EMBEDDED.read_text())
    other["model"]["vocab_size"] += 1
    path = tmp_path / "other.json"
    path.write_text(json.dumps(other))
    main(["profile", "publish", str(path), "--to", str(folder), "--name", "other"])
    asked = ["fetch", "--from", str(folder), "--model", MODEL]
    assert "another model" in refused([*asked, "other"], capsys)
    assert main(["profile", *asked, "small"]) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["publish", str(EMBEDDED), "--name", "../x", "--to", "DIR"], "small letters"),
        (["publish", str(EMBEDDED), "x", "--name", "x", "--to", "DIR"], "--name names one"),
        (["publish", "nowhere.json", "--to", "DIR"], "Cannot read the profile"),
        (["fetch", "unknown", "--from", "SHARED"], "it has: small"),
        (["fetch", "x", "--from", "DIR"], "index.json"),
    ],
)
def test_what_cannot_be_done_says_why(folder, tmp_path, options, says, capsys):
    places = {"DIR": str(tmp_path / "empty"), "SHARED": str(folder)}
    said = refused([places.get(option, option) for option in options], capsys)
    assert says in said
    assert "Traceback" not in said


def test_publishing_over_a_damaged_index_loses_nothing(folder, capsys):
    (folder / INDEX).write_text("[")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(["publish", str(EMBEDDED), "--to", str(folder), "--name", "new"], capsys)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
