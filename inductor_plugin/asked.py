"""Who wants to know which problems are asked for: a warmup, which prepares them (lowering.py, eager_warmup.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tuning_cache import Key


@dataclass(frozen=True)
class Heard:
    """A problem of a template, and the key under which it was asked for."""

    key: Key
    problem: Any


@dataclass
class Listener:
    """Hears of every problem that templates are asked for while graphs are lowered, and says whether it is decided.

    decide    measure, as without a listener; False: only listen, and let ATen serve it
    deadline  of time.monotonic(), after which nothing more is measured
    requests  what was asked, by the key's digest
    late      how many were left because of the deadline
    """

    decide: bool = False
    deadline: float | None = None
    requests: dict[str, Heard] = field(default_factory=dict)
    late: int = 0

    def hear(self, request: Any) -> bool:
        """Whether the plugin is to go on with the request."""
        key = request.key
        self.requests.setdefault(key.digest, Heard(key, request.problem))
        if self.decide and self.deadline is not None and time.monotonic() >= self.deadline:
            self.late += 1
            return False
        return self.decide


_listeners: list[Listener] = []  # of the process, not the thread: a backward graph may be compiled in autograd's own


def listener() -> Listener | None:
    """Whoever listens."""
    return _listeners[-1] if _listeners else None


@contextmanager
def listening(to: Listener) -> Iterator[Listener]:
    """Let `to` hear of what is asked."""
    _listeners.append(to)
    try:
        yield to
    finally:
        _listeners.remove(to)
