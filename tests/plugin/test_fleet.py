"""A warmup on a ray cluster: the same results, whichever workers are lost. Collected where ray is installed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import ray

from inductor_plugin import devices, fleet, warmup, warmup_asked
from inductor_plugin.fingerprint import versions
from inductor_plugin.fleet import FleetMeasuring, RayWorkers
from templates.gemm.workers import BuildFailed
from tuning_cache import Key, Store
from tuning_cache.shapes import Shape

SHAPE = Shape("mm", 6, 24, 40, dtype="f32", layout="NN", bias="none")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def asked():
    return warmup_asked.from_shapes([SHAPE], ["x86"])


def test_lost_workers_lose_nothing(tmp_path):
    """Each task's first worker is killed while it is at work."""

    def killed_first(question):
        import hashlib
        import json
        import os
        import signal

        from inductor_plugin.fleet import _answer

        marker = f"{tmp_path}/{hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()}"
        try:
            open(marker, "x").close()
        except FileExistsError:
            return _answer(question)
        os.kill(os.getpid(), signal.SIGKILL)

    found = asked()
    problems = [p for unit in found.units for p in unit.problems]
    pool, store = RayWorkers("auto", killed_first), Store([tmp_path / "store"])
    work = warmup.Run(problems, store, pool)
    for _ in work.go():
        pass
    killed = len([p for p in tmp_path.iterdir() if p.is_file()])
    entry = store.newest(problems[0].key)
    assert not work.failed and not work.refused and work.tally.compiled == len(entry.timings) > 0
    assert killed == work.tally.compiled + len(problems)  # every build, and every search
    assert all(store.load(t.artefact) is not None for t in entry.timings.values())
    assert (store.newest(problems[0].key).source, pool.count) == ("compiled", 2)


def test_what_a_task_says_is_told(tmp_path):
    problem = asked().units[0].problems[0]
    broken = RayWorkers("auto", lambda question: (fleet.digests(), b"error", b"ValueError: no such tile"))
    with pytest.raises(BuildFailed, match="no such tile"):
        broken.build(problem.problem, {}, "x86")
    other = RayWorkers("auto", lambda question: (["another"], b"code", b""))
    with pytest.raises(BuildFailed, match="other templates"):
        other.build(problem.problem, {}, "x86")

    compiler = RayWorkers("auto", lambda question: ([d[:64] + " another" for d in fleet.digests()], b"code", b""))
    with pytest.raises(BuildFailed, match="MLIR"):
        compiler.build(problem.problem, {}, "x86")
    templates = {versions(name)["templates"] for name in ("gemm", "scaled_gemm", "grouped_gemm")}
    assert templates <= {d[:64] for d in fleet.digests()}

    def dies(question):
        import os

        os._exit(3)

    with pytest.raises(BuildFailed, match="lost 4 times"):
        RayWorkers("auto", dies).build(problem.problem, {}, "x86")


def test_problems_are_measured_by_tasks_and_decided_here(tmp_path):
    found, store = asked(), Store([tmp_path])
    description = {**devices.DEVICES["cpu"].description(), "threads": 1}
    units = []
    for unit in found.units:
        problems = [replace(p, key=replace(p.key, target=description)) for p in unit.problems]
        units.append(replace(unit, problems=problems))
    measuring = RayWorkers("auto").measuring(units, store, {"x86": description}, None)
    assert isinstance(measuring, FleetMeasuring)
    for _ in measuring.go(units):
        pass
    assert measuring.undone == {} and (measuring.decided, measuring.done) == (1, 1)
    entry = Store([tmp_path]).lookup(units[0].problems[0].key)
    assert entry.winner and entry.source == "measured" and len(entry.timings) > 1
    again = RayWorkers("auto").measuring(units, store, {"x86": description}, None)
    assert not list(again.go(units)) and again.known == 1
    elsewhere = {**description, "product": "another processor"}
    moved = [replace(u, problems=[replace(p, key=replace(p.key, target=elsewhere)) for p in u.problems]) for u in units]
    other = RayWorkers("auto").measuring(moved, store, {"x86": elsewhere}, None)
    for _ in other.go(moved):
        pass
    assert "the worker is not" in next(iter(other.undone.values()))


def test_problems_are_measured_one_to_a_gpu(tmp_path, monkeypatch):
    """Two GPUs, as far as ray knows, which shows each task one of them. One task's first worker is killed."""

    def seen(unit, description, known, seconds):
        import os
        import signal
        import time

        import ray

        start, (gpu,) = time.time(), os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        assert ray.get_gpu_ids() == [int(gpu)] or ray.get_gpu_ids() == [gpu]
        time.sleep(0.5)
        m = unit.problems[0].key.problem["m"]
        if m == 1:
            try:
                open(f"{tmp_path}/killed", "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        return [], {f"{gpu} {start} {time.time()} {m}": "seen"}, 0

    monkeypatch.setattr(fleet, "_measure", seen)
    # Nothing that a worker has to import torch for.
    problems = [SimpleNamespace(key=Key("mm", {"m": m}, {"arch": "sm_90"}, {})) for m in (1, 2, 3, 4)]
    units = [SimpleNamespace(target="sm90a", problems=[p]) for p in problems]
    measuring = RayWorkers("auto").measuring(units, Store([tmp_path / "store"]), {"sm90a": {"arch": "sm_90"}}, None)
    for _ in measuring.go(units):
        pass
    turns = sorted((gpu, float(start), float(end), m) for gpu, start, end, m in map(str.split, measuring.undone))
    assert sorted(m for *_, m in turns) == ["1", "2", "3", "4"] and (tmp_path / "killed").exists()
    assert {gpu for gpu, *_ in turns} == {"0", "1"}
    for one, two in pairwise(turns):
        assert one[0] != two[0] or one[2] <= two[1]  # never two at a time on a GPU
