"""gfx950 GEMMs whose operands span more than 2 and 4 GiB: few rows, far apart, in simulated memory that is sparse."""

from __future__ import annotations

import numpy as np
import pytest

from flykernels.sim.load import load
from flykernels.sim.memory import FIRST_SLOT, PAD, Allocation
from flykernels.sim.run import Simulation
from flykernels.targets import gfx950
from flykernels.targets.gfx950 import BUFFER_MOST
from templates.gemm.arguments import pointers, scalars
from templates.gemm.gfx950_config import TILE_MOST, Gfx950Config
from templates.gemm.order import tile_of
from templates.gemm.problem import GemmProblem
from templates.gemm.reference import reference, tolerance

from .gfx950_case import compiled, decode, encode

FARTHEST = BUFFER_MOST // (2 * TILE_MOST)  # elements between two rows: `why_not` refuses more
RESERVED = 4  # allocations of every launch: arguments, dispatch packet, queue, code object


class Far:
    """A matrix of 16-bit elements `stride` apart along one axis, in memory of which only the touched pages exist."""

    def __init__(self, slot: int, shape, stride: int, axis: int, rows: slice, values=None, dtype="bf16"):
        """rows: those along `axis` that hold something; values: what."""
        self.shape, self.stride, self.axis, self.rows, self.dtype = shape, stride, axis, rows, dtype
        size = ((shape[axis] - 1) * stride + shape[1 - axis]) * 2
        self.bytes = np.zeros(-(-(size + PAD) // PAD) * PAD, np.uint8)
        self.memory = Allocation(f"operand {slot}", self.bytes, size, 0, size, FIRST_SLOT + slot)
        if values is not None:
            self.put(encode(values, dtype))

    def _lines(self):
        data, length = self.bytes.view(np.uint16), self.shape[1 - self.axis]
        return [data[i * self.stride : i * self.stride + length] for i in range(self.rows.start, self.rows.stop)]

    def put(self, stored: np.ndarray):
        for line, value in zip(self._lines(), stored if self.axis == 0 else stored.T, strict=True):
            line[:] = value

    @property
    def values(self) -> np.ndarray:
        got = decode(np.stack(self._lines()), self.dtype)
        return got if self.axis == 0 else got.T

    @property
    def address(self) -> int:
        return self.memory.base


def far_product(p: GemmProblem, cfg: Gfx950Config, m: int, stride: int) -> None:
    """The last tile of C (row and column), of operands whose rows or columns lie `stride` elements apart."""
    rng, code = np.random.default_rng(0), compiled(p, cfg)
    rows, columns = -(-m // cfg.tile_m), -(-p.n // cfg.tile_n)
    r, c = slice((rows - 1) * cfg.tile_m, m), slice((columns - 1) * cfg.tile_n, p.n)
    lines = {"row": 0, "col": 1}
    inner = slice(0, p.k)
    a = Far(RESERVED, (m, p.k), stride, lines[p.a], r if p.a == "row" else inner, None)
    b = Far(RESERVED + 1, (p.k, p.n), stride, lines[p.b], c if p.b == "col" else inner, None)
    out = Far(RESERVED + 2, (m, p.n), stride, 0, r)
    a.put(encode(rng.standard_normal((m - r.start if p.a == "row" else m, p.k)), p.dtype))
    b.put(encode(rng.standard_normal((p.k, p.n - c.start if p.b == "col" else p.n)), p.dtype))
    out.put(np.full((m - r.start, p.n), 0x7FC1, np.uint16))
    number = {"m": m, "c_row": stride} | {f"{x}_{y}": stride for x in "ab" for y in ("row", "col")}
    args = [x.address for x in (a, b, out)] + [np.int64(number[n]) for n in scalars(p)]
    assert pointers(p) == ("a", "b", "c")
    grid = (*code.grid_for({"m": m}), 1, 1)[:3]
    simulation = Simulation(load(code), args, grid)
    assert len(simulation.launch.memory.allocations) == RESERVED
    simulation.launch.memory.allocations += [x.memory for x in (a, b, out)]
    number_of = next(
        i for i in range(rows * columns)
        if tile_of(i, rows, columns, 1, cfg.group_m, gfx950.limits.dies)[1:] == (rows - 1, columns - 1)
    )  # fmt: skip
    simulation.run([(number_of, 0, 0)]).raise_for_findings()
    left, right = (a.values if p.a == "row" else a.values[r]), (b.values if p.b == "col" else b.values[:, c])
    want, got = reference(p, left, right), out.values
    bound = tolerance(p, left, right) + 2 * p.output_type.epsilon * np.abs(want).max()
    assert np.abs(got[:, c] - want).max() <= bound
    assert np.isnan(got[:, : c.start]).all(), "another tile's columns were written"


RING, SMALL = Gfx950Config(64, 64, 64, 3, (2, 2)), Gfx950Config(16, 64, 128, 3, (1, 4))
HTI = Gfx950Config(256, 256, 64, 2, (2, 4), schedule="four")


@pytest.mark.parametrize("gib", [2.2, 4.5])
@pytest.mark.parametrize("a, b", [("row", "col"), ("row", "row"), ("col", "col")])
def test_operands_over_2_and_4_gib(gib, a, b):
    """Tiles of which each spans less, at the far end of an operand that spans more."""
    m, n, k = 200, 136, 200
    stride = int(gib * 2**30) // (2 * 128) // 8 * 8  # the last 64 rows or columns lie beyond
    far_product(GemmProblem(n, k, "bf16", "bf16", a, b, m_hint=m), RING, m, stride)


@pytest.mark.parametrize("config", [HTI, RING, SMALL], ids=str)
def test_a_tile_that_spans_almost_4_gib(config):
    """The largest stride there may be: offsets inside the tile need all 32 bits."""
    m, n = config.tile_m, config.tile_n
    far_product(GemmProblem(n, 256, "bf16", "bf16", "row", "col", m_hint=m), config, m, FARTHEST // 8 * 8)


def test_loads_without_alignment_reach_as_far():
    p = GemmProblem(40, 72, "bf16", "bf16", "row", "col", m_hint=120, align_a=2, align_b=2, align_c=2)
    far_product(p, Gfx950Config(64, 64, 64, 2, (2, 2)), 120, FARTHEST - 1)
