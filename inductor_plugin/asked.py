"""Who wants to know which problems Inductor asks for: a warmup that lowers a graph ahead (lowering.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


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
    requests: dict[str, Any] = field(default_factory=dict)
    late: int = 0

    def hear(self, request: Any) -> bool:
        """Whether the plugin is to go on with the request."""
        self.requests.setdefault(request.key.digest, request)
        if self.decide and self.deadline is not None and time.monotonic() >= self.deadline:
            self.late += 1
            return False
        return self.decide


_listener: ContextVar[Listener | None] = ContextVar("flykernels_listener", default=None)


def listener() -> Listener | None:
    """Whoever listens in this thread."""
    return _listener.get()


@contextmanager
def listening(to: Listener) -> Iterator[Listener]:
    """Let `to` hear of what is asked in this thread."""
    token = _listener.set(to)
    try:
        yield to
    finally:
        _listener.reset(token)
