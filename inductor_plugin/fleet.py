"""A warmup over many machines, on ray: candidates are compiled wherever there is a free core, problems are measured one
to a GPU, and all results come to the store of the process that runs the warmup.

    ray start --head ...          on one machine, `ray start --address=...` on the others, flykernels installed on all
    flykernels warmup FILE --target sm90a --ray auto

Tasks are independent and leave nothing behind where they ran. A worker that is lost is replaced by another, which does
its task again; what was finished lies in the store already, so a warmup that is stopped altogether goes on where it
was, with ray or without.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from templates.gemm.workers import BuildFailed, Workers, answered
from tuning_cache import Store, parcel

from .fingerprint import versions
from .measuring import Measuring, Unit
from .wanted import runs_here

log = logging.getLogger(__name__)

RETRIES = 3  # of a task whose worker was lost; one that takes down four workers is at fault itself
TEMPLATES = ("gemm", "scaled_gemm")


class NoFleet(RuntimeError):
    """Why there is no cluster to work on."""


def digests() -> list[str]:
    """Of the templates' sources: all machines must have the same."""
    return [str(versions(name)["templates"]) for name in TEMPLATES]


def _answer(asked: dict) -> tuple[list[str], bytes, bytes]:
    """On a worker: what templates.gemm.workers answers."""
    return (digests(), *answered(asked))


class RayWorkers(Workers):
    """As templates.gemm.workers.Workers, on the processes of a ray cluster.

    address  as ray.init takes it: "auto", "ray://...", "local" for a cluster of this machine alone
    answer   what a task does (tests put their own here)"""

    def __init__(self, address: str = "auto", answer: Callable[[dict], tuple[list[str], bytes, bytes]] = _answer):
        try:
            import ray
        except ImportError:
            raise NoFleet("work on several machines needs ray: pip install 'flykernels[fleet]'") from None
        self.ray = ray
        try:
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, include_dashboard=None)
        except (ConnectionError, ValueError, OSError, RuntimeError) as e:
            raise NoFleet(f"no ray cluster at {address!r}: {e}") from None
        cores = int(ray.cluster_resources().get("CPU", 0))
        if cores < 1:
            raise NoFleet(f"the ray cluster at {address!r} has no cores for us")
        super().__init__(cores)
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(answer)
        self._mine = digests()

    def start(self) -> None:
        """Ray starts its processes when there is work."""

    def _answer(self, asked: dict, what: str) -> bytes:
        try:
            theirs, kind, answer = self.ray.get(self._task.remote(asked))
        except self.ray.exceptions.RayError as e:
            raise BuildFailed(f"the task that {what} was lost {RETRIES + 1} times: {type(e).__name__}") from e
        if theirs != self._mine:
            raise BuildFailed("a machine of the cluster has other templates than this one: install the same version")
        if kind == b"error":
            raise BuildFailed(answer.decode())
        return answer

    def measuring(
        self, units: Sequence[Unit], store: Store, described: dict[str, dict], deadline: float | None
    ) -> FleetMeasuring:
        return FleetMeasuring(self.ray, units, store, described, deadline)


Parcels = list[bytes]  # tuning_cache/parcel.py


def _measure(
    unit: Unit, description: dict, known: Parcels, seconds: float | None
) -> tuple[Parcels, dict[str, str], int]:
    """On a worker, which has one GPU for itself (or a CPU's threads): (entries that were decided, why others were not,
    how many were left for want of time)."""
    if not runs_here(unit.target, description):
        why = f"the worker is not {', '.join(f'{k} {v}' for k, v in description.items())}"
        return [], {str(p): why for p in unit.problems}, 0
    with tempfile.TemporaryDirectory(prefix="flykernels-") as folder:
        os.environ["FLYKERNELS_CACHE_DIR"] = folder
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        for name in ("FLYKERNELS_REMOTE", "FLYKERNELS_CACHE_MAX_SIZE"):
            os.environ.pop(name, None)
        from . import settings

        store = settings.store()
        for data in known:
            parcel.unpack(store, data)
        deadline = None if seconds is None else time.monotonic() + seconds
        measuring = Measuring([unit], store, {unit.target: description}, deadline)
        for _ in measuring.go([unit]):
            pass
        found = [parcel.pack(store, entry) for _, entry in store.entries() if entry.winner]
        return found, measuring.undone, measuring.late


class FleetMeasuring(Measuring):
    """Measures on the cluster: all units at once, as many at a time as there are GPUs of their kind."""

    def __init__(self, ray: Any, *rest: Any):
        super().__init__(*rest)
        self._ray = ray

    def go(self, units: Sequence[Unit]) -> Iterator[None]:
        running: dict[Any, tuple[Unit, int]] = {}
        for unit in units:
            left = self.undecided([unit])
            self.known += len(unit.problems) - len(left)
            if not left:
                self.done += len(unit.problems)
                continue
            entries = [e for e in (self.store.newest(p.key) for p in unit.problems) if e is not None]
            known = [parcel.pack(self.store, entry, winner_only=False) for entry in entries]
            description = self.described[unit.target]
            needs = {"num_cpus": description["threads"]} if unit.target == "x86" else {"num_cpus": 1, "num_gpus": 1}
            task = self._ray.remote(**needs, max_retries=RETRIES, max_calls=1)(_measure)
            seconds = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            running[task.remote(unit, description, known, seconds)] = unit, len(left)
        while running:
            (done, *_), _ = self._ray.wait(list(running))
            unit, count = running.pop(done)
            self.now = str(unit.problems[0])
            self._took(done, unit, count)
            self.now = ""
            self.done += len(unit.problems)
            yield

    def _took(self, done: Any, unit: Unit, count: int) -> None:
        try:
            found, undone, late = self._ray.get(done)
        except self._ray.exceptions.RayError as e:
            self.undone |= {str(p): f"its task was lost or failed: {type(e).__name__}" for p in unit.problems}
            return
        for data in found:
            parcel.unpack(self.store, data)
        self.undone |= undone
        self.late += late
        self.decided += count - len(self.undecided([unit]))
