"""A warmup's measuring in a process for each GPU. Where there are not two, the CPU stands for them, which measures the
same way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inductor_plugin import measuring_gpus, warmup_asked
from inductor_plugin.measuring_gpus import TRIES, GpuMeasuring, gpus_of, travels
from inductor_plugin.wanted import description_of
from tuning_cache import Store
from tuning_cache.shapes import Shape

TARGET, GPUS, TYPE = "x86", [("CUDA_VISIBLE_DEVICES", "5"), ("CUDA_VISIBLE_DEVICES", "7")], "f32"
if torch.cuda.device_count() > 1:
    TARGET, GPUS, TYPE = "sm90a", gpus_of("sm90a", description_of("sm90a"))[:2], "bf16"


def asked(*ms: int):
    return warmup_asked.from_shapes(
        [Shape("mm", m, 256, 64, dtype=TYPE, layout="NN", bias="none") for m in ms], [TARGET]
    )


@pytest.fixture
def measuring(tmp_path):
    found = asked(6, 7)
    made = GpuMeasuring(TARGET, GPUS, found.units, Store([tmp_path]), found.described, None)
    yield made
    made.close()


def of(process) -> dict[str, str]:
    """The environment that a process was started with."""
    held = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
    return dict(line.partition("=")[::2] for line in held)


def test_each_process_sees_one_gpu_and_what_one_loses_another_does_again(measuring, tmp_path):
    first = measuring.workers[0]
    lost = first.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    lost.kill()  # as a worker that dies at work: no answer comes
    for _ in measuring.go(measuring.units):
        pass
    assert first.process is not lost
    assert measuring.undone == {} and (measuring.decided, measuring.done) == (2, 2)
    seen = {of(worker.process)["CUDA_VISIBLE_DEVICES"] for worker in measuring.workers if worker.process}
    assert seen == {gpu for _, gpu in GPUS}
    for unit in measuring.units:
        entry = Store([tmp_path]).lookup(unit.problems[0].key)
        assert entry.winner and entry.source == "measured" and len(entry.timings) > 1
    processes = [worker.process for worker in measuring.workers]
    assert not list(measuring.go(measuring.units))  # all is known
    measuring.close()
    assert all(p.poll() is not None for p in processes)


def test_a_unit_that_ends_every_process_is_given_up(measuring, monkeypatch):
    tried = []

    def gone(self, *question):
        tried.append(self.gpu)
        raise EOFError("no answer")

    monkeypatch.setattr(measuring_gpus._Worker, "ask", gone)
    for _ in measuring.go(measuring.units[:1]):
        pass
    assert len(tried) == TRIES and "ended 3 times" in next(iter(measuring.undone.values()))


WORKER = """
import os, pickle, sys, time
while sys.stdin.buffer.read(1):
    if os.environ["CUDA_VISIBLE_DEVICES"] == sys.argv[1]:
        time.sleep(600)
    sys.stdout.buffer.write(pickle.dumps(([], {}, 0)))
    sys.stdout.flush()
"""


def test_stopping_ends_the_processes(measuring, monkeypatch):
    """One answers at once, the other one never."""
    monkeypatch.setattr(measuring_gpus, "COMMAND", (sys.executable, "-c", WORKER, GPUS[1][1]))
    steps = measuring.go(measuring.units)
    next(steps)
    processes = [worker.process for worker in measuring.workers if worker.process]
    steps.close()
    assert processes and all(p.poll() is not None for p in processes)
    assert all(worker.process is None for worker in measuring.workers)


def test_what_travels_and_where_there_are_gpus():
    found = asked(6)
    assert travels(found.units[0])
    assert not travels(measuring_gpus.Unit("x86", [], lambda: None))
    assert gpus_of("x86", found.described[TARGET]) == []
