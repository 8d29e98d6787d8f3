"""What the plugin decided and compiled travels in torch.compiler.save_cache_artifacts(), beside Inductor's own caches.

An artifact is a parcel (tuning_cache/parcel.py): an entry whose winner is one of ours with its code object, noted when
a graph is compiled; or a code object alone, noted when a graph that calls it is loaded, so that a process whose graphs
all came from Inductor's cache passes it on too. torch.compiler.load_cache_artifacts() puts them into this process's
store. Nothing is noted where nothing of ours won: such artifacts load without flykernels. FLYKERNELS_ARTIFACTS=0:
nothing ever is.

Imported while torch is: it imports little, and the rest when that is needed."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuning_cache import Entry

log = logging.getLogger(__name__)

TYPE = "flykernels"


@functools.cache
def register() -> bool:
    """Makes torch know our kind of artifact; whether it does. Before anything is loaded or noted, once a process."""
    try:
        from torch.compiler import _cache as torchs

        class FlykernelsCacheArtifact(torchs.CacheArtifact):  # type: ignore[name-defined,misc]
            @staticmethod
            def type() -> str:
                return TYPE

            def populate_cache(self) -> None:
                from tuning_cache import parcel

                from . import settings

                try:
                    parcel.unpack(settings.store(), self.content)
                except parcel.ParcelError as e:
                    log.warning("a cache artifact of flykernels is passed over: %s", e)

        torchs.CacheArtifactFactory.register(FlykernelsCacheArtifact)
    except Exception as e:  # private to torch, and not worth a user's compile
        log.info("kernels do not travel in torch's cache artifacts: %s: %s", type(e).__name__, e)
        return False
    return True


def note_entry(entry: Entry | None) -> None:
    """An entry that decided a graph. Never raises."""
    best = entry.best() if entry is not None else None
    if entry is not None and best is not None and best.config is not None:
        _note(entry.key.digest, entry, ())


def note_object(digest: str) -> None:
    """A code object that a loaded graph calls. Never raises."""
    if digest:
        _note(digest, None, (digest,))


def _note(name: str, entry: Entry | None, objects: tuple[str, ...]) -> None:
    if os.environ.get("FLYKERNELS_ARTIFACTS", "1").strip().lower() in ("0", "off", "false", "no") or not register():
        return
    try:
        from torch.compiler import _cache as torchs

        from tuning_cache import parcel

        from . import settings

        content = parcel.pack(settings.store(), entry, objects=objects)
        torchs.CacheArtifactManager.record_artifact(TYPE, name, content)
    except Exception as e:
        log.info("%s is not noted for torch's cache artifacts: %s: %s", name[:12], type(e).__name__, e)
