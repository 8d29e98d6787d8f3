"""Eager operators: F.rms_norm, nn.RMSNorm and torch.topk on our kernels, without compiling a model.

    from inductor_plugin import eager

    eager.enable()                       # or FLYKERNELS_EAGER=1 in the environment; eager.disable()
    with eager.enabled(): ...            # both are of the process: dispatch knows no threads. Switch while no other
                                         # thread is in an operator: PyTorch's dispatcher does not guard its tables
    eager.original("aten::topk", "cpu")  # ATen's own kernel, whatever is switched on

ATen's operators are overridden in the dispatcher, for each device. A call is ours where a measurement in the tuning
cache says that it is faster, everything else is ATen's: other dtypes, layouts, errors, what `eager_gate` does not
know in a pinned cache. `flykernels warmup --eager` fills that cache ahead; in mode "tune" a case is measured when
first met.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flykernels.forks import anew_in_children

from . import settings

log = logging.getLogger(__name__)

_lock = threading.RLock()
anew_in_children(sys.modules[__name__], _lock=threading.RLock)
OPERATORS = ("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward", "aten::topk", "aten::topk.values")


@dataclass
class _Installed:
    """What is ours on one device while eager operators are on.

    libraries and doors: what undoes the registrations"""

    libraries: list[Any] = field(default_factory=list)
    doors: list[Any] = field(default_factory=list)
    served: dict[str, str] = field(default_factory=dict)  # operator: how, in words


_installed: dict[str, _Installed] = {}
_made: dict[str, Any] = {}  # kept over disable() and enable(): decisions, and the one door
_lasting: list[Any] = []  # libraries that stay when eager operators are off
_said: set[str] = set()  # warnings that need not be repeated
_originals: dict[tuple[str, str], Callable | None] = {}


def enable(devices: Sequence[str] | None = None) -> dict[str, dict[str, str]]:
    """Eager operators are ours from now on, in this process, on these devices ("cpu", "cuda"; default: those there
    are).

    Returns, for each device, what became of each operator, in words. Calling it again changes nothing. Never raises
    for a torch that lacks something: what cannot be overridden stays ATen's, and the log says why. ValueError for a
    device that is neither."""
    with _lock:
        for device in _chosen("enable", devices, settings.EAGER_DEVICES):
            if device not in _installed and _there(device):
                try:
                    _installed[device] = _install(device)
                except Exception as e:
                    log.warning("eager operators on %s stay ATen's: %s: %s", device, type(e).__name__, e)
        return status()


def disable(devices: Sequence[str] | None = None) -> None:
    """ATen's kernels are back, on these devices (default: all). Decisions are kept for the next `enable`, and graphs
    that autograd has recorded can still be gone through. ValueError as for `enable`."""
    with _lock:
        for device in _chosen("disable", devices, tuple(_installed)):
            installed = _installed.pop(device, None)
            if installed is not None:
                for door in installed.doors:
                    door.close()
                for library in installed.libraries:
                    library._destroy()


@contextlib.contextmanager
def enabled(devices: Sequence[str] | None = None, on: bool = True) -> Iterator[None]:
    """Within it eager operators are ours (on=False: ATen's); afterwards as before. Of the process, not of a thread."""
    with _lock:
        before = tuple(_installed)
        enable(devices) if on else disable(devices)
    try:
        yield
    finally:
        with _lock:
            disable([d for d in _installed if d not in before])
            enable(before)


def status() -> dict[str, dict[str, str]]:
    """For each device on which eager operators are on: what serves each operator, in words. Empty: they are off."""
    with _lock:
        return {device: dict(installed.served) for device, installed in _installed.items()}


def is_enabled(device: str | None = None) -> bool:
    """Whether eager operators are on, on this device or at all."""
    return device in _installed if device is not None else bool(_installed)


def original(op: str, device: str) -> Callable:
    """ATen's own kernel of an operator ("aten::topk", ...) for tensors of a device ("cpu", "cuda"): called with the
    operator's arguments, whatever is switched on. Below autograd: it records no gradient. ValueError if there is
    none."""
    from . import private

    key = device.upper()
    call = _original(op, key)
    if call is None:
        raise ValueError(f"{op} has no kernel of ATen's for {device}")
    names = private.eager()
    keys = names.DispatchKeySet(getattr(names.DispatchKey, key))
    return lambda *arguments, **named: call(keys, *arguments, **named)


def description(device: str) -> dict:
    """What of a device decides speed, as the cache's keys hold it."""
    import torch

    from . import devices

    kind = devices.kind_of(torch.device(device, 0) if device != "cpu" else torch.device(device))
    return devices.DEVICES[kind].description()


def forget() -> None:
    """Drops what this process remembers of decisions: the tuning cache is asked again."""
    with _lock:
        for made in _made.values():
            made.forget()


# -- installing
def _chosen(what: str, devices: Sequence[str] | None, otherwise: Sequence[str]) -> Sequence[str]:
    """The devices that a call means: one may be named by itself."""
    if devices is None:
        return otherwise
    named = (devices,) if isinstance(devices, str) else tuple(devices)
    unknown = sorted(set(named) - set(settings.EAGER_DEVICES))
    if unknown:
        raise ValueError(f"eager.{what}: devices {', '.join(unknown)}; known are {', '.join(settings.EAGER_DEVICES)}")
    return named


def _there(device: str) -> bool:
    if device == "cpu":
        return True
    import torch

    return torch.cuda.is_available()


def _original(op: str, key: str) -> Callable | None:
    """The kernel that was there before ours: asked for once, while nothing of ours is."""
    from . import private

    if (op, key) not in _originals:
        _originals[op, key] = private.kernel_of(op, key)
    return _originals[op, key]


def _install(name: str) -> _Installed:
    import torch

    from . import devices

    kind = devices.kind_of(torch.device(name, 0) if name != "cpu" else torch.device(name))
    if kind not in devices.DEVICES:
        raise LookupError(f"templates are registered for {', '.join(devices.DEVICES)}, not for {kind}")
    device, key = devices.DEVICES[kind], name.upper()
    for op in OPERATORS:
        _original(op, key)
    installed = _Installed()
    with warnings.catch_warnings():  # PyTorch warns once of any override
        warnings.filterwarnings("ignore", message="[\\s\\S]*[Oo]verrid")
        try:
            _install_rms_norm(installed, device, key)
            _install_topk(installed, device, key)
        except Exception:
            for door in installed.doors:
                door.close()
            for library in installed.libraries:
                library._destroy()
            raise
    return installed


def _library(installed: _Installed) -> Any:
    import torch

    library = torch.library.Library("aten", "IMPL")
    installed.libraries.append(library)
    return library


def _install_rms_norm(installed: _Installed, device: Any, key: str) -> None:
    from . import private
    from .eager_rms import BACKWARD, FORWARD, RMSNorm

    forward, backward = _original(FORWARD, key), _original(BACKWARD, key)
    if forward is None:
        installed.served[FORWARD] = "ATen: this torch has no such operator"
        return
    rms = _made.get(f"rms_norm {key}")
    if rms is None:
        rms = _made[f"rms_norm {key}"] = RMSNorm(device, forward, backward)
    if _open_rms_norm(installed, device, key, rms):
        installed.served |= dict.fromkeys((FORWARD, BACKWARD), "ours where measured to be faster")
        return
    library = _library(installed)
    library.impl("_fused_rms_norm", rms.forward, key, with_keyset=True)
    if backward is not None:
        library.impl("_fused_rms_norm_backward", rms.backward, key, with_keyset=True)
    else:
        _keep_gradient(rms, key)
        # ATen composes the operator on this device, and autograd sees through it. With a kernel of ours there, autograd
        # takes its formula for the fused operator, so the router decides first which of both it is.
        if rms.derivative is None:
            rms.derivative = private.kernel_of(FORWARD, f"Autograd{key}")
        library.impl("_fused_rms_norm", rms.route, f"Autograd{key}", with_keyset=True)
    installed.served |= dict.fromkeys((FORWARD, BACKWARD), "ours where measured to be faster, looked up in Python")


def _keep_gradient(rms: Any, key: str) -> None:
    """Registers a gradient that ATen has no kernel for, for good: graphs recorded meanwhile call it later."""
    import torch

    if f"rms_norm gradient {key}" not in _made:
        _made[f"rms_norm gradient {key}"] = rms
        _lasting.append(torch.library.Library("aten", "IMPL"))
        _lasting[-1].impl("_fused_rms_norm_backward", rms.backward, key, with_keyset=True)


def _open_rms_norm(installed: _Installed, device: Any, key: str, rms: Any) -> bool:
    """RMSNorm without Python in a call; False where this torch or a driver lacks what that needs."""
    from .eager_rms_door import GpuRMSNorm
    from .eager_rms_host import HostRMSNorm

    make = lambda: HostRMSNorm(rms) if device.target == "x86" else GpuRMSNorm(device, rms)
    return _opened(installed, "rms_norm", key, make)


def _open_topk(installed: _Installed, device: Any, key: str, topk: Any) -> bool:
    """Top-k on a GPU without Python in a call; False where this torch or a driver lacks what that needs."""
    from .eager_topk_door import DoorTopK

    return _opened(installed, "topk", key, lambda: DoorTopK(device, topk))


def _opened(installed: _Installed, operator: str, key: str, make: Callable[[], Any]) -> bool:
    """Opens an operator's door on a device, made once; False, and the log says why, where that fails."""
    name = f"{operator} door {key}"
    try:
        made = _made.get(name) or make()
        made.door.open()
    except Exception as e:
        log.info("%s on %s is looked up in Python: %s: %s", operator, key, type(e).__name__, e)
        return False
    _made[name] = made
    installed.doors.append(made.door)
    return True


def _install_topk(installed: _Installed, device: Any, key: str) -> None:
    if device.target == "x86":
        from .eager_topk import CpuTopK

        try:
            topk = _made.get(f"topk {key}") or CpuTopK(device)
            topk.door.open()
        except Exception as e:
            if str(e) not in _said:
                _said.add(str(e))
                log.warning("topk on the CPU stays ATen's: %s: %s", type(e).__name__, e)
            installed.served |= dict.fromkeys(("aten::topk", "aten::topk.values"), f"ATen: {e}")
            return
        installed.doors.append(topk.door)
    else:
        from .eager_topk import GpuTopK

        functional, out = _original("aten::topk", key), _original("aten::topk.values", key)
        if functional is None or out is None:
            installed.served |= dict.fromkeys(("aten::topk", "aten::topk.values"), "ATen: no kernel to stand in for")
            return
        topk = _made.get(f"topk {key}") or GpuTopK(device, functional, out)
        if not _open_topk(installed, device, key, topk):
            library = _library(installed)
            library.impl("topk", topk.topk, key, with_keyset=True)
            library.impl("topk.values", topk.topk_values, key, with_keyset=True)
    _made[f"topk {key}"] = topk
    installed.served |= dict.fromkeys(("aten::topk", "aten::topk.values"), "ours where measured to be faster")
