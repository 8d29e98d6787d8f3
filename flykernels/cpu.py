"""What this machine's processor is: instruction sets and caches, read from Linux. No MLIR: launching needs it too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Levels of the x86-64 psABI (version 1.0, section 3.1.1), in /proc/cpuinfo's names; each includes those before.
LEVELS = {
    "x86-64-v3": ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"),
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"),
}


@dataclass(frozen=True)
class Caches:
    """Data caches of one core, in bytes."""

    l1: int = 32 << 10
    l2: int = 512 << 10


@cache
def features() -> frozenset[str]:
    """Instruction sets by /proc/cpuinfo's names; empty where that file does not exist."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(x.split(":", 1)[1].split()) for x in lines if x.startswith("flags")), frozenset())


@cache
def product() -> str:
    """The processor's name, as the system gives it; "" where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "")


def needed(level: str) -> tuple[str, ...]:
    """Features that code for `level` ("x86-64-v3" or "x86-64-v4") may use, sorted."""
    names = list(LEVELS)
    return tuple(sorted(f for name in names[: names.index(level) + 1] for f in LEVELS[name]))


def level() -> str:
    """The highest level this processor has. RuntimeError if it lacks AVX2 and FMA."""
    for name in reversed(LEVELS):
        if set(needed(name)) <= features():
            return name
    missing = sorted(set(needed("x86-64-v3")) - features())
    raise RuntimeError(f"x86 kernels need AVX2, FMA and F16C; this processor lacks {', '.join(missing)}")


@cache
def caches() -> Caches:
    """Sizes of core 0's data caches; common ones where the system does not say."""
    found = {}
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            read = lambda name: (index / name).read_text().strip()
            if read("type") != "Instruction":
                size = read("size")
                found["l" + read("level")] = int(size.rstrip("KM")) << (20 if size.endswith("M") else 10)
        except (OSError, ValueError):
            continue
    return Caches(**{k: v for k, v in found.items() if k in ("l1", "l2")})
