"""Draw docs/inspect.png: the page of `mlx_h2o inspect`, as a browser shows it.

    python tools/inspect_picture.py                with the embedded model, whose 8 heads fit
    python tools/inspect_picture.py --model M      with another model

Needs Chromium (apt-get install chromium) and playwright (the extra "dev").
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from mlx_h2o.cli import main as mlx_h2o

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = {"width": 1280, "height": 800}


def main() -> None:
    """Inspect a text, open the page, point at a word, take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:recall-4m")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--max-kv-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "inspect.png")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=SIZE["width"])
    args = parser.parse_args()
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "inspect.html"
        options = ["--model", args.model, "--tokens", str(args.tokens)]
        options += ["--max-kv-size", str(args.max_kv_size), "--out", str(page_file)]
        if code := mlx_h2o(["inspect", *options]):
            raise SystemExit(code)
        browser = playwright.chromium.launch(executable_path=browser_path)
        page = browser.new_page(
            viewport={**SIZE, "width": args.width}, color_scheme=args.scheme, device_scale_factor=1
        )
        page.goto(page_file.as_uri())
        page.screenshot(path=str(args.out))
        browser.close()


if __name__ == "__main__":
    main()
