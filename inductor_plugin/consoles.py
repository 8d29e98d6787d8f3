"""Where commands print. What they print is mostly data (names, reasons, paths) and comes out as it is: no brackets are
styles, no colons emoji, and what the terminal's encoding lacks is an escape."""

from __future__ import annotations

import sys

from rich.console import Console


def console_here(width: int = 160) -> Console:
    """A terminal, or lines wide enough not to be broken."""
    plain = {"markup": False, "emoji": False}
    found = Console(**plain)  # type: ignore[arg-type]
    return found if found.is_terminal else Console(width=width, **plain)  # type: ignore[arg-type]


def escape_what_cannot_be_encoded() -> None:
    """On the standard streams, for the rest of the process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
