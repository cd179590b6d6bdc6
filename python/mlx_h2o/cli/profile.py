"""`mlx_h2o profile`: list, publish or fetch profiles, which are shared as files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from mlx_h2o._utils.files import replacing, require_folder
from mlx_h2o.budgets.profile import Profile
from mlx_h2o.budgets.profile_store import SUFFIX, found_profile, kept_folder, kept_place
from mlx_h2o.budgets.shared_profiles import (
    INDEX,
    Entry,
    checked_name,
    entries_of,
    fetched,
    name_for,
    publish,
)
from mlx_h2o.cli.tables import show
from mlx_h2o.integration.layer_probe import identity_by_kinds
from mlx_h2o.integration.recorder import profiled_kinds
from mlx_h2o.loading.load import load, shipped_profiles

#: The folder of shared profiles in a checkout.
FOLDER = "profiles"
COLUMNS = ("name", "model", "layers", "KV heads", "size", "measured", "SHA-256")
#: Digits of a digest in a table; --json has them all.
SHORT_DIGEST = 12


def add_parser(commands: Any) -> None:
    """Add `profile` to the command's subparsers."""
    parser = commands.add_parser(
        "profile",
        help="list, publish or fetch profiles of models",
        description="A profile says how many slots each KV head of a model deserves. `mlx_h2o "
        "calibrate` measures it; here it is shared as a file. Nothing is fetched but by `profile "
        "fetch`.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = _action(actions, "list", list_all, "profiles of this user, or those of a folder")
    listing.add_argument(
        "--from", dest="source", metavar="SOURCE", help=f"a folder with {INDEX}, or its https "
        "address (default: the profiles that are found by themselves)",
    )  # fmt: skip

    publishing = _action(actions, "publish", publish_all, "put profiles into a folder for others")
    publishing.add_argument(
        "models", nargs="+", metavar="MODEL",
        help="a model that has a profile (a folder, a hub id, a .gguf file), or a profile's file",
    )  # fmt: skip
    publishing.add_argument(
        "--to", type=Path, default=Path(FOLDER), metavar="DIR", help="default: %(default)s"
    )
    publishing.add_argument(
        "--name", help="the profile's name there (default: the last part of the model's own)"
    )

    fetching = _action(actions, "fetch", fetch, "get a profile, and keep it where it is found")
    fetching.add_argument("name", metavar="NAME", help="the profile's name: see profile list")
    fetching.add_argument(
        "--from", dest="source", default=FOLDER, metavar="SOURCE",
        help=f"a folder with {INDEX}, or its https address (default: %(default)s)",
    )  # fmt: skip
    fetching.add_argument("--sha256", metavar="HEX", help="the digest that it must have")
    fetching.add_argument(
        "--model", help="refuse it unless it is this model's, which is loaded for that"
    )
    fetching.add_argument(
        "--replace", action="store_true", help="replace another profile of the same model"
    )


def _action(actions: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text.capitalize() + "."
    )
    action.add_argument("--json", action="store_true", help="print JSON")
    action.set_defaults(run=run)
    return action


def list_all(args: argparse.Namespace) -> None:
    """Print the profiles of a source, or those that are found by themselves."""
    entries = _found_here() if args.source is None else entries_of(args.source)
    if args.json:
        print(json.dumps({name: asdict(entry) for name, entry in entries.items()}, indent=2))
        return
    table = Table(title=f"{args.source or 'found by themselves'}: {len(entries)} profiles")
    for column in COLUMNS:
        table.add_column(column)
    for name, entry in entries.items():
        table.add_row(
            name,
            entry.model_type,
            str(entry.layers),
            str(entry.kv_heads),
            f"{entry.nbytes / 1e6:.1f} MB",
            f"{entry.made}{', quickly' if entry.quick else ''}",
            entry.sha256[:SHORT_DIGEST],
        )
    show(table)


def _found_here() -> dict[str, Entry]:
    """This user's profiles and the shipped ones, by the names of their files."""
    found = {}
    for path in [*sorted(kept_folder().glob(f"*{SUFFIX}")), *shipped_profiles()]:
        try:
            text = path.read_bytes()
            profile = Profile.of_text(text, str(path))
        except (OSError, ValueError):  # a damaged one is not found either
            continue
        # The profile of a model with a folder of its own is called by the folder.
        name = path.name.removesuffix(SUFFIX) if path.name.endswith(SUFFIX) else path.parent.name
        found[name] = Entry.of(profile, text)
    return found


def publish_all(args: argparse.Namespace) -> None:
    """Put the profiles of some models into a folder."""
    if args.name is not None and len(args.models) > 1:
        raise ValueError("--name names one profile: give one model with it.")
    require_folder("--to", args.to)
    published = {}
    for model in args.models:
        name = checked_name(args.name) if args.name is not None else name_for(model)
        published[name] = publish(_profile_of(model), name, args.to)
        if not args.json:
            print(f"{args.to / (name + SUFFIX)}  {published[name].sha256}")
    if args.json:
        print(json.dumps({name: asdict(entry) for name, entry in published.items()}, indent=2))


def _profile_of(model: str) -> Profile:
    """The profile of a file, or of a model by its name.

    Raises:
        ValueError: The model has none.
    """
    if model.endswith(".json"):
        return Profile.load(model)
    loaded, _ = load(model)
    profile = found_profile(loaded, identity_by_kinds(loaded, profiled_kinds(loaded)))
    if profile is None:
        raise ValueError(
            f"{model} has no profile yet: measure it with `mlx_h2o calibrate --model {model}`."
        )
    return profile


def fetch(args: argparse.Namespace) -> None:
    """Keep a profile from elsewhere among this user's."""
    profile = fetched(args.source, args.name, args.sha256)
    if args.model is not None:
        loaded, _ = load(args.model)
        profile.require(identity_by_kinds(loaded, profiled_kinds(loaded)))
    place = kept_place(profile.model)
    if place.exists() and not args.replace and _differs(place, profile):
        raise ValueError(
            f"You have another profile of this model, {place}: give --replace to replace it."
        )
    require_folder("the user's cache folder", place.parent)
    with replacing(place) as temporary:
        profile.save(temporary)
    if args.json:
        print(json.dumps({"profile": str(place), "sha256": profile.digest}))
    else:
        print(place)


def _differs(place: Path, profile: Profile) -> bool:
    """Whether a file holds anything but this profile."""
    try:
        return Profile.load(place).digest != profile.digest
    except ValueError:
        return False  # a damaged one is never found, so nothing is lost with it
