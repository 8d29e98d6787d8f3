"""Which configurations are worth compiling for a problem, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .problem import GemmProblem


@dataclass(frozen=True)
class Candidate:
    """A configuration to compile and measure; reason: what speaks for it."""

    config: Any
    reason: str


@dataclass(frozen=True)
class Dropped:
    """What was not taken up, and the limit it runs into."""

    config: Any
    reason: str


@dataclass
class Space:
    """kept: best guess first. dropped: in the order in which they were looked at."""

    kept: list[Candidate] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)


# ptxas takes a core a second or two for each, and a model waits for it. Of 45 products with dense15's sizes, the tile
# that the estimate names first was the fastest in 39 on an H200; of others two variants tell whether it is wrong.
VARIANTS, OTHERS = 5, 2  # of that tile, of each other
TILE = ("kind", "tile_m", "tile_n", "tile_k", "groups", "split_k", "k_cluster", "stream_k")


def fewer(space: Space) -> Space:
    """VARIANTS of the likeliest tile, and of every other tile the first OTHERS."""
    tiles: dict[tuple, int] = {}
    kept, dropped = [], []
    for candidate in space.kept:
        tile = tuple(getattr(candidate.config, x) for x in TILE)
        most = VARIANTS if not tiles or tile == next(iter(tiles)) else OTHERS
        tiles[tile] = tiles.get(tile, 0) + 1
        if tiles[tile] <= most:
            kept.append(candidate)
        else:
            dropped.append(Dropped(candidate.config, f"{most} likelier ones have the same tile; {candidate.reason}"))
    return Space(kept, [*dropped, *space.dropped])


def candidates(problem: GemmProblem, target, threads: int = 1) -> Space:
    """The few configurations to try on `target` (with up to `threads` threads, on a CPU).

    Empty `kept` where the problem is not eligible, with that reason in `dropped`. ValueError for an unknown target."""
    reason = problem.why_not(target)
    if reason is not None:
        return Space(dropped=[Dropped(None, reason)])
    if target.name == "x86":
        from . import space_x86

        return space_x86.candidates(problem, target, threads)
    if target.name == "gfx950":
        from . import space_gfx950

        return space_gfx950.candidates(problem, target)
    if target.name == "sm90a":
        from . import space_sm90a

        return fewer(space_sm90a.candidates(problem, target))
    raise ValueError(f"GEMM kernels exist for x86, gfx950 and sm90a, not for {target.name}")
