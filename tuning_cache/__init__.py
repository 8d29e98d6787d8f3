"""What won, where its code object is, and how it travels."""

from .entry import FAILED, Entry, EntryError, Key, NewerFormat, Timing
from .store import LOCK_SECONDS, Store, default_directories

__all__ = [
    "FAILED",
    "LOCK_SECONDS",
    "Entry",
    "EntryError",
    "Key",
    "NewerFormat",
    "Store",
    "Timing",
    "default_directories",
]
