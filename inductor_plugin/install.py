"""Hooking into TorchInductor and out of it again."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from typing import Any

from flykernels.forks import anew_in_children

from . import TOKEN, artifacts, private
from .fingerprint import fingerprint

log = logging.getLogger(__name__)

_lock = threading.Lock()
anew_in_children(sys.modules[__name__], _lock=threading.Lock)
_state = {"off": False, "asked": False}  # disabled; whether a graph of this process has asked for us


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


def times_gpus() -> bool:
    """Whether a time that Inductor wants of a GPU is to be taken as ours are: in graphs that ask for us, and where one
    has, at the first calls of compiled code, at which its kernels choose their configurations.

    Its own times of small kernels are Python's (see gpu_timing): of two configurations of a norm that takes 2 us, and
    10 us, either wins."""
    if private.compiling():
        return active()
    return _state["asked"] and not _state["off"]


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
    """Set a configuration value here and as the default: threads started later have a context of their own."""
    setattr(config, name, value)
    entry = getattr(config, "_config", {}).get(name)
    if entry is not None:
        entry.default = value


# What hangs in Inductor's lists. The modules behind them need Inductor whole, and its import may still be under way
# when the hooks are installed, so they are imported when first called.


def _offer(given: list) -> list:
    from . import choices

    return choices.offer(given)


def _settle(timings: dict) -> dict:
    from . import choices, runoff

    return choices.told(runoff.settle(timings))


def _milliseconds(run: Any) -> float:
    from . import gpu_timing

    return gpu_timing.alone(run)


def _record(timings: dict, *feedback: Any) -> None:
    from . import choices, runoff

    if not runoff.decided(timings):
        choices.record(timings, *feedback)


def _with_fused_candidates(original: Any) -> Any:
    """Inductor's post-grad passes, and after them ours."""

    @functools.wraps(original)
    def passes(gm: Any, is_inference: bool) -> Any:
        result = original(gm, is_inference)
        if active():
            from . import fusion

            _state["asked"] = True
            fusion.run(gm)
        return result

    return passes


@functools.cache
def _hook() -> bool:
    loaded = private.load()
    if loaded.missing:
        log.warning("this torch lacks what the plugin needs, so it stays off: %s", "; ".join(loaded.missing))
        return False
    names = loaded.names
    names.add_feedback_saver(_record)
    _enter_cache_keys(names)
    private.around_saving_graphs()
    private.same_ptxas_as_helpers()
    private.teach_scaled_shapes()
    private.teach_scaled_grouped()
    if names.post_grad_passes is None:
        log.info("this torch runs its post-grad passes elsewhere: no fused candidates")
    else:
        names.compile_fx.post_grad_passes = _with_fused_candidates(names.post_grad_passes)
    return True


def hook() -> bool:
    """Install the hooks, once a process. They do nothing in a graph that does not ask for us."""
    private.load()  # before the lock is taken: importing Inductor may itself come here
    with _lock:
        ok = _hook()
    if ok:  # each time: someone may have called clear_preprocessing_fns()
        private.add_preprocessing(_offer)
        private.around_autotuning(active, _settle)
        private.around_gpu_benchmarks(times_gpus, _milliseconds)
        artifacts.register()
    return ok


class ChoicesFactory:
    """Makes InductorChoices whose uuid() holds our fingerprint: it enters the FX-graph and AOTAutograd cache keys.

    Before torch 2.13 what enters is not the uuid but this object itself, pickled; so the pickle holds it too."""

    def __init__(self, previous: Any = None):
        self.previous = previous

    def __getstate__(self) -> dict:
        return {"previous": self.previous, "fingerprint": fingerprint()}

    def __setstate__(self, state: dict) -> None:
        self.previous = state["previous"]

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
