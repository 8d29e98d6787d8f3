"""The quantiser on a GPU: one kernel, one read of X, both orientations; the transposed one goes out through LDS.

A thread holds 8 rows of 8 neighbours. Along rows 4 lanes share a block; along columns the lanes of a wave stand in 4
groups of 8 rows, so that 4 lanes share a block of 32 rows there too. Each reduction is two exchanges of registers.
Codes of a column's 8 rows are 8 neighbouring bytes of the transposed result: the workgroup turns its tile round in LDS
and writes whole cache lines of it. The text serves gfx950 and sm_90a; what differs is the number of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import reduce

from flykernels.codeobject import Extent
from flykernels.dtypes import DType, bf16, f16, f32, i8, i16, i32, u8
from flykernels.lang import Kernel, Layout, Mode, Swizzle, ThreadValues, View, maximum, minimum
from flykernels.lang.fragment import Fragment
from flykernels.lang.memory import advance
from flykernels.lang.microscaling import (
    factors_for,
    first_factor_alone,
    is_finite,
    narrowed,
    scale_of,
    scales_of_bf16,
    words,
    words_down,
)
from flykernels.lang.values import Value, constant, maximum_or_nan, select, vector_of
from flykernels.layout import IDENTITY
from flykernels.microscaling import BLOCK, SCALE_NAN
from flykernels.targets import sm90a_barriers as barriers
from templates.gemm.order import grouped

from . import sm90a_stages
from .arguments import declared
from .problem import QuantizeProblem

EACH = 8  # neighbours of a row in a thread: 16 bytes of a 16-bit type
SHARE = BLOCK // EACH  # threads that share a block, along either axis
WIDE = 4  # words: the widest store


@dataclass(frozen=True)
class GpuConfig:
    """How a tile is spread.

    waves    along (rows, columns)
    groups   into which a wave's lanes are divided along rows: 4 with columns, else 1 (longest runs of memory)
    held     rows of a thread; 8 with columns
    lanes    of a wave, the target's
    strip    tiles along a row that a workgroup does one after the other, with both orientations (a power of two): their
             rows' scales leave together. A sector of memory costs its time however few bytes of it are written
    ahead    with strips: the next tile is on its way into registers while one is encoded
    staged   with strips, on sm_90a: so many tiles are on their way into shared memory (0: none), see sm90a_stages.py
    beside   workgroups that shall fit on one multiprocessor (sm_90a): bounds the registers
    group    rows of tiles that are worked on together, see templates/gemm/order.py; 1: along rows of X
    kept     scales, which a workgroup writes a few at a time, stay in L2 until their sectors are whole (sm_90a)
    overlap  "none", "late", "early": whether launches begin while the kernel ahead ends, see docs/h200.md (sm_90a)"""

    waves: tuple[int, int]
    groups: int
    lanes: int
    held: int = BLOCK // SHARE
    beside: int = 1
    group: int = 1
    strip: int = 1
    ahead: bool = False
    staged: int = 0
    kept: bool = False
    overlap: str = "none"

    def __post_init__(self):
        object.__setattr__(self, "waves", tuple(self.waves))  # JSON has lists

    def __str__(self) -> str:
        how = f", {self.staged} staged" if self.staged else " ahead" if self.ahead else ""
        more = f", strips of {self.strip}{how}" if self.strip > 1 else ""
        kept = ", scales kept" if self.kept else ""
        kept += f", {self.overlap} start" if self.overlap != "none" else ""
        return f"{self.waves[0]}x{self.waves[1]} waves, {self.held} rows a thread, {self.beside} beside{more}{kept}"

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
    """With columns tiles of 128 or 256 rows, whole cache lines of the transposed result; else long runs along rows.

    sm_90a: the fastest of those that `python -m bench quantize --device cuda --sweep` has measured."""
    if target.name == "sm90a":
        return replace(_on_sm90a(p, target.lanes), kept=True, overlap="late")
    if p.columns:  # codes of a column's rows fill a line
        return GpuConfig((SHARE * p.per_byte, 128 * SHARE // (target.lanes * EACH)), SHARE, target.lanes)
    return GpuConfig((SHARE, 1), 1, target.lanes)


def _on_sm90a(p: QuantizeProblem, lanes: int) -> GpuConfig:
    if not p.columns:
        return GpuConfig((1, 8), 1, lanes, 4, 6)
    if not p.rows:
        return GpuConfig((2 * SHARE, 1), SHARE, lanes, beside=2 if p.input_type == f32 else 3)
    if p.input_type == f32:  # twice the registers hold X: what is beside has loads on their way meanwhile
        return GpuConfig((SHARE, 2 // p.per_byte), SHARE, lanes, beside=2 * p.per_byte, strip=2)
    if p.per_byte == 1:
        return GpuConfig((SHARE, 2), SHARE, lanes, beside=2, strip=2, ahead=True)
    if sm90a_stages.why_not(p) is None:
        return GpuConfig((2 * SHARE, 2), SHARE, lanes, strip=2, staged=2)
    return GpuConfig((SHARE, 2), SHARE, lanes, beside=3)


def quantize(k: Kernel, p: QuantizeProblem, cfg: GpuConfig):
    """The kernel; arguments as in arguments.py, a one-dimensional grid of tiles, along rows first."""
    # limits
    k.of_target.beside, k.overlaps = cfg.beside, cfg.overlap != "none"
    if k.overlaps and k.target.name != "sm90a":
        raise ValueError(f"{cfg} on {k.target.name}: launches overlap on sm90a only")
    names = declared(p)
    given = dict(zip(names, k.args(**names)))
    given |= {name: replace(given[name], kept=cfg.kept) for name in ("scales", "scales_t") if name in given}
    m, (rows, columns) = given["m"], cfg.tile
    if p.columns and cfg.groups * cfg.held != BLOCK:
        raise ValueError(f"{cfg}: a wave holds whole blocks of {BLOCK} rows with columns")
    if cfg.strip & (cfg.strip - 1) or (cfg.strip > 1 and not (p.rows and p.columns)):
        raise ValueError(f"{cfg}: strips are of 2, 4, ... tiles, and for both orientations")
    k.grid = ((Extent(p.n, columns * cfg.strip), Extent("m", rows)),)
    tiles = -(-p.n // columns)
    strips, down = -(-tiles // cfg.strip), ((m + (rows - 1)) // rows).to(i32)
    if cfg.overlap == "early":
        barriers.let_kernels_follow()
    i = k.workgroup_id()
    where = (i // strips, i % strips) if cfg.group == 1 else grouped(i, down, strips, cfg.group)
    row, strip = (k.target.uniform(x) if isinstance(x, Value) else x for x in where)

    # layouts
    x = replace(
        given["x"], shape=(m, p.n), stride=(given["x_row"], 1), multiple=(1, p.n),
        stride_multiple=max(1, p.align_x // p.input_type.bytes), zeros=False,
    )  # fmt: skip
    held = ThreadValues(cfg.tile, cfg.spread(0, 1, 1, 1), Mode(EACH, 1, 1), (Mode(cfg.held, 0, 1),))
    memory = None
    if cfg.staged:
        reason = sm90a_stages.why_not(p)
        if reason is not None or cfg.strip == 1 or cfg.group > 1 or k.target.name != "sm90a":
            raise ValueError(f"{cfg} on {k.target.name}: {reason or 'stages are for strips on sm90a'}")
        staged = sm90a_stages.Stages.size(held, cfg.staged)
        memory = k.target.dynamic_memory(k, staged + Turned.size(p, cfg))
        stages = sm90a_stages.Stages(k, x, held, cfg.staged, memory)
    turned = Turned(k, p, cfg, advance(memory, staged, i8) if memory else None) if p.columns else None
    tally = Tally(k, cfg) if cfg.strip > 1 else None

    def tile(number, at, values, meanwhile=lambda: None):
        """X's tile `at`, as it was read; it is the workgroup's `number`-th. meanwhile: what is done once all of it has
        come."""
        values = values.like([narrowed(v, p.output_type) for v in values.values()])
        if p.rows:
            along_rows(k, p, cfg, values, given, at, tally.of(number) if tally else None)
        meanwhile()
        if turned:
            if p.rows:  # held as they came; their f32 values are made a second time
                again = lambda v: vector_of([k.target.opaque(w) for w in words_of(v)]).bitcast(v.dtype, EACH)
                values = values.map(again)
            along_columns(k, p, cfg, values, given, at, turned.of(number))

    if k.overlaps:
        barriers.wait_for_kernels_ahead()
    if tally is None:
        tile(0, (row, strip), k.fragment(held).load(x.tile(cfg.tile, row, strip)))
        return

    def leave(row, strip, board=0):
        """A strip's rows' scales, once all threads have put theirs on a board."""
        count = minimum(tiles - strip * cfg.strip, cfg.strip)
        to = matrix(given["scales"], u8, m, p.n // BLOCK).tile(tally.take.tile, row, strip)
        gathered = replace(tally.boards[board], shape=(rows, count * tally.each), multiple=(rows, 1))
        k.fragment(tally.take).store(to, k.fragment(tally.take).load(gathered))

    if cfg.staged:
        k.grid_most = k.target.limits.compute_units * cfg.beside
        sm90a_stages.walk(k, stages, cfg.strip, tiles, down, tile, leave)
        return

    first = strip * cfg.strip
    count = minimum(tiles - first, cfg.strip)
    load = k.fragment(held).load
    if cfg.ahead:

        @k.loop(0, count, carry=load(x.tile(cfg.tile, row, first)))
        def _(number, values):
            after = x.tile(cfg.tile, row, first + minimum(number + 1, count - 1))
            left = select(number + 1 < count, after.shape[0], 0)  # nothing after the last
            here = (("volatile_", True),)  # else the assembler moves them down to where the loop ends
            after = load(replace(after, shape=(left, after.shape[1]), tags=here))
            tile(number, (row, first + number), values)
            return after
    else:

        @k.loop(0, count)
        def _(number):
            at = (row, first + number)
            tile(number, at, load(x.tile(cfg.tile, *at)))

    k.barrier()
    leave(row, strip)


class Turned:
    """LDS in which columns' codes and scales are turned round. Of two tiles that follow one another each has its own:
    then one barrier a tile will do."""

    def __init__(self, k: Kernel, p: QuantizeProblem, cfg: GpuConfig, memory=None):
        (rows, columns), per, self.count = cfg.tile, 32 // p.output_type.bits, min(2, cfg.strip)
        deep = rows // per
        swizzle = shelf_swizzle(columns, deep, k.target.limits.banks)
        layout = Layout.compact(self.count, columns, deep)
        if memory is None:
            self.codes = k.shared(i32, layout, swizzle)
        else:
            self.codes = View(memory, i32, layout.shape, layout.stride, swizzle)
        # columns side by side: lanes that write together are EACH bytes apart. A chunk more between blocks of rows,
        # for those that read them side by side
        pitch = columns + k.target.vector_bytes
        self.scales = k.shared(u8, Layout((self.count, columns, rows // BLOCK), (rows // BLOCK * pitch, 1, pitch)))

    @staticmethod
    def size(p: QuantizeProblem, cfg: GpuConfig) -> int:
        """Bytes of the codes."""
        return min(2, cfg.strip) * cfg.tile[0] * cfg.tile[1] // p.per_byte

    def of(self, number) -> tuple[View, View]:
        """Words of codes (columns, rows / numbers a word) and scales (columns, rows / 32) of a workgroup's tile."""
        return self.codes[number % self.count], self.scales[number % self.count]


class Tally:
    """LDS that gathers the rows' scales of a strip of tiles; of strips that follow one another each has a board."""

    def __init__(self, k: Kernel, cfg: GpuConfig):
        rows, self.each, self.strip = cfg.tile[0], cfg.tile[1] // BLOCK, cfg.strip
        self.count = 2 if cfg.staged else 1
        width, pitch = cfg.strip * self.each, rows + k.target.vector_bytes  # as `Turned` has columns' scales
        self.boards = k.shared(u8, Layout((self.count, rows, width), (width * pitch, 1, pitch)))
        self.take = lines(rows, cfg.strip * self.each, cfg.workgroup_size, 1)

    def of(self, number) -> View:
        """Scales (rows, columns / 32) of a workgroup's tile."""
        board = self.boards[number // self.strip % self.count]
        return board.tile((board.shape[0], self.each), 0, number % self.strip)


def along_rows(k: Kernel, p: QuantizeProblem, cfg: GpuConfig, values: Fragment, given, at, board: View | None):
    """Codes and scales of blocks along rows, straight from registers; scales to `board` if there is one."""
    (rows, columns), per, m = cfg.tile, 32 // p.output_type.bits, given["m"]  # per: numbers a word
    scales = scales_of(p, values, shared(k, largest_of(k, values.values()), 1))
    first, *others = cfg.spread(0, 1, 1, 1)
    lanes = (Mode(SHARE, 1, 0), Mode(first.size // SHARE, 1, 1), *(_in_blocks(o) for o in others))  # SHARE write one
    of_blocks = ThreadValues((rows, columns // BLOCK), lanes, Mode(1, 1, 1), (Mode(cfg.held, 0, 1),))
    if board is None:
        board = matrix(given["scales"], u8, m, p.n // BLOCK).tile(of_blocks.tile, *at)
    store(k, of_blocks, board, [scales.byte[r].to(u8) for r in range(cfg.held)])

    def encoded(factors, finite):
        for r, v in enumerate(values.values()):
            found = words(v, tuple(f[r] for f in factors), p.output_type)
            yield found if finite is None else select(finite[r], found, constant(0, i32, found.width))

    to = ThreadValues((rows, columns // per), _along(cfg, per), Mode(EACH // per, 1, 1), (Mode(cfg.held, 0, 1),))
    codes = matrix(given["codes"], i32, m, p.n // per).tile(to.tile, *at)
    for d, found in zip(values.names(), scales.encoded(k, encoded), strict=True):
        codes.store(k, to, d, vector_of([k.target.opaque(found[i]) for i in range(found.width)]))


def along_columns(k: Kernel, p: QuantizeProblem, cfg: GpuConfig, values: Fragment, given, at, turned):
    """Codes and scales of blocks along columns: a tile is turned round in LDS, then written line by line."""
    (rows, columns), per, m = cfg.tile, 32 // p.output_type.bits, given["m"]  # per: numbers a word
    rows_, (shelf, board) = values.values(), turned
    scales = scales_of(p, values, shared(k, most_of(k, rows_), cfg.across))

    def encoded(factors, finite):
        for c, word in enumerate(words_down(rows_, factors, p.output_type)):
            yield word if finite is None else select(finite[c], word, constant(0, i32, word.width))

    # into LDS as registers hold it
    threads = (
        Mode(cfg.across, 0, EACH),
        Mode(cfg.groups, 1, cfg.held // per),
        Mode(cfg.waves[0], 1, BLOCK // per),
        Mode(cfg.waves[1], 0, cfg.across * EACH),
    )
    put = ThreadValues((columns, rows // per), threads, Mode(cfg.held // per, 1, 1), (Mode(EACH, 0, 1),))
    for c, word in enumerate(scales.encoded(k, encoded)):
        shelf.store(k, put, (c,), word)
    one = (threads[0], Mode(cfg.groups, 1, 0), Mode(cfg.waves[0], 1, 1), threads[3])
    of_blocks = ThreadValues((columns, rows // BLOCK), one, Mode(1, 1, 1), (Mode(EACH, 0, 1),))
    store(k, of_blocks, board, [scales.byte[c].to(u8) for c in range(EACH)])
    k.barrier()

    # and out by rows of the transposed result
    for name, held, each, vector in (("codes_t", shelf, per, WIDE), ("scales_t", board, BLOCK, 1)):
        take = lines(columns, rows // each, cfg.workgroup_size, vector)
        to = replace(matrix(given[name], held.dtype, p.n, m // each), multiple=(p.n, BLOCK // each))
        to = replace(to, stride_multiple=BLOCK // each)
        k.fragment(take).store(to.tile(take.tile, *at[::-1]), k.fragment(take).load(held))


def matrix(view: View, dtype: DType, rows, width) -> View:
    """A result as a dense (rows, width) matrix of a type."""
    return replace(view, dtype=dtype, shape=(rows, width), stride=(width, 1), multiple=(1, width))


def magnitude(k: Kernel, v: Value) -> Value:
    """What magnitudes are compared as, NaN the highest: their bits as integers, which are ordered as the numbers are.

    Where the target compares two pairs of these floats, NaN or not, those without their signs: the bits of an absolute
    value would be taken off by arithmetic on integers, of which a warp of sm_90a starts one in two cycles and this
    kernel has most; and what encodes asks for the bits, so no register keeps them from here to there."""
    if v.dtype in k.target.packed_nan_maximum:
        return k.target.packed_magnitude(v)
    kind = i16 if v.dtype.bits == 16 else i32
    return v.bitcast(kind, v.width) & int(kind.largest)


def greater(a: Value, b: Value) -> Value:
    """Of magnitudes."""
    return maximum_or_nan(a, b) if a.dtype.is_float else maximum(a, b)


def most_of(k: Kernel, rows: list[Value]) -> Value:
    """Element by element the largest magnitude. By pairs: sm_90a takes two signs off as it compares three numbers."""
    each = [magnitude(k, v) for v in rows]
    return reduce(greater, map(greater, each[::2], each[1::2]))


def largest_of(k: Kernel, rows: list[Value]) -> Value:
    """The largest magnitude of each vector: one vector over all of them. Of 16-bit types two rows at a time."""

    def halved(v: Value, width: int) -> Value:
        while v.width > width:
            n = v.width // 2
            v = greater(v.shuffle(list(range(n))), v.shuffle(list(range(n, 2 * n))))
        return v

    each = [magnitude(k, v) for v in rows]
    if each[0].dtype.bits != 16:
        return vector_of([halved(size, 1)[0] for size in each])
    pairs = [halved(size, 2) for size in each]
    both = [greater(a.shuffle([0, 2], b), a.shuffle([1, 3], b)) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    return vector_of([b[i] for b in both for i in range(2)])


@dataclass(frozen=True)
class Scales:
    """Of a thread's blocks: whether their numbers are finite; bytes; factors as `words` takes them; i1 or None, see
    `first_factor_alone`."""

    finite: Value
    byte: Value
    factors: tuple[Value, ...]
    alone: Value | None

    def encoded(self, k: Kernel, make: Callable[[tuple[Value, ...], Value | None], Iterable[Value]]) -> Iterable[Value]:
        """What make(factors, finite) gives; the second is None where all blocks are finite."""
        whole = lambda: make(self.factors, self.finite)
        return whole() if self.alone is None else k.choose(self.alone, lambda: make(self.factors[:1], None), whole)


def scales_of(p: QuantizeProblem, values: Fragment, size: Value) -> Scales:
    """Of blocks of `values` whose largest magnitudes `magnitude` gave."""
    kind = values.values()[0].dtype
    if kind == f16:
        size = cut_to_bf16(size, p.round_up)
    byte, exponent = (scale_of if kind == f32 else scales_of_bf16)(size, p.output_type, p.round_up)
    finite = is_finite(size)
    byte = select(finite, byte, constant(SCALE_NAN, byte.dtype, byte.width))
    how = kind, exponent, p.output_type, p.round_up
    return Scales(finite, byte, factors_for(*how), first_factor_alone(*how))


def cut_to_bf16(size: Value, sticky: bool) -> Value:
    """Bits of f16 -> those of bf16, its last bits cut off; sticky: if any of them was set, so is the last one left, and
    it compares as the number does with those of fewer bits."""
    wide = size.bitcast(f16, size.width).to(f32).bitcast(i32, size.width)
    if sticky:
        last = 1 << (f32.bits - bf16.bits)
        cut = last - (1 << (f32.mantissa - f16.mantissa))
        wide = wide | ((wide & cut) + cut) & last
    return wide.bitcast(i16, 2 * size.width).shuffle(list(range(1, 2 * size.width, 2)))


def shared(k: Kernel, size: Value, distance: int, lanes: int = SHARE) -> Value:
    """Element by element the largest magnitude's bits (i16 or i32) among `lanes` lanes that are `distance` apart; 32
    bits are exchanged at once. NaN has no sign here: PTX's max.NaN gives but one, 0x7fff."""
    kind, each = i16 if size.dtype.bits == 16 else i32, words_of(size)
    as_before = lambda w: w.bitcast(kind, 32 // kind.bits)
    for step in (distance << i for i in range(lanes.bit_length() - 1)):
        pairs = [k.target.exchange(k, w, step) for w in each]
        each = [maximum(as_before(a), as_before(b)).bitcast(i32) for a, b in pairs]
    return vector_of(each).bitcast(kind, size.width)


def words_of(v: Value) -> list[Value]:
    """A vector's 32-bit words as scalars."""
    whole = v.bitcast(i32, v.width * v.dtype.bits // 32)
    return [whole[i] for i in range(whole.width)]


def store(k: Kernel, to: ThreadValues, view: View, values: list[Value]):
    k.fragment(to).store(view, Fragment(k, to, False, lambda d: values[d[0]]))


def lines(rows: int, width: int, threads: int, vector: int) -> ThreadValues:
    """A tile spread over a workgroup row by row, `vector` neighbours a thread at a time."""
    wide = width // vector
    deep = threads // wide
    lanes = (Mode(wide, 1, vector), Mode(deep, 0, 1))
    return ThreadValues((rows, width), lanes, Mode(vector, 1, 1), (Mode(-(-rows // deep), 0, deep),))


def shelf_swizzle(columns: int, width: int, banks: int) -> Swizzle:
    """Of the (columns, width) words in LDS. Lanes that write together are EACH columns apart, so without it on one
    bank; the column's number, a step of EACH at a time, is added (bit by bit) to the place of WIDE words in its row,
    and where banks are more than a row's words, to the row's own number."""
    base, row = WIDE.bit_length() - 1, width.bit_length() - 1
    shift = row + EACH.bit_length() - 1 - base
    bits = min(shift, (columns // EACH).bit_length() - 1, (banks // WIDE).bit_length() - 1)
    return Swizzle(bits, base, shift) if bits > 0 else IDENTITY


def _along(cfg: GpuConfig, per: int) -> tuple[Mode, ...]:
    """The threads over a tile of words of codes."""
    return tuple(m._replace(step=m.step // per) if m.axis == 1 else m for m in cfg.spread(0, 1, 1, 1))


def _in_blocks(m: Mode) -> Mode:
    return m._replace(step=m.step // BLOCK) if m.axis == 1 else m
