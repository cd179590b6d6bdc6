"""Draw docs/reference/server-page.png: the page of `mlx_h2o serve`, as a browser shows it.

    python tools/server_picture.py                 with SmolLM2-135M
    python tools/server_picture.py --model M       with another model

Needs Chromium (apt-get install chromium) and playwright (the extra "dev").
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

OUT = Path(__file__).parents[1] / "docs" / "reference" / "server-page.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = {"width": 1280, "height": 800}
MEMORY = ["--max-kv-size", "112", "--kv-memory", "32MB"]
TOKENS = "40"
SYSTEM = (
    "You are the guide of a small mountain hut. The hut has 14 beds. Supper is at six. The code of "
    "the door is 4711. Dogs sleep in the shed."
)
FIRST = (
    "We are four friends from Bergen and we would like to stay on the second of July. Two of us "
    "are vegetarians, and Ingrid cannot eat nuts. We come by the western path. When is supper?"
)
SECOND = "What is the code of the door?"
PINNED = "4711."


@contextmanager
def serving(model: str) -> Iterator[str]:
    """The address of a server of this model, until the context ends."""
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        port = any_free.getsockname()[1]
    command = [sys.executable, "-m", "mlx_h2o", "serve", "--model", model, "--port", str(port)]
    process = subprocess.Popen([*command, *MEMORY])
    try:
        while not answers(port):
            if process.poll() is not None:
                raise SystemExit("The server did not start.")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(30)


def answers(port: int) -> bool:
    """Whether the server takes requests."""
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


def say(page: Page, text: str) -> None:
    """Send a message, and wait until the page shows the remembered tokens."""
    before = page.evaluate("last")
    page.locator("#question").fill(text)
    page.locator("#question").press("Enter")
    while page.evaluate("last") == before:
        time.sleep(0.05)
    # The page's own content policy blocks `wait_for_function`.
    while not page.evaluate("shown !== null && shown.id === last"):
        time.sleep(0.05)


def main() -> None:
    """Serve, chat, pin the number, look at half the memory, take the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with serving(args.model) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.set_default_timeout(60_000)
        page.goto(address)
        page.locator("#first summary").click()
        page.locator("#system").fill(SYSTEM)
        page.locator("#limit").fill(TOKENS)
        page.locator("#pin-system").uncheck()
        page.locator("#first summary").click()
        say(page, FIRST)
        page.locator("#text .w", has_text=PINNED).first.click()
        say(page, SECOND)
        page.locator("#half").check()
        page.locator("#at-half").wait_for()
        page.locator("#text .w", has_text=PINNED).first.hover()
        page.screenshot(path=str(args.out))
        browser.close()


if __name__ == "__main__":
    main()
