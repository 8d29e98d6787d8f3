"""What tells LLVM to keep registers free: indices computed afresh, loops that leave values in place; and plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flykernels.lang import Global, Mode, ThreadValues, f32, i32, trace
from flykernels.lang.plan import Plan
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950, x86

from .host import run


@dataclass(frozen=True)
class Config:
    workgroup_size: int = 128


def copy(afresh: bool):
    def kernel(k, p, cfg):
        a, b, c = k.args(a=Global(f32, (512,)), b=Global(f32, (512,)), c=Global(f32, (512,)))
        here = k.fragment(ThreadValues((512,), (Mode(128, 0, 4),), Mode(4, 0, 1), (Mode(1, 0, 512),)))
        got = here.load(a)
        if afresh:
            k.afresh()
        here.store(c, got + here.load(b))

    return kernel


def test_indices_are_computed_again_and_are_the_same():
    a, b = (np.random.default_rng(i).standard_normal(512).astype(np.float32) for i in (0, 1))
    texts = {}
    for afresh in (False, True):
        code, c = gfx950.compile(trace(copy(afresh), gfx950, None, Config())), np.full(512, np.nan, np.float32)
        run_on_sim(code, [a, b, c]).raise_for_findings()
        assert (c == a + b).all()
        texts[afresh] = code.text
    assert "ASMSTART" in texts[True] and "ASMSTART" not in texts[False]


def test_on_a_cpu_afresh_changes_nothing():
    def kernel(k, p, cfg):
        (c,) = k.args(c=Global(i32, (1,)))
        k.afresh()
        c.put(k.workgroup_id() + 7, 0)

    c = np.zeros(1, np.int32)
    run(kernel, c)
    assert c[0] == 7 and x86.name == "x86"


def test_a_body_in_place_runs_once():
    def kernel(k, p, cfg):
        a, c = k.args(a=Global(f32, (128,)), c=Global(f32, (128,)))
        here = k.fragment(ThreadValues((128,), (Mode(128, 0, 1),), Mode(1, 0, 1)))
        got = k.in_place(here.load(a))(lambda x: x + x)
        here.store(c, got)

    a, c = np.arange(128, dtype=np.float32), np.full(128, np.nan, np.float32)
    run_on_sim(gfx950.compile(trace(kernel, gfx950, None, Config())), [a, c]).raise_for_findings()
    assert (c == 2 * a).all()


class Ring:
    loads = 2

    def __init__(self, tiles: int):
        self.tiles = tiles


def test_a_plan_is_steady_as_long_as_what_its_steps_wait_for():
    """Ten tiles, fetched two steps ahead: fetches are alike before step 8, and so are waits up to step 8."""
    ring = Ring(10)
    plan = Plan(start=-2, fetch=lambda i: [(ring, i + 2)], need=lambda i: [(ring, i)])
    assert plan.steady(1, 8) and plan.steady(1, 8, early=1)
    assert not plan.steady(1, 9) and not plan.steady(1, 8, early=2)
