"""Hooking into TorchInductor and out of it again."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

from . import TOKEN, private
from .fingerprint import fingerprint

log = logging.getLogger(__name__)

_lock = threading.Lock()
_state = {"off": False}


def tokens(backends: str) -> list[str]:
    return [t.strip().upper() for t in backends.split(",") if t.strip()]


def active() -> bool:
    """Whether the configuration of the graph being compiled asks for our candidates."""
    if _state["off"]:
        return False
    config = private.load().names.config
    if not (config.max_autotune or config.max_autotune_gemm):
        return False
    return TOKEN in tokens(config.max_autotune_gemm_backends)


def enable() -> bool:
    """See `inductor_plugin.enable`."""
    _state["off"] = False
    if not hook():
        return False
    config = private.load().names.config
    named = tokens(config.max_autotune_gemm_backends)
    if TOKEN not in named:
        _set_everywhere(config, "max_autotune_gemm_backends", ",".join([*named, TOKEN]))
    return True


def disable() -> None:
    """See `inductor_plugin.disable`."""
    _state["off"] = True
    loaded = private.load()
    if loaded.missing:
        return
    config = loaded.names.config
    named = tokens(config.max_autotune_gemm_backends)
    if TOKEN in named:
        _set_everywhere(config, "max_autotune_gemm_backends", ",".join(t for t in named if t != TOKEN))


def _set_everywhere(config: Any, name: str, value: Any) -> None:
    """Set a configuration value for this context and as the default: threads started later have a context of their own."""
    setattr(config, name, value)
    entry = getattr(config, "_config", {}).get(name)
    if entry is not None:
        entry.default = value


@functools.cache
def _hook() -> bool:
    loaded = private.load()
    if loaded.missing:
        log.warning("this torch lacks what the plugin needs, so it stays off: %s", "; ".join(loaded.missing))
        return False
    from . import choices, fusion

    private.add_preprocessing(choices.offer)
    loaded.names.add_feedback_saver(choices.record)
    _enter_cache_keys(loaded.names)
    fusion.install_once()
    return True


def hook() -> bool:
    """Install the hooks, once a process. They do nothing in a graph that does not ask for us."""
    with _lock:
        ok = _hook()
    if ok:  # someone may have called clear_preprocessing_fns()
        from . import choices

        private.add_preprocessing(choices.offer)
    return ok


class ChoicesFactory:
    """Makes InductorChoices whose uuid() holds our fingerprint: it enters the FX-graph and AOTAutograd cache keys."""

    def __init__(self, previous: Any = None):
        self.previous = previous

    def __call__(self) -> Any:
        names = private.load().names
        made = self.previous() if self.previous else names.InductorChoices()
        inner = made.uuid() if hasattr(made, "uuid") else None
        made.__class__ = type("FlykernelsChoices", (type(made),), {"uuid": lambda _self: (fingerprint(), inner)})
        return made


def _enter_cache_keys(names: Any) -> None:
    if names.register_inductor_choices is not None:
        names.register_inductor_choices("flykernels", ChoicesFactory())
        return
    _set_everywhere(names.config, "inductor_choices_class", ChoicesFactory(names.config.inductor_choices_class))
