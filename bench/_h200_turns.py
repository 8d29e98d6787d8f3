"""Several processes that tune and measure on one GPU, one at a time, while the others compile."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock


class Turn:
    """The GPU, for who holds it: what others allocated is given back before they let it go.

    A context manager, or `begin` and `end`, which may be called again and again. seconds: for how long it was held."""

    def __init__(self, file: Path):
        self.lock = FileLock(file)
        self.seconds, self.since = 0.0, 0.0

    def begin(self) -> None:
        if not self.lock.is_locked:
            self.lock.acquire()
            self.since = time.perf_counter()

    def end(self) -> None:
        from inductor_plugin import devices

        if self.lock.is_locked:
            devices.free_memory()
            self.seconds += time.perf_counter() - self.since
            self.lock.release()

    def __enter__(self) -> Turn:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def around_tuning(self) -> None:
        """From here on Inductor measures candidates, and our plugin its finalists, when it is this process's turn. It
        ends with the finalists; where there are none, call `end` after compiling."""
        from torch._inductor import select_algorithm

        from inductor_plugin import runoff

        cache, settle = select_algorithm.AlgorithmSelectorCache, runoff.settle
        make = cache.make_benchmark_fn.__func__  # type: ignore[attr-defined]

        def in_turn(cls: Any, *args: Any, **kwargs: Any) -> Any:
            measure = make(cls, *args, **kwargs)

            def measured(*args: Any, **kwargs: Any) -> Any:
                self.begin()
                return measure(*args, **kwargs)

            return measured

        def settled(timings: dict) -> dict:
            try:
                return settle(timings)
            finally:
                self.end()

        cache.make_benchmark_fn = classmethod(in_turn)  # type: ignore[assignment]
        runoff.settle = settled  # type: ignore[assignment]
