"""Stream-K: the K steps of all tiles dealt out evenly to a fixed number of workgroups (Osama et al., PPoPP 2023).

Tiles that fill all workgroups are done whole, in rounds; the K steps of the last one or two rounds' tiles are cut into
as many runs of neighbours as there are workgroups, whose lengths differ by one at most. Pure arithmetic on ints or
unsigned kernel Values, so that the very functions that kernels use are tested on every count of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flykernels.lang import maximum, minimum, select


@dataclass(frozen=True)
class Share:
    """What one workgroup does of one tile: K steps first .. end-1. Workgroup `owner` has the tile's first step; this is
    part `number` of `of` (1: it has the tile for itself), and part q belongs to workgroup owner + q."""

    tile: Any
    first: Any
    end: Any
    owner: Any
    number: Any
    of: Any


class Stream:
    """tiles (int or Value) of `steps` K steps each, for `groups` workgroups."""

    def __init__(self, tiles: Any, steps: int, groups: int):
        self.steps, self.groups = steps, groups
        self.rounds = maximum(tiles // groups, 1) - 1
        self.whole = self.rounds * groups  # tiles that are not cut
        total = (tiles - self.whole) * steps
        self.each, self.over = total // groups, total % groups  # the first `over` workgroups have one more

    def start(self, group: Any) -> Any:
        """A workgroup's first K step, counted through the tiles that are cut."""
        return group * self.each + minimum(group, self.over)

    def owner(self, step: Any) -> Any:
        """The workgroup that has a step."""
        turn = self.over * (self.each + 1)
        later = self.over + (maximum(step, turn) - turn) // maximum(self.each, 1)
        return select(step < turn, step // (self.each + 1), later)

    def count(self, group: Any) -> Any:
        """How many tiles a workgroup has a share of."""
        first, end = self.start(group), self.start(group + 1)
        cut = maximum(end + (self.steps - 1), first // self.steps * self.steps) // self.steps - first // self.steps
        return self.rounds + select(end > first, cut, first - first)

    def share(self, group: Any, i: Any) -> Share:
        """A workgroup's share number i."""
        mine, until = self.start(group), self.start(group + 1)
        cut = i >= self.rounds
        number = mine // self.steps + maximum(i, self.rounds) - self.rounds  # of the tile, among those that are cut
        begins = number * self.steps
        whole = begins - begins
        first = select(cut, maximum(mine, begins) - begins, whole)
        end = select(cut, minimum(until, begins + self.steps) - begins, whole + self.steps)
        owner = select(cut, self.owner(begins), group)
        of = select(cut, self.owner(begins + (self.steps - 1)) + 1 - owner, whole + 1)
        tile = select(cut, self.whole + number, group + i * self.groups)
        return Share(tile, first, end, owner, group - owner, of)
