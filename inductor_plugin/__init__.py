"""How PyTorch meets the kernels.

Switch it on with the configuration TorchInductor already has: put FLYKERNELS into `max_autotune_gemm_backends`

    TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS=ATEN,TRITON,CPP,FLYKERNELS
    torch.compile(model, mode="max-autotune-no-cudagraphs", options={"max_autotune_gemm_backends": "ATEN,FLYKERNELS"})

or call `enable()`, which also adds the token. Importing this module must stay light: `import torch` does it.
Operators of eager code (rms_norm, topk) are switched by themselves: see `eager.py`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys

TOKEN = "FLYKERNELS"
__version__ = "0.1.0"
log = logging.getLogger(__name__)
_wanted: list[bool] = []  # enable() was called before Inductor was imported

_HOOKED_MODULE = "torch._inductor.compile_fx"  # once this is imported, a compile is coming


def enable() -> bool:
    """Offer our kernels as candidates from now on, in this process. Calling it again changes nothing.

    False (and a log line) if this torch lacks a name that the plugin needs. Before Inductor has been imported, which is
    slow, nothing is imported for this either: it takes effect with the first compile, and True is returned."""
    if _HOOKED_MODULE not in sys.modules:
        _wanted.append(True)
        _wait_for_inductor()
        return True
    from . import install

    return install.enable()


def disable() -> None:
    """Offer nothing from now on. What has been compiled keeps running."""
    _wanted.clear()
    if _HOOKED_MODULE in sys.modules:
        from . import install

        install.disable()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Installs the hooks when Inductor itself gets imported: until then nothing of ours or Inductor's is loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _HOOKED_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            try:
                from . import install

                install.enable() if _wanted else install.hook()
            except Exception:
                log.exception("the hooks could not be installed: candidates are not offered")

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _wait_for_inductor() -> None:
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _autoload() -> None:
    """Entry point of the group `torch.backends`, called while torch is being imported. Light, and never raises.

    The hooks it prepares do nothing in a graph whose configuration does not name the token."""
    try:
        from . import artifacts

        artifacts.register()  # before artifacts are loaded, which need not wait for Inductor
        if _HOOKED_MODULE in sys.modules:
            from . import install

            install.hook()
        else:
            _wait_for_inductor()
        if os.environ.get("FLYKERNELS_EAGER"):
            from . import eager, settings

            if wanted := settings.eager_devices():
                eager.enable(wanted)
    except Exception:
        log.exception("autoload failed: candidates are not offered")
