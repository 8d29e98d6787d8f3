"""A process that is forked while another thread measures a case of an eager operator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, signal, sys, threading
import torch
from inductor_plugin import eager, eager_code, eager_gate, install, kernels
from inductor_plugin.counters import counters

torch.topk(torch.randn(4, 5), 2)
eager.enable(["cpu"])
torch.topk(torch.randn(4, 200), 3)  # decided ahead
before, measured, building = counters["benchmarks"], threading.Event(), eager_gate.contest
held = threading.Event()

def contest(*args, **kwargs):
    with eager_code._lock, eager._lock, kernels._building, install._lock:
        measured.set()
        held.wait()
    return building(*args, **kwargs)

eager_gate.contest = contest
other = threading.Thread(target=lambda: torch.topk(torch.randn(64, 200), 9), daemon=True)
other.start()
measured.wait()
eager_gate.contest = building
child = os.fork()
if child == 0:
    signal.alarm(60)
    for size, k in (((4, 200), 3), ((64, 200), 9), ((7, 1000), 4)):
        x = torch.randn(size)
        found = torch.topk(x, k)
        with eager.enabled(on=False):
            assert all(torch.equal(a, b) for a, b in zip(found, torch.topk(x, k)))
    os._exit(0 if counters["benchmarks"] == before else 1)  # what was decided is ours, the rest is ATen's
ended = os.waitpid(child, 0)[1]
held.set()
other.join()
sys.exit(ended != 0 or counters["benchmarks"] == before)
"""


def test_the_child_measures_nothing_and_waits_for_nobody(tmp_path):
    root = Path(__file__).parents[2]
    env = {**os.environ, "FLYKERNELS_CACHE_DIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, env=env, timeout=120).returncode == 0
