"""A warmup's measuring on a machine with several GPUs: a process for each, which sees that one alone.

    python -m inductor_plugin.measuring_gpus       a worker: pickled tasks on stdin, pickled answers on stdout

A worker that dies costs the unit that it was at, which another one does again. What they find comes to the store of the
process that runs the warmup."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .devices import DEVICES
from .measuring import Measured, Measuring, Unit, measured

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-m", "inductor_plugin.measuring_gpus")
TRIES = 3  # of a unit whose worker was lost


def gpus_of(target: str, description: dict) -> list[tuple[str, str]]:
    """(environment variable, value) that makes a process see one GPU alone, for each here that keys describe so."""
    import torch

    kind = "hip" if torch.version.hip else "cuda"
    if not torch.cuda.is_available() or DEVICES[kind].target != target:
        return []
    variable = f"{kind.upper()}_VISIBLE_DEVICES"
    named = [name for name in os.environ.get(variable, "").split(",") if name]
    count = torch.cuda.device_count()
    names = named if len(named) >= count else list(map(str, range(count)))
    same = lambda n: DEVICES[kind].description(torch.device("cuda", n)) == description
    return [(variable, names[n]) for n in range(count) if same(n)]


def travels(unit: Unit) -> bool:
    """Whether a unit can be sent to another process: a model that a user's function makes may not."""
    try:
        pickle.dumps(unit)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


class GpuMeasuring(Measuring):
    """Measures units of `target` in processes of their own, as many at a time as there are `gpus` (see `gpus_of`);
    other units in this one."""

    def __init__(self, target: str, gpus: Sequence[tuple[str, str]], *rest: Any):
        super().__init__(*rest)
        self.target, self._stopped = target, False
        self._idle: queue.Queue[_Worker] = queue.Queue()
        self.workers = [_Worker(*gpu) for gpu in gpus]
        for worker in self.workers:
            self._idle.put(worker)

    def go(self, units: Sequence[Unit]) -> Iterator[None]:
        apart = [unit for unit in units if unit.target == self.target and travels(unit)]
        yield from super().go([unit for unit in units if unit not in apart])
        running: dict[Future, tuple[Unit, int]] = {}
        with ThreadPoolExecutor(len(self.workers)) as threads:
            for unit in apart:
                left = self.undecided([unit])
                self.known += len(unit.problems) - len(left)
                if left:
                    running[threads.submit(self._apart, unit, self._parcels(unit))] = unit, len(left)
                else:
                    self.done += len(unit.problems)
            try:
                for future in as_completed(running):
                    unit, count = running[future]
                    self._took(unit, count, future.result())
                    yield
            except BaseException:  # stopped: nobody waits for what is under way
                self.close()
                raise

    def _apart(self, unit: Unit, known: list[bytes]) -> Measured:
        worker = self._idle.get()
        try:
            for _ in range(TRIES):
                if self._stopped:
                    break
                seconds = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
                try:
                    return worker.ask(unit, self.described[unit.target], known, seconds)
                except (OSError, EOFError, pickle.UnpicklingError) as e:
                    log.info("the process that measures on %s is gone (%s); another one goes on", worker.gpu, e)
                    worker.close()
            why = "stopped" if self._stopped else f"its process ended {TRIES} times"
            return [], {str(p): why for p in unit.problems}, 0
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        self._stopped = True
        for worker in self.workers:
            worker.close()


class _Worker:
    """One process at a time, which sees one GPU."""

    def __init__(self, variable: str, gpu: str):
        self.variable, self.gpu = variable, gpu
        self.process: subprocess.Popen | None = None

    def ask(self, *question: Any) -> Measured:
        """EOFError or OSError if the process ends meanwhile."""
        if self.process is None:
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
            self.process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path, self.variable: self.gpu}, process_group=0,  # Ctrl-C is for us
            )  # fmt: skip
        assert self.process.stdin and self.process.stdout
        pickle.dump(question, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.stdin and process.stdout:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # what it did not read
                process.stdin.close()
            process.stdout.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    with tempfile.TemporaryDirectory(prefix="flykernels-") as folder:
        while True:
            try:
                unit, description, known, seconds = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(measured(unit, description, known, seconds, folder), answers)
            answers.flush()


if __name__ == "__main__":
    main()
