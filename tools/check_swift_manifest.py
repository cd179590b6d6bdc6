#!/usr/bin/env python3
"""Checks the Swift package as Apple's tools read it: `swift package dump-package` on stdin.

The branch of Package.swift for Apple's platforms is never built on Linux; it is evaluated, and this
checks that it still has the expected content.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PLATFORMS = {"macos": "14.0", "ios": "17.0", "tvos": "17.0", "visionos": "1.0"}
PACKAGES = {
    "https://github.com/ml-explore/mlx-swift": ("0.31.4", "0.34.0"),
    "https://github.com/ml-explore/mlx-swift-lm": ("3.31.4", "3.34.0"),
}
MODULES = {
    "MLX": "mlx-swift",
    "MLXNN": "mlx-swift",
    "MLXLMCommon": "mlx-swift-lm",
    "MLXLLM": "mlx-swift-lm",
}


def found_packages(manifest: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The address of each dependency, its lowest version and the first version that is too high."""
    controls = [d["sourceControl"][0] for d in manifest["dependencies"]]
    return {
        c["location"]["remote"][0]["urlString"]: (bounds["lowerBound"], bounds["upperBound"])
        for c in controls
        for bounds in c["requirement"]["range"]
    }


def found_modules(manifest: dict[str, Any], name: str) -> dict[str, str]:
    """The products that a target imports, and their packages."""
    target = next(t for t in manifest["targets"] if t["name"] == name)
    products = [d["product"] for d in target["dependencies"] if "product" in d]
    return {product[0]: product[1] for product in products}


def main() -> None:
    manifest = json.load(sys.stdin)
    platforms = {p["platformName"]: p["version"] for p in manifest["platforms"]}
    for value, expected in (
        (platforms, PLATFORMS),
        (found_packages(manifest), PACKAGES),
        (found_modules(manifest, "CMLXH2O"), {"MLX": "mlx-swift"}),
        (found_modules(manifest, "MLXH2O"), MODULES),
        (found_modules(manifest, "MLXH2OTests"), MODULES),
        (found_modules(manifest, "MLXH2OChecks"), MODULES),
        (found_modules(manifest, "MLXH2ODeviceTests"), MODULES),
        (found_modules(manifest, "h2o-step-overhead"), MODULES),
        ([p["name"] for p in manifest["products"]], ["MLXH2O", "MLXH2OChecks"]),
    ):
        if value != expected:
            sys.exit(f"Package.swift, for Apple's platforms: {value} where {expected} is expected")


if __name__ == "__main__":
    main()
