"""Every grouped kernel that is offered, at small sizes: built, then run and compared under compute-sanitizer; no torch.

    python -m bench._h200_grouped_sanitize FOLDER I OF

FOLDER holds NNN.fko and NNN.json, as `build` leaves them; every OF-th of them is run, from number I on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ._grouped_suite import GROUPS, SIZES_NK, TOKENS
from ._h200_sanitize import Device, rows_of

MODULE = "bench._h200_grouped_sanitize"
SIZES = tuple((g * 61 % 150) * (g % 4 != 2) for g in range(40))  # of groups: some empty, none like another
WIDE, DEEP = 264, 136  # no multiples of a tile; more tiles than workgroups
BEYOND = 5  # tokens that no group has


def problems() -> Iterator[Any]:
    """Those of the suite, and of what their gradients and batches are; each at its size."""
    from templates.grouped_gemm.problem import GroupedGemmProblem as Problem

    for n, k in SIZES_NK:
        for g in GROUPS:
            for t in TOKENS:
                yield Problem("m", g, n=n, k=k, tokens_hint=g * t)
                yield Problem("k", g, m=n, n=k, a="col", b="row", tokens_hint=g * t)
    n, k = SIZES_NK[0]
    for t in TOKENS:
        yield Problem("m", 8, n=n, k=k, b="row", tokens_hint=8 * t)
        yield Problem("n", 8, m=n, k=k, b="row", tokens_hint=8 * t)
        yield Problem("k", 8, m=n, n=k, a="row", b="col", tokens_hint=8 * t)
        yield Problem("batch", 8, n=n, k=k, tokens_hint=t)


def small(p: Any) -> Any:
    size = {x: (WIDE if x != "k" else DEEP) if getattr(p, x) else 0 for x in "mnk"}
    return replace(p, groups=len(SIZES), tokens_hint=sum(SIZES), **size)


def build(folder: Path, processes: int | None = None) -> int:
    """Builds each configuration that is offered; how many. Those that differ in hints to the caches alone are one."""
    from flykernels.targets import sm90a
    from templates.gemm.workers import Workers
    from templates.grouped_gemm.space import candidates
    from templates.grouped_gemm.space_sm90a import limit

    made: dict[str, tuple] = {}
    for p in problems():
        for c in candidates(p, sm90a).kept:
            alike = replace(c.config, evict="none", group_m=1, stages=min(c.config.stages, 4))
            if limit(small(p), alike, sm90a.limits) is None:
                made.setdefault(f"{p.form} {p.a} {p.b} {alike}", (small(p), alike))
    folder.mkdir(parents=True, exist_ok=True)
    with Workers(processes) as pool:

        def one(item: tuple[int, tuple[str, tuple]]) -> None:
            number, (name, (problem, config)) = item
            pool.build(problem, config.key(), "sm90a").save(folder / f"{number:03}.fko")
            (folder / f"{number:03}.json").write_text(json.dumps({"name": name, "problem": problem.key()}))

        with ThreadPoolExecutor(pool.count) as threads:
            list(threads.map(one, enumerate(made.items())))
    return len(made)


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """What each tool found in all kernels of a folder."""
    return rows_of(folder, MODULE)


def check(device: Device, code: Any, problem: dict) -> str:
    """Runs one kernel twice; "" if its result is right, else how far it is off."""
    from flykernels.launch import cuda
    from templates.grouped_gemm import arguments
    from templates.grouped_gemm.problem import GroupedGemmProblem
    from templates.grouped_gemm.reference import reference, tolerance
    from tests.gemm.gfx950_case import decode, encode, poison

    p = GroupedGemmProblem(**problem)
    offs = np.cumsum(SIZES, dtype=np.int32)
    tokens = 150 if p.form == "batch" else int(offs[-1]) + BEYOND
    size = {"m": p.m, "n": p.n, "k": p.k} | {"m" if p.form == "batch" else p.form: tokens}
    rng, numbers = np.random.default_rng(0), {"tokens": tokens}
    held: dict[str, Any] = {}
    seen: dict[str, Any] = {}
    for name, axes in (("a", "mk"), ("b", "kn"), ("c", "mn")):
        layout = "row" if name == "c" else getattr(p, name)
        shape = (*((p.groups,) if p.has_groups(name) else ()), *(size[x] for x in axes))
        lies = shape if layout == "row" else (*shape[:-2], shape[-1], shape[-2])
        room = (*lies[:-1], lies[-1] + -lies[-1] % 8)  # rows begin at multiples of 16 bytes
        if name == "c":
            held[name] = poison(int(np.prod(room)), p.out_dtype).reshape(room)
        else:
            held[name] = encode(rng.standard_normal(room) * 0.5, p.dtype)
        turned = (lambda x: x) if layout == "row" else (lambda x: x.swapaxes(-2, -1))
        seen[name] = lambda x, turned=turned, lies=lies: turned(x[..., : lies[-1]])
        numbers |= {f"{name}_{layout}": room[-1], f"{name}_group": room[-1] * room[-2]}
    if p.ragged:
        held["offs"] = offs
    at = {name: device.put(array) for name, array in held.items()}
    kernel = cuda.load(code, device.driver)
    for _ in range(2):  # the counter must be as it was
        kernel(*(at[x] for x in arguments.pointers(p)), *(numbers[x] for x in arguments.scalars(p)))
    got = seen["c"](decode(device.get(at["c"], held["c"]), p.out_dtype))
    for address in at.values():
        device.free(address)
    kernel.unload()
    a, b = (seen[x](decode(held[x], p.dtype)) for x in "ab")
    want = reference(p, a, b, offs if p.ragged else None)
    if not np.array_equal(np.isnan(want), np.isnan(got)):
        return f"{(np.isnan(want) != np.isnan(got)).sum()} elements are not written, or are without being a group's"
    off, allowed = np.nanmax(np.abs(got - want), initial=0.0), tolerance(p, a, b, offs if p.ragged else None)
    return "" if off <= allowed else f"{off:.3g} off, allowed {allowed:.3g}"


def main(folder: Path, number: int, of: int) -> int:
    from flykernels.codeobject import CodeObject

    device, bad = Device(), 0
    for file in sorted(folder.glob("*.fko"))[number::of]:
        described = json.loads(file.with_suffix(".json").read_text())
        wrong = check(device, CodeObject.load(file), described["problem"])
        bad += bool(wrong)
        print(f"wrong {described['name']}: {wrong}" if wrong else f"ran {described['name']}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
