"""What a user may set, each once, from the environment.

FLYKERNELS_CACHE_DIR  where winners and code objects are kept (several, separated by os.pathsep: the first is written)
FLYKERNELS_CACHE_MAX_SIZE  what the first of them may hold, such as 2GiB: beyond it, what was used longest ago goes
FLYKERNELS_REMOTE     URL of a store behind them, as fsspec takes it: s3://bucket/prefix, gs://, file://, ...
FLYKERNELS_REMOTE_WRITE    0: only read it. Default: what is found out here is written there
FLYKERNELS_REMOTE_TIMEOUT  seconds after which a call of it counts as a miss. Default: 2
FLYKERNELS_MODE       tune           (default) compile and measure what the cache does not know
                      pinned         the cache decides; what it does not know is served by ATen, nothing is measured
                      pinned-strict  the same, but what it does not know is an error
FLYKERNELS_RECORD     a file: problems that the cache did not know are noted there, for `flykernels warmup FILE`
FLYKERNELS_EAGER      1: eager operators (rms_norm, topk) are ours where measurement says so, from `import torch` on;
                      or the devices where they are, separated by commas: cpu, cuda. Default: off
"""

from __future__ import annotations

import functools
import logging
import math
import os

from tuning_cache import Key, Remote, Store, record, size_in_bytes
from tuning_cache.remote import TIMEOUT_SECONDS

log = logging.getLogger(__name__)

CACHE_VARIABLES = (
    "FLYKERNELS_CACHE_DIR", "FLYKERNELS_CACHE_MAX_SIZE",
    "FLYKERNELS_REMOTE", "FLYKERNELS_REMOTE_WRITE", "FLYKERNELS_REMOTE_TIMEOUT",
)  # fmt: skip
MODES = ("tune", "pinned", "pinned-strict")
EAGER_DEVICES = ("cpu", "cuda")  # as torch names them: HIP devices are "cuda" too


class PinnedMiss(RuntimeError):
    """FLYKERNELS_MODE=pinned-strict, and the cache does not know a problem."""


@functools.cache
def _mode(named: str) -> str:
    if named not in MODES:
        log.warning("FLYKERNELS_MODE=%r is none of %s; taken as 'tune'", named, ", ".join(MODES))
        return "tune"
    return named


def mode() -> str:
    """One of MODES."""
    return _mode(os.environ.get("FLYKERNELS_MODE", "tune").strip().lower())


def eager_devices() -> tuple[str, ...]:
    """Where FLYKERNELS_EAGER wants eager operators to be ours."""
    named = [x.strip().lower() for x in os.environ.get("FLYKERNELS_EAGER", "").split(",") if x.strip()]
    if any(x in ("1", "on", "true", "yes") for x in named):
        return EAGER_DEVICES
    unknown = sorted(set(named) - {*EAGER_DEVICES, "0", "off", "false", "no"})
    if unknown:
        log.warning("FLYKERNELS_EAGER names %s; known: 1, 0, %s", ", ".join(unknown), ", ".join(EAGER_DEVICES))
    return tuple(x for x in EAGER_DEVICES if x in named)


def _remote(url: str | None, write: str | None, timeout: str | None) -> Remote | None:
    if not url:
        return None
    seconds = TIMEOUT_SECONDS
    if timeout:
        try:
            seconds = float(timeout)
            if not 0 < seconds < math.inf:
                raise ValueError
        except ValueError:
            log.warning("FLYKERNELS_REMOTE_TIMEOUT=%r is no number of seconds; taken as %g", timeout, TIMEOUT_SECONDS)
            seconds = TIMEOUT_SECONDS
    return Remote(url, seconds, write is None or write.strip().lower() not in ("0", "off", "false", "no"))


@functools.cache
def _store(_directories: str | None, max_size: str | None, *remote: str | None) -> Store:
    most = None
    if max_size:
        try:
            most = size_in_bytes(max_size)
        except ValueError as e:
            log.warning("FLYKERNELS_CACHE_MAX_SIZE: %s; taken as no limit", e)
    return Store(max_bytes=most, remote=_remote(*remote))


def store() -> Store:
    """This process's cache."""
    return _store(*map(os.environ.get, CACHE_VARIABLES))


def missed(key: Key) -> None:
    """Notes a problem that the cache did not know, if the user wants that. Never raises."""
    if path := os.environ.get("FLYKERNELS_RECORD"):
        record.note(key, os.path.expanduser(path))
