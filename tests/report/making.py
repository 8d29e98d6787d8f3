"""A cache with times of three machines, one of which has none."""

from __future__ import annotations

import math
from dataclasses import replace

from inductor_plugin import wanted
from tuning_cache import Store, Timing
from tuning_cache.shapes import Shape

CPU = {"arch": "x86-64-v3", "product": "A CPU & more", "threads": 2}


def timing(name, us, quarantined=None):
    return Timing(name, us, {"tile": name} if name.startswith("flykernels") else None, None, quarantined)


def put(store, shape, target, description, timings, winner):
    key = wanted.problems_of(shape, target, description)[0].key
    store.update(key, lambda e: replace(e, winner=winner, timings={t.name: t for t in timings}))
    return key


def cache(folder) -> Store:
    store = Store([folder])
    for m in (1, 64):
        ours, failed = timing("flykernels t=2", 10.0 * m), timing("flykernels t=4", math.inf, "Wrong: <b>3 of 4</b>")
        others = timing("aten mm", 15.0 * m), timing("cpp CppGemm", 12.0 * m)
        put(store, Shape("mm", m, 64, 32, "f32", bias="none"), "x86", CPU, [ours, failed, *others], "flykernels t=2")
        times = timing("flykernels u", 9.0), timing("aten mm", 8.0), timing("triton mm", 8.5)
        gpu = wanted.ELSEWHERE["sm90a"]
        put(store, Shape("mm", m, 4096, 4096, bias="none"), "sm90a", gpu, times, "aten mm")
        put(
            store,
            Shape("mm", m, 64, 64, bias="none"),
            "gfx950",
            wanted.ELSEWHERE["gfx950"],
            [timing("flykernels g", None)],
            None,
        )
    return store
