"""Where the recorded MI350X traces are, if they are: they are reference data and not part of this repository."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "att-mi350x.tar.xz"


def archive() -> Path | None:
    """The archive named by FLYKERNELS_TRACES, or in a folder shared/data beside this checkout; None if there is
    none."""
    root = Path(__file__).parents[2]
    places = [Path(p) for p in (os.environ.get("FLYKERNELS_TRACES"),) if p]
    places += [base / "shared" / "data" / NAME for base in (root, root.parent)]
    return next((p for p in places if p.is_file()), None)
