"""What may change generated code although the model did not: enters Inductor's cache keys."""

from __future__ import annotations

import functools
from pathlib import Path

from flykernels.versions import mlir_version
from templates import kinds
from templates.digest import digest, of_folders

from . import __version__, settings

TEMPLATES = (*kinds.PROBLEMS, "rms_norm", "topk")  # that tuning keys are of


@functools.cache
def versions(template: str = "gemm") -> dict:
    """Versions that every tuning key of a template holds. MLIR's is None on a machine that cannot compile."""
    return {"plugin": __version__, "templates": digest(template), "mlir": mlir_version()}


@functools.cache
def of_the_plugin() -> str:
    """Digest of the plugin's own sources: what it fuses and how it calls kernels is in generated code too."""
    return of_folders(Path(__file__).parent)


def fingerprint() -> str:
    """Plugin version and sources, templates' source digest, MLIR version and the digest of a *pinned* cache.

    A cache that the process itself fills does not enter: it would change with every tuning."""
    v, mode = versions("grouped_gemm"), settings.mode()
    of_templates = (versions(t)["templates"] for t in ("scaled_gemm", "grouped_gemm"))  # and the dense one's
    sources = "-".join(digest[:16] for digest in (of_the_plugin(), *of_templates))
    winners = settings.store().content_digest()[:16] if mode != "tune" else "-"
    return f"flykernels-{v['plugin']}-{sources}-{v['mlir']}-{mode}-{winners}"
