"""A real Chromium: driven by Playwright, or without a network for a screenshot of a page and for its HTML.

``CHROMIUM`` names the binary. Otherwise the first of the usual names on PATH is used. A headless window is at least 500
pixels wide.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PATIENCE_MS = 120_000
"""Time for a start of Chromium, or for a step of a page, on a busy machine."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def binary() -> str:
    """Return the Chromium to use. A test that needs one fails without it."""
    given = os.environ.get("CHROMIUM")
    found = given or next(filter(None, map(shutil.which, _NAMES)), None)
    assert found, f"no Chromium: install one ({', '.join(_NAMES)}) or set CHROMIUM"
    return found


@contextmanager
def launched() -> Iterator[Browser]:
    """A Chromium that Playwright drives, during the ``with``."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=binary(), args=["--no-sandbox"], timeout=PATIENCE_MS
        )
        yield chromium
        chromium.close()


def dom(page: Path, profile: Path, width: int = 1200) -> tuple[str, str]:
    """Return the page's HTML after its scripts have run, and its messages to the console."""
    done = _run(page, profile, width, "--dump-dom", "--enable-logging=stderr", "--v=0")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


def screenshot(page: Path, profile: Path, width: int = 1200, height: int = 2400) -> bytes:
    """Return the page as PNG."""
    image = profile / f"{width}.png"
    _run(page, profile, width, f"--screenshot={image}", f"--window-size={width},{height}")
    return image.read_bytes()


def _run(page: Path, profile: Path, width: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        binary(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}",
        f"--window-size={width},2400",
        "--virtual-time-budget=15000",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
