"""When tiles are asked for and when they are needed; the wait counts follow.

vmcnt counts loads, not tiles: "all but my youngest n have landed". A kernel states its plan as two functions of the
step number and never writes n. The plan is plain Python on ints, so a loop body that is traced once can be checked
against every step it stands for."""

from __future__ import annotations


class Plan:
    """fetch(i), need(i): [(ring, number of the tile)] that step i asks for, and that step i reads (it waits first).

    Steps before 0 are the prologue, from `start`; tiles that a ring does not have are left out."""

    def __init__(self, start: int, fetch, need):
        self.start, self._fetch, self._need = start, fetch, need

    def fetch(self, i):
        return [(ring, t) for ring, t in self._fetch(i) if 0 <= t < ring.tiles]

    def need(self, i):
        return [(ring, t) for ring, t in self._need(i) if 0 <= t < ring.tiles]

    def prologue(self):
        for i in range(self.start, 0):
            self.issue(i)

    def issue(self, i, shift=lambda t: t):
        """Emit the fetches of step i. In a loop body, `shift` turns the plan's tile number into the running one."""
        for ring, t in self.fetch(i):
            ring.prefetch(shift(t))

    def in_flight(self, i):
        """Loads that may be unfinished when step i reads: those younger than all it needs. None: no need to wait."""
        issued = [f for j in range(max(self.start, i - LOOK_BACK), i) for f in self.fetch(j)]
        needed = [issued.index(f) for f in self.need(i) if f in issued]
        return sum(ring.loads for ring, _ in issued[max(needed) + 1 :]) if needed else None

    def steady(self, period, end, early=0) -> bool:
        """Whether steps 0 .. period-1 stand for all steps before `end`: same waits, same fetches. early: how many steps
        before a step its wait stands; then waits are the same that much longer."""
        asked = lambda i: [ring for ring, _ in self.fetch(i)]
        return all(asked(i) == asked(i % period) for i in range(end)) and all(
            self.in_flight(i) == self.in_flight(i % period) for i in range(end + early)
        )


LOOK_BACK = 64  # steps; what is needed was asked for more recently
