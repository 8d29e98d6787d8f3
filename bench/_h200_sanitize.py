"""Every GEMM kernel of the suite at small sizes: built ahead, then run and compared, for compute-sanitizer; no torch.

    python -m bench._h200_sanitize FOLDER I OF

FOLDER holds NNN.fko and NNN.json, as `build` leaves them; every OF-th of them is run, from number I on.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
WRAPS = 2  # times that a ring of stages comes round, at least
ROWS, COLUMNS = 2, 2  # tiles (of a cluster: so many times its own) along M and N
STAYING, ROUNDS = 2, 3  # workgroups (clusters) that walk through tiles, and the tiles that each has
STREAMING = 3  # workgroups of stream-K; with twice as many tiles and some, so that some are whole and some are cut
UNIT = 8  # elements: N and K are multiples of it, as TMA wants rows to be
WHOLE = 64  # elements: where K is a multiple of a box's 128 bytes, as in the suite, boxes of a K tile may come at once
SECONDS_MOST = 240
SHARES = 8  # processes of each tool at a time
EPILOGUES: dict[str, dict] = {
    "plain": {}, "bias and gelu": {"bias": "row", "activation": "gelu_tanh"}, "residual": {"residual": True},
}  # fmt: skip
NAMES = "names.json"  # in the folder, once all kernels are built


@dataclass(frozen=True)
class Small:
    """A kernel of the suite and the smallest product that takes it through everything it does.

    config     as it is offered, but for stream-K, whose number of workgroups is a constant of the kernel: STREAMING
    m          rows of A and C
    workgroups launched at most (0: one a tile): those that stay walk through ROUNDS tiles each"""

    name: str
    problem: Any
    config: Any
    m: int
    workgroups: int


def small(name: str, problem: Any, config: Any) -> Small:
    """Tiles that C cuts in both directions, K steps that take the ring round WRAPS times in every workgroup and end in
    the middle of a step."""
    size = config.cluster_size
    rows = STREAMING * 2 + 1 if config.stream_k else STAYING * ROUNDS if config.persistent else ROWS
    rows = ceil(rows / (COLUMNS if config.stream_k or config.persistent else 1))
    config = replace(config, stream_k=STREAMING) if config.stream_k else config
    m = rows * config.cluster[0] * config.tile_m - config.tile_m // 2 + 1
    n = COLUMNS * config.cluster[1] * config.tile_n - (UNIT if config.tile_n < 4 * UNIT else 3 * UNIT)
    tiles = ROUNDS if config.persistent else 1
    steps = ceil((WRAPS * config.stages + 1) / tiles) * config.split_k
    missing = WHOLE if config.tile_k > WHOLE else config.tile_k // 2 + UNIT
    k = steps * config.tile_k - missing
    return Small(name, replace(problem, n=n, k=k, m_hint=m), config, m, STAYING * size if config.persistent else 0)


def kernels() -> list[Small]:
    """Each configuration that is offered for dense15, plain and with epilogues. Those that differ in hints to the
    caches and in the order of tiles alone are one."""
    from flykernels.targets import sm90a
    from templates.gemm.problem import GemmProblem
    from templates.gemm.space import candidates

    from ._h200_gemm import SIZES_M, SIZES_NK

    made: dict[str, Small] = {}
    for n, k in SIZES_NK:
        for m in SIZES_M:
            for what, epilogue in EPILOGUES.items():
                problem = GemmProblem(n, k, "bf16", "bf16", "row", "col", m_hint=m, **epilogue)
                for c in candidates(problem, sm90a).kept:
                    alike = replace(c.config, evict="none", keep=0, group_m=1)
                    name = f"{what}: {alike}"
                    made.setdefault(name, small(name, problem, c.config))
    return list(made.values())


def build(folder: Path, processes: int | None = None) -> list[str]:
    """Builds `kernels()`, on so many cores (default: all); their names. What an earlier call has built is taken."""
    if (folder / NAMES).exists():
        return json.loads((folder / NAMES).read_text())
    folder.mkdir(parents=True, exist_ok=True)
    from templates.gemm.workers import Workers

    with Workers(processes) as pool:

        def one(item: tuple[int, Small]) -> str:
            number, it = item
            code = pool.build(it.problem, it.config.key(), "sm90a")
            replace(code, grid_most=it.workgroups or code.grid_most).save(folder / f"{number:03}.fko")
            told = {"name": it.name, "m": it.m, "problem": it.problem.key()}
            (folder / f"{number:03}.json").write_text(json.dumps(told))
            return it.name

        with ThreadPoolExecutor(pool.count) as threads:
            names = list(threads.map(one, enumerate(kernels())))
    (folder / NAMES).write_text(json.dumps(names))
    return names


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """What each tool found in all kernels of a folder."""
    return rows_of(folder, "bench._h200_sanitize")


def rows_of(folder: Path, module: str) -> Iterator[dict[str, Any]]:
    """The same of kernels that `module`, started with (folder, number, of), runs: SHARES processes a tool at a time."""
    with ThreadPoolExecutor(SHARES * len(TOOLS)) as threads:
        found = {t: [threads.submit(_share, module, t, folder, i) for i in range(SHARES)] for t in TOOLS}
        for tool, parts in found.items():
            yield _together(tool, [part.result() for part in parts])


def _together(tool: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [p["found"] for p in parts]
    return {
        "tool": tool, "found": None if None in counts else sum(counts), "kernels": sum(p["kernels"] for p in parts),
        "wrong": [x for p in parts for x in p["wrong"]], "said": [x for p in parts for x in p["said"]],
        "seconds": [p["seconds"] for p in parts],
    }  # fmt: skip


def _share(module: str, tool: str, folder: Path, number: int) -> dict[str, Any]:
    """One process of a tool over its share of the kernels; `found` is None where it came to no end."""
    what = [sys.executable, "-m", module, str(folder), str(number), str(SHARES)]
    nothing: dict[str, Any] = {"found": None, "kernels": 0, "wrong": [], "seconds": 0.0}
    if shutil.which("compute-sanitizer") is None:
        return {**nothing, "said": ["compute-sanitizer is not on PATH"]}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            ["compute-sanitizer", "--tool", tool, *what], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MOST
        )
    except subprocess.TimeoutExpired:
        return {**nothing, "said": [f"not done in {SECONDS_MOST} s"]}
    text = done.stdout + done.stderr
    found, lines = SUMMARY.search(text), done.stdout.splitlines()
    said = [x for x in text.splitlines() if x.startswith("=========")][:20] or text.splitlines()[-5:]
    clean = found and found[1] == "0" and done.returncode == 0
    return {
        "found": int(found[1]) if found else None, "kernels": sum(x.startswith("ran ") for x in lines),
        "wrong": [x for x in lines if x.startswith("wrong ")], "seconds": round(time.perf_counter() - start, 1),
        "said": [] if clean else said,
    }  # fmt: skip


class Device:
    """Device memory and copies, through the driver alone."""

    def __init__(self) -> None:
        from flykernels.launch import cuda

        self.driver = cuda.runtime()
        self.driver.device()

    def put(self, array: np.ndarray) -> int:
        """A copy of an array, in an allocation of exactly its size."""
        address = ctypes.c_void_p()
        self.driver.call("cuMemAlloc_v2", ctypes.byref(address), array.nbytes, doing="allocating")
        source = ctypes.c_void_p(array.ctypes.data)
        self._copy("cuMemcpyHtoD_v2", address, source, array)
        return address.value or 0

    def get(self, address: int, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        self._copy("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), ctypes.c_void_p(address), out)
        return out

    def free(self, address: int) -> None:
        self.driver.call("cuMemFree_v2", ctypes.c_void_p(address), doing="freeing")

    def _copy(self, name: str, to: Any, source: Any, array: np.ndarray) -> None:
        self.driver.call(name, to, source, ctypes.c_size_t(array.nbytes), doing="copying")


NAN = 0x7FFF  # of bf16


def bf16(x: np.ndarray) -> np.ndarray:
    """f32 -> bf16 as uint16, to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def wide(stored: np.ndarray) -> np.ndarray:
    """bf16 as uint16 -> f64."""
    return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def check(device: Device, code: Any, m: int, problem: dict) -> str:
    """Runs one kernel; "" if its result is right, else how far it is off."""
    from flykernels.launch import cuda
    from templates.gemm import arguments
    from templates.gemm.problem import GemmProblem
    from templates.gemm.reference import reference, tolerance

    p = GemmProblem(**problem)
    rng = np.random.default_rng(0)
    rand = lambda *size: bf16(rng.standard_normal(size, np.float32) / 2)
    held = {"a": rand(m, p.k), "b": rand(p.n, p.k), "c": np.full((m, p.n), NAN, np.uint16)}
    held |= {"bias": rand(p.n)} if p.bias == "row" else {}
    held |= {"residual": rand(m, p.n)} if p.residual else {}
    at = {name: device.put(array) for name, array in held.items()}
    numbers = {"m": m, "a_row": p.k, "b_col": p.k, "c_row": p.n, "residual_row": p.n}
    kernel = cuda.load(code, device.driver)
    for _ in range(2):  # a workspace must be as it was
        kernel(*(at[x] for x in arguments.pointers(p)), *(numbers[x] for x in arguments.scalars(p)))
    got = wide(device.get(at["c"], held["c"]))
    for address in at.values():
        device.free(address)
    kernel.unload()
    value = {name: wide(array) for name, array in held.items()}
    a, b = value["a"], value["b"].T
    want = reference(p, a, b, value.get("bias"), value.get("residual"))
    off = np.abs(got - want).max()
    return "" if off <= tolerance(p, a, b) else f"{off:.3g} off, allowed {tolerance(p, a, b):.3g}"


def main(folder: Path, number: int, of: int) -> int:
    from flykernels.codeobject import CodeObject

    device, bad = Device(), 0
    for file in sorted(folder.glob("*.fko"))[number::of]:
        described = json.loads(file.with_suffix(".json").read_text())
        wrong = check(device, CodeObject.load(file), described["m"], described["problem"])
        bad += bool(wrong)
        print(f"wrong {described['name']}: {wrong}" if wrong else f"ran {described['name']}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
