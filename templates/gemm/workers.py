"""Builds matrix kernels on all cores: one process a core, because tracing holds Python's interpreter lock.

    with Workers() as pool:
        codes = pool.build_all(problem, [c.config for c in space.kept], "gfx950")

`Workers.build` may be called from many threads at a time (Inductor precompiles so); each call has a process for itself.
A worker is `python -m templates.gemm.workers`: it reads one JSON line a kernel, and answers with a CodeObject's bytes.
Unlike multiprocessing's, it never imports the user's main module.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from flykernels.codeobject import CodeObject
from flykernels.forks import anew_in_children

ROOT = Path(__file__).parents[2]  # where `templates` and `flykernels` are imported from


class BuildFailed(RuntimeError):
    """A kernel that a worker could not build: the type and text of what was raised there, or that it died."""


class Workers:
    """count: processes, started when first needed (default: as many as this process may use cores)."""

    def __init__(self, count: int | None = None):
        self.count = count or len(os.sched_getaffinity(0))
        self.began = time.monotonic(), time.process_time()  # seconds, and this process's at work
        self._idle: queue.LifoQueue[subprocess.Popen | None]
        anew_in_children(self, _idle=partial(_none_started, self.count))  # those that there are answer the parent

    def start(self) -> None:
        """Starts the processes now: they import what they need while this one does something else."""
        self.began = time.monotonic(), time.process_time()
        slots = [self._idle.get() for _ in range(self.count)]
        for worker in slots:
            self._idle.put(worker if worker is not None and worker.poll() is None else self._start())

    def build(self, problem: Any, config: dict, target: str) -> CodeObject:
        """One kernel, in a process; waits while all are busy. BuildFailed with what went wrong.

        problem: of any template that has `build.build_from_json` and `space.candidates`"""
        asked = {**_named(problem), "config": config, "target": target}
        return CodeObject.from_bytes(self._answer(asked, f"built {config} for {target}"))

    def candidates(self, problem: Any, target: str, threads: int = 1) -> tuple[list[dict], list[str]]:
        """The configurations' key()s that `space.candidates` keeps, and why it drops the others, likewise."""
        asked = {**_named(problem), "target": target, "threads": threads}
        kept, dropped = json.loads(self._answer(asked, f"searched configurations for {target}"))
        return kept, dropped

    def _answer(self, asked: dict, what: str) -> bytes:
        idle = self._idle
        worker = idle.get()
        try:
            worker = worker if worker is not None and worker.poll() is None else self._start()
            answer, kind = self._ask(worker, asked)
        except BaseException as e:  # Ctrl-C too: what is left of this answer must not be taken for the next one
            if worker is not None:
                _end(worker)
            worker = None
            if isinstance(e, (OSError, ValueError)):
                raise BuildFailed(f"the process that {what} ended: {e}") from e
            raise
        finally:
            idle.put(worker)
        if kind == "error":
            raise BuildFailed(answer.decode())
        return answer

    def build_all(self, problem: Any, configs: Sequence, target: str) -> list[CodeObject | BuildFailed]:
        """All configurations (dataclasses with key()), as many at a time as there are processes, in order."""

        def one(config) -> CodeObject | BuildFailed:
            try:
                return self.build(problem, config.key(), target)
            except BuildFailed as e:
                return e

        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(one, configs))

    def pids(self) -> list[int]:
        """Of the processes that are idle now."""
        with self._idle.mutex:
            return [w.pid for w in self._idle.queue if w is not None]

    def _start(self) -> subprocess.Popen:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "templates.gemm.workers"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # a terminal's Ctrl-C is for whoever asked: a kernel that is being built comes to its end
        )  # fmt: skip

    def _ask(self, worker: subprocess.Popen, question: dict) -> tuple[bytes, str]:
        assert worker.stdin and worker.stdout
        worker.stdin.write(json.dumps(question).encode() + b"\n")
        worker.stdin.flush()
        head = worker.stdout.readline().split()
        if len(head) != 2:
            raise ValueError("no answer")
        answer = worker.stdout.read(int(head[1]))
        if len(answer) != int(head[1]):
            raise ValueError("half an answer")
        return answer, head[0].decode()

    def close(self) -> None:
        """Ends the processes; waits for those that build."""
        for _ in range(self.count):
            worker = self._idle.get()
            if worker is not None:
                _end(worker)  # it waits for a question, or still imports: there is nothing to lose
            self._idle.put(None)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _none_started(count: int) -> queue.LifoQueue[subprocess.Popen | None]:
    idle: queue.LifoQueue[subprocess.Popen | None] = queue.LifoQueue()
    for _ in range(count):
        idle.put(None)
    return idle


def _end(worker: subprocess.Popen) -> None:
    assert worker.stdin and worker.stdout
    worker.kill()
    worker.wait()
    with contextlib.suppress(OSError):  # a question that it has not taken
        worker.stdin.close()
    worker.stdout.close()


def _named(problem: Any) -> dict:
    """A problem as a question holds it: its class, and what it is made from."""
    kind = type(problem)
    return {"class": [kind.__module__, kind.__name__], "problem": problem.key()}


def _problem(asked: dict) -> tuple[Any, str]:
    """(the problem that a question names, its template's package)."""
    module, name = asked["class"]
    return getattr(importlib.import_module(module), name)(**asked["problem"]), module.rpartition(".")[0]


def answered(asked: dict) -> tuple[bytes, bytes]:
    """(kind, answer) of a question: ("code", a CodeObject's bytes), ("space", JSON) or ("error", type and text)."""
    try:
        from flykernels import targets

        problem, package = _problem(asked)
        part = lambda name: importlib.import_module(f"{package}.{name}")
        if "config" in asked:
            return b"code", part("build").build_from_json(problem, asked["config"], asked["target"]).to_bytes()
        space = part("space").candidates(problem, getattr(targets, asked["target"]), asked["threads"])
        found = [c.config.key() for c in space.kept], [d.reason for d in space.dropped]
        return b"space", json.dumps(found).encode()
    except Exception as e:
        return b"error", f"{type(e).__name__}: {e}".encode()


def serve() -> None:
    """The worker: questions on standard input, answers on standard output, until the input ends."""
    # None is what makes an import fail: nothing here needs torch, and the package that MLIR's bindings come with
    # imports it where it can, which takes four times as long as everything else
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    import flykernels.targets  # noqa: F401  # while nobody waits for it

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not mix with answers
    for line in sys.stdin.buffer:
        kind, answer = answered(json.loads(line))
        answers.write(b"%s %d\n" % (kind, len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    serve()
