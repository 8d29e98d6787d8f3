"""Jobs of several ranks: one decides, all use its choice, nobody waits for ever, whatever their caches hold."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from inductor_plugin import ranks
from tests.cache.making import code, fill, held, key
from tuning_cache import Entry, Store, Timing

ROOT = Path(__file__).parents[2]
QUICK = "0.5"


class Job:
    """Ranks as threads, each with a cache of its own, around one key-value store."""

    def __init__(self, folder, monkeypatch):
        self.local, self.store, self.folder = threading.local(), dist.HashStore(), folder
        monkeypatch.setattr(ranks, "_store", lambda: self.store)
        monkeypatch.setattr(ranks, "_rank", lambda: self.local.rank)
        monkeypatch.setattr(ranks.settings, "store", lambda: self.local.cache)
        monkeypatch.setattr(ranks.settings, "mode", lambda: "tune")

    def run(self, *works):
        """works: of each rank, called with its cache; what they return."""
        done = {}

        def go(rank, work):
            self.local.rank, self.local.cache = rank, Store([self.folder / str(rank)])
            done[rank] = work(self.local.cache)

        threads = [threading.Thread(target=go, args=(rank, work)) for rank, work in enumerate(works)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
            assert not t.is_alive()
        return [done[rank] for rank in range(len(works))]


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def decide(cache, tuned=None, seconds=0.0):
    """As choices.py does: the cache, the other ranks, or tuning; the winner's name."""
    known = cache.lookup(key(1))
    turn = ranks.ask(key(1), known if known is not None and known.winner else None)
    if turn.entry is not None:
        return turn.entry.winner
    if not turn.mine:
        return "aten"
    time.sleep(seconds)
    entry = cache.update(key(1), lambda e: replace(e.with_timing(tuned), winner=tuned.name))
    return entry.winner if ranks.publish(key(1), entry) else "aten"


def test_one_tunes_and_all_use_it_with_its_code_object(job, tmp_path):
    def work(cache):
        name = f"tuned by {ranks._rank()}"
        return decide(cache, Timing(name, 1.0, {"t": 1}, cache.add(code(ranks._rank()))), seconds=0.3)

    won = job.run(work, work, work)
    assert len(set(won)) == 1 and won[0].startswith("tuned by")
    for rank in range(3):  # and every rank has it for the next job
        entry = Store([tmp_path / str(rank)]).lookup(key(1))
        assert entry.winner == won[0] and Store([tmp_path / str(rank)]).load(entry.best().artefact) is not None


def test_caches_that_differ_lead_to_one_choice(job, tmp_path):
    fill(Store([tmp_path / "0"]), 1)
    fill(Store([tmp_path / "2"]), 1)
    Store([tmp_path / "2"]).update(key(1), lambda e: replace(e, winner="aten mm"))
    won = job.run(decide, lambda cache: decide(cache, Timing("tuned", 1.0)), decide)
    assert len(set(won)) == 1
    assert {Store([tmp_path / str(r)]).lookup(key(1)).winner for r in range(3)} == set(won)


def test_a_rank_that_never_asks_keeps_nobody_waiting(job):
    """Its graph came from Inductor's own cache."""
    assert job.run(lambda cache: decide(cache, Timing("tuned", 1.0)), lambda cache: None) == ["tuned", None]


def test_a_rank_that_dies_or_is_slow_costs_the_limit_and_all_agree_on_aten(job, monkeypatch):
    monkeypatch.setenv("FLYKERNELS_RANK_SECONDS", QUICK)
    first = threading.Event()

    def dies(cache):
        assert ranks.ask(key(1), None).mine
        first.set()

    def waits(cache):
        first.wait(10)
        start = time.monotonic()
        turn = ranks.ask(key(1), None)
        assert (turn.entry, turn.mine) == (None, False)
        return time.monotonic() - start

    _, one, two = job.run(dies, waits, waits)
    assert max(one, two) < 10 * float(QUICK)

    def slow(cache):
        job.local.rank = 0
        return ranks.publish(key(1), Entry(key(1), "x", {"x": Timing("x", 1.0)}))

    assert job.run(slow) == [False]  # it finds that the others have gone on without


def test_a_pinned_job_tunes_nothing(job):
    asked = lambda cache: ranks.ask(key(1), None, may_tune=False)
    assert [(t.entry, t.mine) for t in job.run(asked, asked)] == [(None, False)] * 2


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b'{"entry": "{}", "objects": {}}', b"tuning"])
def test_decisions_that_are_none(job, text):
    job.store.set(ranks.PREFIX + key(1).digest, text)
    turn = job.run(lambda cache: ranks.ask(key(1), None))[0]
    assert turn.entry is None


def test_the_decision_for_another_key_is_not_taken(job, tmp_path):
    made = fill(Store([tmp_path / "x"]), 2)
    job.store.set(ranks.PREFIX + key(1).digest, json.dumps({"entry": made[1].to_line().decode(), "objects": {}}))
    assert job.run(lambda cache: ranks.ask(key(1), None))[0] == ranks.Turn(None, False)
    assert not held(tmp_path / "0")


def test_outside_a_job_everybody_decides_alone(tmp_path):
    made = fill(Store([tmp_path]), 1)[0]
    assert ranks.ask(key(1), made) == ranks.Turn(made, False) and ranks.ask(key(2), None) == ranks.Turn(None, True)
    assert ranks.ask(key(2), None, may_tune=False) == ranks.Turn(None, False) and ranks.publish(key(2), None)


RANK = """
from dataclasses import replace
import torch, torch.distributed as dist
import inductor_plugin
from inductor_plugin import measure, settings, wanted
from tuning_cache import Timing
from tuning_cache.shapes import Shape
from inductor_plugin.counters import counters
measure.INERTIA = -0.999  # ours win where they are measured
torch.manual_seed(0)
dist.init_process_group("gloo")
a, b = torch.randn(17, 64), torch.randn(64, 48)
options = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,FLYKERNELS"}
mm = torch.compile(torch.mm, options=options)
if dist.get_rank() == 1:  # its cache knows what the other's does not
    shape = Shape("mm", 17, 48, 64, dtype="f32", layout="NN", bias="none")
    (problem,) = wanted.problems_of(shape, "x86", wanted.description_of("x86"))
    settings.store().update(problem.key, lambda e: replace(e.with_timing(Timing("aten mm", 1.0)), winner="aten mm"))
total = mm(a, b)
dist.all_reduce(total)
assert torch.allclose(total, dist.get_world_size() * (a @ b), atol=1e-3)
winners = [e.winner for _, e in settings.store().entries()]
print("RESULT", dist.get_rank(), counters["benchmarks"], *winners, flush=True)
dist.destroy_process_group()
"""


def ranks_of(tmp_path, count):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = []
    for rank in range(count):
        own = tmp_path / f"rank{rank}"
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "FLYKERNELS_CACHE_DIR": str(own / "cache"), "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        running.append(subprocess.Popen([sys.executable, "-c", RANK], env=env, cwd=ROOT, stdout=subprocess.PIPE))
    found = []
    for process in running:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        found.append(next(x.split()[1:] for x in out.decode().splitlines() if x.startswith("RESULT")))
    return {int(rank): (int(benchmarks), winner) for rank, benchmarks, *winner in found}


@pytest.mark.slow
def test_two_ranks_over_gloo_with_caches_that_differ(tmp_path):
    """The one that knows it and the one that does not agree, whoever asks first."""
    found = ranks_of(tmp_path, 2)
    assert found[0][1] == found[1][1] and found[0][1]
    assert found[1][0] == 0  # who knew it measured nothing
