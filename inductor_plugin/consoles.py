"""Where commands print. What they print is mostly data (names, reasons, paths), some of it from outside, and comes out
as it is: no brackets are styles, no colons emoji, and what moves a terminal's cursor, or its encoding lacks, is an
escape."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if n not in map(ord, "\t\n")}


def plain(text: str) -> str:
    """Without characters that a terminal obeys."""
    return text.translate(CONTROLS)


class _Plain(Console):
    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        return super().render_str(plain(text), *args, **options)


def console_here(width: int = 160) -> Console:
    """A terminal, or lines wide enough not to be broken."""
    found = _Plain(markup=False, emoji=False)
    return found if found.is_terminal else _Plain(width=width, markup=False, emoji=False)


def escape_what_cannot_be_encoded() -> None:
    """On the standard streams, for the rest of the process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
