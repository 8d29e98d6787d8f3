"""Which compiler stands behind the kernels, asked without importing it (`mlir.py` does that)."""

from __future__ import annotations

import functools
import importlib.util
from importlib import metadata

# Import name of each package with MLIR's Python bindings -> names its distribution may have, in order of preference.
MLIR_PACKAGES = {"mlir": ("mlir-python-bindings", "mlir"), "flydsl": ("flydsl",)}


@functools.cache
def mlir_version() -> str | None:
    """Distribution and version of the MLIR bindings that would be used, e.g. "flydsl 0.5.0"; None if there are none."""
    for package, distributions in MLIR_PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            continue
        for distribution in distributions:
            try:
                return f"{distribution} {metadata.version(distribution)}"
            except metadata.PackageNotFoundError:
                continue
        return f"{package} (version unknown)"
    return None
