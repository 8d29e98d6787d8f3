"""The quantiser on a GPU: one kernel, one read of X, both orientations; the transposed one goes out through LDS.

A thread holds 8 rows of 8 neighbours. Along rows 4 lanes share a block; along columns the lanes of a wave stand in 4
groups of 8 rows, so that 4 lanes share a block of 32 rows there too. Each reduction is two exchanges of registers.
Codes of a column's 8 rows are 8 neighbouring bytes of the transposed result: the workgroup turns its tile round in LDS
and writes whole cache lines of it. The text serves gfx950 and sm_90a; what differs is the number of lanes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from flykernels.codeobject import Extent
from flykernels.dtypes import f32, i32, u8
from flykernels.lang import Kernel, Layout, Mode, Swizzle, ThreadValues, View, maximum
from flykernels.lang.fragment import Fragment
from flykernels.lang.microscaling import scale_of, words
from flykernels.lang.values import Value, vector_of
from flykernels.layout import IDENTITY
from flykernels.microscaling import BLOCK

from .arguments import declared
from .problem import QuantizeProblem

EACH = 8  # neighbours of a row in a thread: 16 bytes of a 16-bit type
SHARE = BLOCK // EACH  # threads that share a block, along either axis
WIDE = 16  # bytes: the widest store
MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True)
class GpuConfig:
    """How a tile is spread.

    waves    along (rows, columns)
    groups   into which a wave's lanes are divided along rows: 4 with columns, else 1 (longest runs of memory)
    held     rows of a thread; 8 with columns
    lanes    of a wave, the target's"""

    waves: tuple[int, int]
    groups: int
    lanes: int
    held: int = BLOCK // SHARE

    def __post_init__(self):
        object.__setattr__(self, "waves", tuple(self.waves))  # JSON has lists

    @property
    def workgroup_size(self) -> int:
        return self.lanes * self.waves[0] * self.waves[1]

    @property
    def across(self) -> int:
        """Lanes along a row."""
        return self.lanes // self.groups

    @property
    def tile(self) -> tuple[int, int]:
        return self.waves[0] * self.groups * self.held, self.waves[1] * self.across * EACH

    def key(self) -> dict:
        """Readable JSON form."""
        return {**asdict(self), "waves": list(self.waves)}

    def spread(self, row_axis: int, row_step: int, column_axis: int, column_step: int) -> tuple[Mode, ...]:
        """The threads over a tile whose (row, column) units step so far along these axes."""
        return (
            Mode(self.across, column_axis, EACH * column_step),
            Mode(self.groups, row_axis, self.held * row_step),
            Mode(self.waves[0], row_axis, self.groups * self.held * row_step),
            Mode(self.waves[1], column_axis, self.across * EACH * column_step),
        )


def default(p: QuantizeProblem, target) -> GpuConfig:
    """With columns tiles of 128 rows, a cache line of the transposed result; else runs along rows."""
    if p.columns:
        return GpuConfig((SHARE, 128 * SHARE // (target.lanes * EACH)), SHARE, target.lanes)
    return GpuConfig((SHARE, 1), 1, target.lanes)


def quantize(k: Kernel, p: QuantizeProblem, cfg: GpuConfig):
    """The kernel; arguments as in arguments.py, a one-dimensional grid of tiles, along rows first."""
    # limits
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    m, (rows, columns) = given["m"], cfg.tile
    if p.columns and cfg.groups * cfg.held != BLOCK:
        raise ValueError(f"{cfg}: a wave holds whole blocks of {BLOCK} rows with columns")
    k.grid = ((Extent(p.n, columns), Extent("m", rows)),)
    tiles = -(-p.n // columns)
    number = k.workgroup_id()
    at = (k.target.uniform(number // tiles), k.target.uniform(number % tiles)) if tiles > 1 else (number, 0)

    # layouts
    x = replace(
        given["x"], shape=(m, p.n), stride=(given["x_row"], 1), multiple=(1, p.n),
        stride_multiple=max(1, p.align_x // p.input_type.bytes),
    )  # fmt: skip
    held = ThreadValues(cfg.tile, cfg.spread(0, 1, 1, 1), Mode(EACH, 1, 1), (Mode(cfg.held, 0, 1),))

    # X, once
    values = k.fragment(held).load(x.tile(cfg.tile, *at)).to(f32)
    sizes = values.map(lambda v: v.bitcast(i32, v.width) & MAGNITUDE)

    if p.rows:
        along_rows(k, p, cfg, values, sizes, given, at)
    if p.columns:
        along_columns(k, p, cfg, values, sizes, given, at)


def along_rows(k: Kernel, p: QuantizeProblem, cfg: GpuConfig, values: Fragment, sizes: Fragment, given, at):
    """Codes and scales of blocks along rows, straight from registers."""
    (rows, columns), per, m = cfg.tile, p.per_byte, given["m"]
    codes: list[Value] = []
    scales: list[Value] = []
    for v, size in zip(values.values(), sizes.values()):
        byte, factor, mask = scale_of(shared(k, size.fold(maximum), 1), p.output_type, p.round_up)
        codes.append((words(v * factor, p.output_type) & mask).bitcast(u8, EACH // per))
        scales.append(byte.to(u8))
    matrix = lambda name, width: replace(given[name], shape=(m, width), stride=(width, 1), multiple=(1, width))
    to = ThreadValues((rows, columns // per), _bytes(cfg, per), Mode(EACH // per, 1, 1), (Mode(cfg.held, 0, 1),))
    store(k, to, matrix("codes", p.n // per).tile(to.tile, *at), codes)
    first, *others = cfg.spread(0, 1, 1, 1)
    lanes = (Mode(SHARE, 1, 0), Mode(first.size // SHARE, 1, 1), *(_in_blocks(o) for o in others))  # SHARE write one
    to = ThreadValues((rows, columns // BLOCK), lanes, Mode(1, 1, 1), (Mode(cfg.held, 0, 1),))
    store(k, to, matrix("scales", p.n // BLOCK).tile(to.tile, *at), scales)


def along_columns(k: Kernel, p: QuantizeProblem, cfg: GpuConfig, values: Fragment, sizes: Fragment, given, at):
    """Codes and scales of blocks along columns: a tile is turned round in LDS, then written line by line."""
    (rows, columns), per, m = cfg.tile, p.per_byte, given["m"]
    size = sizes.values()[0]
    for other in sizes.values()[1:]:
        size = maximum(size, other)
    codes: list[Value] = []
    scales: list[Value] = []
    for c in range(EACH):
        byte, factor, mask = scale_of(shared(k, size[c], cfg.across), p.output_type, p.round_up)
        column = vector_of([v[c] for v in values.values()])
        codes.append((words(column * factor, p.output_type) & mask).bitcast(u8, cfg.held // per))
        scales.append(byte.to(u8))

    # into LDS as registers hold it
    deep, blocks = rows // per, rows // BLOCK
    shelf = k.shared(u8, Layout.compact(columns, deep), shelf_swizzle(deep, cfg.held // per))
    board = k.shared(u8, Layout.compact(columns, blocks))
    threads = (
        Mode(cfg.across, 0, EACH),
        Mode(cfg.groups, 1, cfg.held // per),
        Mode(cfg.waves[0], 1, BLOCK // per),
        Mode(cfg.waves[1], 0, cfg.across * EACH),
    )
    put = ThreadValues((columns, deep), threads, Mode(cfg.held // per, 1, 1), (Mode(EACH, 0, 1),))
    store(k, put, shelf, codes)
    one = (threads[0], Mode(cfg.groups, 1, 0), Mode(cfg.waves[0], 1, 1), threads[3])
    store(k, ThreadValues((columns, blocks), one, Mode(1, 1, 1), (Mode(EACH, 0, 1),)), board, scales)
    k.barrier()

    # and out by rows of the transposed result
    matrix = lambda name, each: replace(
        given[name], shape=(p.n, m // each), stride=(m // each, 1), multiple=(p.n, BLOCK // each),
        stride_multiple=BLOCK // each,
    )  # fmt: skip
    for name, board_, each, vector in (("codes_t", shelf, per, WIDE), ("scales_t", board, BLOCK, 1)):
        take = lines(columns, rows // each, cfg.workgroup_size, vector)
        to = matrix(name, each).tile(take.tile, *at[::-1])
        k.fragment(take).store(to, k.fragment(take).load(board_))


def shared(k: Kernel, size: Value, distance: int) -> Value:
    """The largest among the SHARE lanes that are `distance` apart."""
    for step in (distance << i for i in range(SHARE.bit_length() - 1)):
        size = maximum(*k.target.exchange(k, size, step))
    return size


def store(k: Kernel, to: ThreadValues, view: View, values: list[Value]):
    k.fragment(to).store(view, Fragment(k, to, False, lambda d: values[d[0]]))


def lines(rows: int, row_bytes: int, threads: int, vector: int) -> ThreadValues:
    """A tile of bytes spread over a workgroup row by row, `vector` neighbours a thread at a time."""
    wide = row_bytes // vector
    deep = threads // wide
    lanes = (Mode(wide, 1, vector), Mode(deep, 0, 1))
    return ThreadValues((rows, row_bytes), lanes, Mode(vector, 1, 1), (Mode(-(-rows // deep), 0, deep),))


def shelf_swizzle(row_bytes: int, chunk: int) -> Swizzle:
    """Of the (columns, bytes) tile in LDS. Lanes that write together are EACH columns apart, so without it on the same
    banks; the column's number, a step of EACH at a time, is added (bit by bit) to the place of 16 bytes in its row."""
    bits = (row_bytes // WIDE).bit_length() - 1
    if bits < 1 or chunk > WIDE:
        return IDENTITY
    base, row = WIDE.bit_length() - 1, row_bytes.bit_length() - 1
    return Swizzle(bits, base, row + EACH.bit_length() - 1 - base)


def _bytes(cfg: GpuConfig, per: int) -> tuple[Mode, ...]:
    """The threads over a tile of codes."""
    return tuple(m._replace(step=m.step // per) if m.axis == 1 else m for m in cfg.spread(0, 1, 1, 1))


def _in_blocks(m: Mode) -> Mode:
    return m._replace(step=m.step // BLOCK) if m.axis == 1 else m
