"""What products take of the GPU's power, its clock meanwhile, and whether power holds it back.

    python -m bench._h200_power --json FILE [KIND,M,N,K ...]

Every way's graph is replayed for SECONDS after WARM of the same; energy is the driver's counter (NVML), so figures of a
few tens of milliseconds are exact to 1 or 2%. Where the limit holds the clock down, no kernel is faster that takes as
much energy, however well it uses the time.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _h200_gemm as gemm
from . import _h200_time as timing
from .common import Report

SECONDS, WARM = 0.5, 0.25
CLOCK_SM = 1  # NVML_CLOCK_SM
POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap
CASES = [gemm.Case("mm", m, n, k) for n, k in gemm.SIZES_NK for m in gemm.SIZES_M]


class Meter:
    """NVML's counters of torch's current device. OSError or RuntimeError where there are none."""

    def __init__(self) -> None:
        import torch

        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self.device))

    def _call(self, name: str, *given: Any) -> None:
        code = getattr(self.nvml, name)(*given)
        if code:
            raise RuntimeError(f"{name}: NVML's error {code}; the driver offers no such counter here")

    def _read(self, name: str, kind: Any, *given: Any) -> int:
        value = kind()
        self._call(name, self.device, *given, ctypes.byref(value))
        return value.value

    def millijoules(self) -> int:
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)

    def megahertz(self) -> int:
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, CLOCK_SM)

    def limit_watts(self) -> float:
        return self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint) / 1e3

    def held_back(self) -> bool:
        """Whether the clock is lower than it could be since more would pass the power limit."""
        return bool(self._read("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong) & POWER_CAP)


def sustained(meter: Meter, graph: Any, calls: int) -> dict[str, float]:
    """A graph of so many calls, replayed without a pause."""
    import torch

    def replayed(seconds: float) -> tuple[int, float]:
        """(replays, seconds), the clocks noted on the way."""
        start, done = time.perf_counter(), 0
        while (spent := time.perf_counter() - start) < seconds:
            for _ in range(8):
                graph.replay()
            done += 8
            clocks.append(meter.megahertz())
            held.append(meter.held_back())
            torch.cuda.synchronize()
        return done, spent

    clocks: list[int] = []
    held: list[bool] = []
    replayed(WARM)
    clocks.clear()
    held.clear()
    before = meter.millijoules()
    done, seconds = replayed(SECONDS)
    joules = (meter.millijoules() - before) / 1e3
    each = done * calls
    return {
        "us": round(seconds / each * 1e6, 2), "mJ": round(joules / each * 1e3, 3), "W": round(joules / seconds, 1),
        "MHz": sorted(clocks)[len(clocks) // 2], "held back": round(sum(held) / len(held), 2),
    }  # fmt: skip


def row(meter: Meter, case: gemm.Case) -> dict[str, Any]:
    """ATen's way, Triton's and the best of ours, with operands that L2 does not hold."""
    import torch

    torch._dynamo.reset()
    torch.manual_seed(0)
    sets = gemm.operands(case, timing.copies(case.set_bytes))
    function = gemm.function_of(case.kind)
    tuned, triton = gemm.compiled(function, gemm.ALL), gemm.compiled(function, "TRITON")
    tuned(*sets[0][:4])
    triton(*sets[0][:4])
    ways: dict[str, Any] = {
        "ATen": lambda i: gemm.by_aten(case.kind)["ATen"](*sets[i]),
        "Triton": lambda i: triton(*sets[i][:4]),
    }
    best, _ = gemm.best_of_ours(case)
    if best is not None:
        ways["ours"] = gemm.way_of_ours(case, best[1], sets)
    for way in ways.values():
        way(0)
    calls = timing.calls_of(ways, len(sets))
    pool = torch.cuda.graph_pool_handle()
    made = {name: timing.Graphs(way, len(sets), calls, pool).graph for name, way in ways.items()}
    found = {name: sustained(meter, graph, calls) for name, graph in made.items()}
    return {"kind": case.kind, "case": f"{case.m}x{case.n}x{case.k}", "GFLOP": round(case.operations / 1e9, 2),
            "MB": round(case.memory_us * 4.25, 1), **found}  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", type=Path)
    options.add_argument("case", nargs="*", help="KIND,M,N,K (default: dense15)")
    asked = options.parse_args(given)
    import inductor_plugin

    inductor_plugin.enable()
    cases = [gemm.Case(kind, *map(int, rest)) for kind, *rest in (c.split(",") for c in asked.case)] or CASES
    report, meter = Report("h200-power", "measured on H200"), Meter()
    report.note(f"power limit {meter.limit_watts():.0f} W")
    for case in cases:
        told = row(meter, case)
        for way in ("ATen", "Triton", "ours"):
            if way in told:
                report.row(case=f"{told['kind']} {told['case']}", way=way, **told[way])
        print(told, file=sys.stderr, flush=True)
    return report.close(asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
