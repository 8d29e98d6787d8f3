"""What a thread may hold while another one forks the process: the child, which lacks that thread, gets it anew instead
of waiting for it for ever (a data loader's processes are forked while a model is being compiled)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_held: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def anew_in_children(owner: Any, **made: Callable[[], Any]) -> None:
    """Sets the owner's attributes (name=function that makes its value, and does not hold the owner), now and in every
    forked child."""
    _held[owner] = made
    _make(owner, made)


def _make(owner: Any, made: dict[str, Callable[[], Any]]) -> None:
    for name, make in made.items():
        setattr(owner, name, make())


def _in_child() -> None:
    for owner, made in list(_held.items()):
        _make(owner, made)


os.register_at_fork(after_in_child=_in_child)
