"""How PyTorch meets the kernels.

Switch it on with the configuration TorchInductor already has: put FLYKERNELS into `max_autotune_gemm_backends`

    TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS=ATEN,TRITON,CPP,FLYKERNELS
    torch.compile(model, mode="max-autotune-no-cudagraphs", options={"max_autotune_gemm_backends": "ATEN,FLYKERNELS"})

or call `enable()`, which also adds the token. Importing this module must stay light: `import torch` does it.
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

_HOOKED_MODULE = "torch._inductor.compile_fx"  # once this is imported, a compile is coming


def enable() -> bool:
    """Offer our kernels as candidates from now on, in this process. True if they are; False (and a log line) if this
    torch lacks a name that the plugin needs. Calling it again changes nothing."""
    from . import install

    return install.enable()


def disable() -> None:
    """Offer nothing from now on. What has been compiled keeps running."""
    from . import install

    install.disable()


def _named_in_environment() -> bool:
    backends = os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS", "")
    return TOKEN in (token.strip().upper() for token in backends.split(","))


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

                install.hook()
            except Exception:
                log.exception("the hooks could not be installed: candidates are not offered")

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _autoload() -> None:
    """Entry point of the group `torch.backends`, called while torch is being imported. Light, and never raises.

    The hooks it prepares do nothing in a graph whose configuration does not name the token."""
    try:
        if _HOOKED_MODULE in sys.modules:
            from . import install

            install.hook()
        else:
            sys.meta_path.insert(0, _AfterImport())
    except Exception:
        log.exception("autoload failed: candidates are not offered")
