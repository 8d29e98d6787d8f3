"""Kernels of eager operators: from a problem and a configuration to something that takes addresses and numbers.

Code objects come from this process, from the store by their digests, or are built and then stored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flykernels.codeobject import CodeObject
from flykernels.forks import anew_in_children

from . import settings
from .counters import counters

log = logging.getLogger(__name__)

Codes = tuple[CodeObject, ...]
BUILDERS = 16  # threads at most that build kernels of one case
_built: dict[str, Codes] = {}
_launchers: dict[str, Callable] = {}
_building: dict[str, threading.Lock] = {}
_lock = threading.RLock()
anew_in_children(sys.modules[__name__], _lock=threading.RLock, _building=dict)


def artefact_of(codes: Codes) -> str:
    """What a cache entry holds of a kernel: the digests of its code objects."""
    return "+".join(code.digest for code in codes)


def codes_for(template: str, problem: Any, config: dict, target: str, artefact: str | None = None) -> Codes:
    """The code objects of a template's kernel, to be launched one after the other.

    template: "rms_norm" or "topk". Raises what building raises; MLIRMissing where nothing can be built."""
    if artefact:
        found = tuple(settings.store().load(digest) for digest in artefact.split("+"))
        if all(code is not None for code in found):
            return found  # type: ignore[return-value]
    text = json.dumps([template, _identity(template, problem, config), target], sort_keys=True)
    with _lock:
        mine = _building.setdefault(text, threading.Lock())
    with mine:
        codes = _built.get(text)
        if codes is None:
            counters["compiles"] += 1
            codes = _built[text] = _build(template, problem, config, target)
            for code in codes:
                settings.store().add(code)
    return codes


def build_ahead(template: str, wanted: Iterable[tuple[Any, dict]], target: str) -> None:
    """The kernels of these problems and configurations for a GPU, several at a time: most of it is the assembler's
    time, which is a process of its own. What cannot be built is left to whoever asks for it."""

    def build(kernel: tuple[Any, dict]) -> None:
        with contextlib.suppress(Exception):
            codes_for(template, *kernel, target)

    threads = min(BUILDERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, thread_name_prefix="flykernels-build") as pool:
        list(pool.map(build, wanted))


def _identity(template: str, problem: Any, config: dict) -> Any:
    """What the code depends on: problems that share it are built once."""
    if template == "topk":
        from templates.topk.build import kernel_key
        from templates.topk.config import TopKConfig

        return kernel_key(problem, TopKConfig(**config))
    return {k: v for k, v in problem.key().items() if k != "rows_hint"}, config


def _build(template: str, problem: Any, config: dict, target: str) -> Codes:
    import importlib

    built = importlib.import_module(f"templates.{template}.build").build_from_json(problem, config, target)
    return built if isinstance(built, tuple) else (built,)


def launcher(codes: Codes) -> Callable[..., Any]:
    """Addresses and numbers, as the code objects' arguments list them -> launches. One for all that share the code."""
    digest = artefact_of(codes)
    with _lock:
        made = _launchers.get(digest)
        if made is None:
            made = _launchers[digest] = _launcher(codes)
    return made


def _launcher(codes: Codes) -> Callable[..., Any]:
    if codes[0].target == "x86":
        from flykernels.launch import host

        single = [host.load(code).launcher() for code in codes]
    else:
        from flykernels.launch.current import Launcher

        single = [Launcher(code) for code in codes]
    if len(single) == 1:
        return single[0]

    def all_in_turn(*arguments: int) -> None:
        for launch in single:
            launch(*arguments)

    return all_in_turn


def takes_workspace(codes: Codes) -> bool:
    """Whether the kernel's arguments name a workspace that the caller hands over."""
    return any(a.name == "workspace" for code in codes for a in code.arguments) and not codes[0].workspace


def door(template: str, builder: str, *arguments: Any, function: str = "build") -> CodeObject:
    """A door's code object, from the store, or built by a function of targets/BUILDER.py and stored."""
    import importlib
    from dataclasses import replace

    from tuning_cache import Key, Timing

    from .fingerprint import versions

    key = Key(
        "eager door",
        {"operator": template, "arguments": [function, *arguments]},
        {"arch": "x86-64"},
        versions(template),
    )
    store = settings.store()
    entry = store.lookup(key)
    best = entry.best() if entry else None
    code = store.load(best.artefact) if best is not None and best.artefact else None
    if code is None:
        counters["compiles"] += 1
        code = getattr(importlib.import_module(f"flykernels.targets.{builder}"), function)(*arguments)
        made = Timing("door", None, {}, store.add(code))
        store.update(key, lambda e: replace(e.with_timing(made), winner="door", source="compiled"))
    return code


def forget() -> None:
    """Drops what this process has built and loaded (tests)."""
    with _lock:
        _built.clear()
        _launchers.clear()
