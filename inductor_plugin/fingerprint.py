"""What may change generated code although the model did not: enters Inductor's cache keys."""

from __future__ import annotations

import functools

from flykernels.versions import mlir_version
from templates.digest import digest

from . import __version__, settings


@functools.cache
def versions(template: str = "gemm") -> dict:
    """Versions that every tuning key of a template holds. MLIR's is None on a machine that cannot compile."""
    return {"plugin": __version__, "templates": digest(template), "mlir": mlir_version()}


def fingerprint() -> str:
    """Plugin version, templates' source digest, MLIR version and the digest of a *pinned* cache.

    A cache that the process itself fills does not enter: it would change with every tuning."""
    v, mode = versions("grouped_gemm"), settings.mode()
    sources = "-".join(versions(t)["templates"][:16] for t in ("scaled_gemm", "grouped_gemm"))  # and the dense one's
    winners = settings.store().content_digest()[:16] if mode != "tune" else "-"
    return f"flykernels-{v['plugin']}-{sources}-{v['mlir']}-{mode}-{winners}"
