"""`python -m bench NAME [options]`: runs bench/NAME.py. Every bench has `main(argv) -> int` and takes `--json FILE`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HIDDEN = {"common"}


def names() -> list[str]:
    """The benches there are, as one types them."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(f.stem.replace("_", "-") for f in files if not f.stem.startswith("_") and f.stem not in HIDDEN)


def main(argv: list[str]) -> int:
    """Runs one bench and returns its exit code: 0 when every bar is met."""
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: python -m bench NAME [--json FILE] [options]\n\nbenches: {', '.join(names())}")
        return 0 if argv else 2
    if argv[0] not in names():
        print(f"bench: no bench named {argv[0]!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    return importlib.import_module(f"bench.{argv[0].replace('-', '_')}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
