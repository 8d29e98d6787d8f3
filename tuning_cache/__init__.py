"""What won, where its code object is, and how it travels."""

from . import parcel
from .archive import BundleError, Limits
from .bringing import Imported, import_
from .bundle import Checked, Exported, export, join, verify
from .entry import FAILED, Entry, EntryError, Key, NewerFormat, Timing, canonical
from .fold import Folded, fold
from .manifest import Accept, Manifest
from .merge import merge
from .prune import Pruned, prune, size_in_bytes
from .remote import Remote
from .store import LOCK_SECONDS, Store, default_directories

__all__ = [
    "FAILED",
    "LOCK_SECONDS",
    "Accept",
    "BundleError",
    "Checked",
    "Entry",
    "EntryError",
    "Exported",
    "Folded",
    "Imported",
    "Key",
    "Limits",
    "Manifest",
    "NewerFormat",
    "Pruned",
    "Remote",
    "Store",
    "Timing",
    "canonical",
    "default_directories",
    "export",
    "fold",
    "import_",
    "join",
    "merge",
    "parcel",
    "prune",
    "size_in_bytes",
    "verify",
]
