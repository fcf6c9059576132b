"""A real Chromium, without a network: what a page looks like, and what its scripts made of it.

``CHROMIUM`` names the binary; otherwise the first of the usual names on PATH. A headless window is at least 500 wide.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def binary() -> str:
    """The Chromium to use. A test that needs one fails without."""
    given = os.environ.get("CHROMIUM")
    found = given or next(filter(None, map(shutil.which, _NAMES)), None)
    assert found, f"no Chromium: install one ({', '.join(_NAMES)}) or set CHROMIUM"
    return found


def dom(page: Path, profile: Path, width: int = 1200) -> tuple[str, str]:
    """The page's HTML once its scripts have run, and what it said to the console."""
    done = _run(page, profile, width, "--dump-dom", "--enable-logging=stderr", "--v=0")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


def screenshot(page: Path, profile: Path, width: int = 1200, height: int = 2400) -> bytes:
    """The page as PNG."""
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
