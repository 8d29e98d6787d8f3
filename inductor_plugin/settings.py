"""What a user may set, each once, from the environment.

FLYKERNELS_CACHE_DIR  where winners and code objects are kept (several, separated by os.pathsep: the first is written)
FLYKERNELS_MODE       tune           (default) compile and measure what the cache does not know
                      pinned         the cache decides; what it does not know is served by ATen, nothing is measured
                      pinned-strict  the same, but what it does not know is an error
"""

from __future__ import annotations

import functools
import logging
import os

from tuning_cache import Store

log = logging.getLogger(__name__)

MODES = ("tune", "pinned", "pinned-strict")


@functools.cache
def _mode(named: str) -> str:
    if named not in MODES:
        log.warning("FLYKERNELS_MODE=%r is none of %s; taken as 'tune'", named, ", ".join(MODES))
        return "tune"
    return named


def mode() -> str:
    """One of MODES."""
    return _mode(os.environ.get("FLYKERNELS_MODE", "tune").strip().lower())


@functools.cache
def _store(_directories: str | None) -> Store:
    return Store()


def store() -> Store:
    """This process's cache."""
    return _store(os.environ.get("FLYKERNELS_CACHE_DIR"))
