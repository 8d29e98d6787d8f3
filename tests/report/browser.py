"""Chromium without a window, as Debian's `chromium-headless-shell` or any other Chrome on the path has it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 120


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(the document after its scripts ran, everything that was said on the console or asked of the network)."""
    command = [
        str(find()), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return done.stdout, re.findall(r":CONSOLE[:(].*", done.stderr)
