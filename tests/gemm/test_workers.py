"""Kernels built in processes of their own: the same bytes, all cores, errors in words."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flykernels.targets import gfx950
from templates.gemm.build import build
from templates.gemm.gfx950_config import Gfx950Config
from templates.gemm.problem import GemmProblem
from templates.gemm.workers import BuildFailed, Workers

P = GemmProblem(128, 256, "bf16", "bf16", "row", "col")
CONFIGS = [Gfx950Config(64, 64, 64, s, (2, 2)) for s in (2, 3, 4)]


@pytest.fixture(scope="module")
def pool():
    with Workers(2) as workers:
        yield workers


def test_the_same_bytes_as_in_this_process(pool):
    built = pool.build_all(P, CONFIGS, "gfx950")
    assert [b.to_bytes() for b in built] == [build(P, c, gfx950).to_bytes() for c in CONFIGS]
    assert len(set(pool.pids())) == 2  # all idle again


def test_workers_start_without_torch(pool):
    pool.build(P, CONFIGS[0].key(), "gfx950")
    for pid in pool.pids():
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_kernel_that_cannot_be_built_costs_only_itself(pool):
    bad = Gfx950Config(256, 256, 256, 8, (2, 2))
    first, second, third = pool.build_all(P, [CONFIGS[0], bad, CONFIGS[1]], "gfx950")
    assert isinstance(second, BuildFailed) and "shared memory" in str(second)
    assert first.entry == third.entry == "gemm"
    with pytest.raises(BuildFailed, match="cuda"):
        pool.build(P, CONFIGS[0].key(), "cuda")


def test_a_worker_that_dies_is_replaced():
    with Workers(1) as pool:
        pool.build(P, CONFIGS[0].key(), "gfx950")
        worker = pool._idle.get()
        worker.kill()
        worker.wait()
        pool._idle.put(worker)
        assert pool.build(P, CONFIGS[0].key(), "gfx950").entry == "gemm"


def test_an_answer_that_nobody_waited_for_is_not_the_next_one_s(monkeypatch):
    """Ctrl-C in a thread that asks; in a notebook the process goes on and asks for something else."""
    ask = Workers._ask

    def interrupted(self, worker, question):
        ask(self, worker, question)
        worker.stdin.write(b'{"class": ["templates.gemm.problem", "Left"], "problem": {}}\n')
        raise KeyboardInterrupt

    with Workers(1) as pool:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Workers, "_ask", interrupted)
            pool.build(P, CONFIGS[0].key(), "gfx950")
        with pytest.raises(BuildFailed, match="'nowhere'"):
            pool.build(P, CONFIGS[0].key(), "nowhere")


def test_a_forked_child_has_workers_of_its_own(pool):
    pool.start()
    before = sorted(pool.pids())
    child = os.fork()
    if not child:
        os._exit(len(pool.pids()))
    assert os.waitpid(child, 0)[1] == 0 and sorted(pool.pids()) == before


def test_packages_where_the_program_is_run_are_not_ours(tmp_path, monkeypatch):
    """Many programs have a folder of that name."""
    Path(tmp_path, "templates").mkdir()
    Path(tmp_path, "templates", "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    with Workers(1) as pool, pytest.raises(BuildFailed, match="'nowhere'"):
        pool.build(P, CONFIGS[0].key(), "nowhere")


INTERRUPTED = """
import os, signal
from templates.gemm.problem import GemmProblem
from templates.gemm.workers import Workers
signal.signal(signal.SIGINT, lambda *_: None)
with Workers(1) as pool:
    pool.start()
    before = pool.pids()
    os.killpg(0, signal.SIGINT)
    assert pool.candidates(GemmProblem(128, 256, "bf16", "bf16"), "gfx950")[0] and pool.pids() == before
"""


def test_ctrl_c_in_a_terminal_is_not_for_the_workers():
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=root, start_new_session=True, capture_output=True)
    assert run.returncode == 0 and b"KeyboardInterrupt" not in run.stderr


def test_threads_of_one_process_may_build_too():
    """Inductor precompiles in threads: what one traces must not end up in another's kernel."""
    with ThreadPoolExecutor(3) as threads:
        built = list(threads.map(lambda c: build(P, c, gfx950).to_bytes(), CONFIGS * 3))
    assert built == [build(P, c, gfx950).to_bytes() for c in CONFIGS * 3]
