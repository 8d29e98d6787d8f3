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
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from templates.gemm.workers import BuildFailed, Workers, answered
from tuning_cache import Store

from .fingerprint import TEMPLATES, versions
from .measuring import Measured, Measuring, Unit, measured

log = logging.getLogger(__name__)

RETRIES = 3  # of a task whose worker was lost; one that takes down four workers is at fault itself


class NoFleet(RuntimeError):
    """Why there is no cluster to work on."""


def digests() -> list[str]:
    """Of the templates' sources, and MLIR's version: all machines must have the same."""
    return [f"{held['templates']} {held['mlir']}" for held in map(versions, TEMPLATES)]


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
            raise BuildFailed("a machine of the cluster has other templates or MLIR than this one: install the same")
        if kind == b"error":
            raise BuildFailed(answer.decode())
        return answer

    def measuring(
        self, units: Sequence[Unit], store: Store, described: dict[str, dict], deadline: float | None
    ) -> FleetMeasuring:
        return FleetMeasuring(self.ray, units, store, described, deadline)


def _measure(unit: Unit, description: dict, known: list[bytes], seconds: float | None) -> Measured:
    """On a worker, which has one GPU for itself (or a CPU's threads)."""
    with tempfile.TemporaryDirectory(prefix="flykernels-") as folder:
        return measured(unit, description, known, seconds, folder)


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
            description = self.described[unit.target]
            needs = {"num_cpus": description["threads"]} if unit.target == "x86" else {"num_cpus": 1, "num_gpus": 1}
            task = self._ray.remote(**needs, max_retries=RETRIES, max_calls=1)(_measure)
            seconds = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            running[task.remote(unit, description, self._parcels(unit), seconds)] = unit, len(left)
        while running:
            (done, *_), _ = self._ray.wait(list(running))
            unit, count = running.pop(done)
            self.now = str(unit.problems[0])
            self._took(unit, count, self._answer(done, unit))
            self.now = ""
            yield

    def _answer(self, done: Any, unit: Unit) -> Measured:
        try:
            return self._ray.get(done)
        except self._ray.exceptions.RayError as e:
            return [], {str(p): f"its task was lost or failed: {type(e).__name__}" for p in unit.problems}, 0
