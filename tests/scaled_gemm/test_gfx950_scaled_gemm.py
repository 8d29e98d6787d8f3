"""The gfx950 scaled GEMM in the simulator: formats, scalings, tails, schedules, slices; no findings, no spills."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flykernels.lang import TraceError
from flykernels.layout import bank_conflicts
from flykernels.sim import run_on_sim
from flykernels.targets import gfx950
from templates.scaled_gemm.build import build
from templates.scaled_gemm.gfx950_config import ScaledConfig, byte_swizzle
from templates.scaled_gemm.problem import OPERANDS, ScaledGemmProblem
from templates.scaled_gemm.space import candidates

from .gfx950_case import compiled, run
from .x86_case import operands

NAMES = [d.name for d in OPERANDS]
F8, F4 = "f8E4M3FN", "f4E2M1FN"
SMALL = ScaledConfig(64, 64, 128, 3, (2, 2))
LARGE = {F8: ScaledConfig(256, 256, 128, 2, (2, 4)), F4: ScaledConfig(256, 256, 256, 2, (2, 4))}


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
@pytest.mark.parametrize(("a", "b"), list(product(NAMES, NAMES)))
def test_formats(a, b, shape):
    """Random codes and scales; K of several slots, the last one cut, and more than one workgroup."""
    cfg = ScaledConfig(64, 64, 128 if (a, b) != (F4, F4) else 256, 3, (2, 2), shape=shape)
    run(ScaledGemmProblem(n=96, k=1408, a_dtype=a, b_dtype=b), cfg, 70, pad_c=8)


def test_fp16_out_and_one_kernel_for_every_m():
    p = ScaledGemmProblem(n=72, k=384, b_dtype=F4, out_dtype="f16", bias="row")
    for m in (1, 64, 130):
        run(p, SMALL, m, found=operands(p, m, spread=3, centre=121))  # f16 ends at 65504


@pytest.mark.parametrize("k", [32, 160, 480, 1056])
def test_k_in_blocks_of_32(k):
    """Scales of such rows are no whole words: they come through registers. The last K tile is cut."""
    run(ScaledGemmProblem(n=64, k=k, b_dtype=F4, bias="row", out_dtype="f32"), SMALL, 33, seed=k)


@pytest.mark.parametrize("out", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_one_scale_a_matrix_or_a_row(scaling, out):
    p = ScaledGemmProblem(n=104, k=528, scaling=scaling, out_dtype=out, bias="row")
    found = operands(p, 70)
    if out == "f16":
        found["scale_a"] /= 1024
    run(p, SMALL, 70, found=found)


def test_a_scale_for_each_row_of_interleaved_parts():
    """Each quarter of the tile has rows and columns, and so scales, of its own."""
    cfg = ScaledConfig(tile_m=128, tile_n=128, stages=2, waves=(2, 2), schedule="four")
    p = ScaledGemmProblem(n=136, k=1024, scaling="row", m_hint=200)
    run(p, cfg, 133)


@pytest.mark.parametrize("kind", [F8, F4])
def test_interleaved(kind):
    """256 x 256, two workgroups, the second cut on both sides; K of whole tiles and an odd number of slots."""
    cfg = ScaledConfig(**{**LARGE[kind].key(), "schedule": "four"})
    p = ScaledGemmProblem(n=264, k=cfg.tile_k * 6, a_dtype=kind, b_dtype=kind, bias="row")
    count = 4
    run(p, cfg, 280, workgroups=[(0, 0, 0), (count - 1, 0, 0)])


@pytest.mark.parametrize("schedule", ["four", "eight"])
def test_interleaved_with_an_odd_number_of_k_tiles(schedule):
    cfg = ScaledConfig(128, 128, 128, 2, (2, 2), schedule=schedule)
    run(ScaledGemmProblem(n=128, k=128 * 7, b_dtype=F4), cfg, 128)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_interleaved_with_a_scale_for_a_matrix_or_a_row(scaling):
    """Each part of a tile has the scales of its own rows and columns."""
    cfg = ScaledConfig(128, 128, 128, 2, (2, 2), schedule="four")
    run(ScaledGemmProblem(n=136, k=128 * 3, scaling=scaling, bias="row"), cfg, 140)


@pytest.mark.parametrize(("kind", "schedule", "more"), [
    (F8, "four", 32), (F8, "eight", 96), (F4, "four", 64), (F4, "eight", 224), (F4, "four", 128),
])  # fmt: skip
def test_interleaved_where_k_ends_within_a_tile(kind, schedule, more):
    """Rows of scales that are no whole words too: those of a slot stand up to 3 bytes further on in LDS."""
    cfg = ScaledConfig(128, 128, 1024 // gfx950_bits(kind), 2, (2, 2), schedule=schedule)
    p = ScaledGemmProblem(n=136, k=6 * cfg.tile_k + more, a_dtype=kind, b_dtype=kind, bias="row")
    run(p, cfg, 140, workgroups=[(0, 0, 0), (3, 0, 0)], seed=more)


@pytest.mark.parametrize(("a", "b", "k"), [(F8, F8, 32), (F4, F4, 64), (F8, F4, 96), (F4, F4, 160), (F8, F8, 128)])
def test_interleaved_where_k_is_less_than_a_tile(a, b, k):
    """Rows lie closer together than a tile is long: those past the last row must not reach past the operand's end."""
    cfg = ScaledConfig(128, 128, 256, 2, (2, 2), schedule="four")
    run(ScaledGemmProblem(n=134, k=k, a_dtype=a, b_dtype=b, out_dtype="f32"), cfg, 65, seed=k)


def test_interleaved_tiles_are_offered_whatever_k():
    p = ScaledGemmProblem(n=4096, k=4096 + 32, m_hint=4096)
    kept = [c.config for c in candidates(p, gfx950).kept]
    assert any(c.interleaved and c.tile_mn == (256, 256) for c in kept)


@pytest.mark.parametrize("cfg", [
    ScaledConfig(32, 64, 512, 2, (1, 2), k_waves=2),
    ScaledConfig(64, 64, 128, 2, (2, 2), split_k=2),
    ScaledConfig(16, 32, 512, 5, (1, 2)),
], ids=str)  # fmt: skip
def test_few_rows(cfg):
    run(ScaledGemmProblem(n=96, k=3072, bias="row"), cfg, 17)


def test_padded_rows_and_offsets():
    run(ScaledGemmProblem(n=64, k=512, b_dtype=F4), SMALL, 64, pad=48, pad_c=4)


def test_nan_scale_poisons_its_block_only():
    p = ScaledGemmProblem(n=64, k=512)
    found = operands(p, 40)
    found["scale_a"][3, 1] = 255
    found["scale_b"][17, 15] = 255
    got = run(p, SMALL, 40, found=found)
    nan = np.zeros((40, 64), bool)
    nan[3], nan[:, 17] = True, True
    assert (np.isnan(got) == nan).all()


def test_a_nan_scale_beyond_the_end_of_k_is_not_read():
    """Rows of scales lie end to end: where K is no whole slot, what follows is the next row's. It must not count."""
    p = ScaledGemmProblem(n=64, k=384)
    found = operands(p, 40)
    found["scale_a"][20, 0] = 255
    got = run(p, SMALL, 40, found=found)
    assert np.isnan(got[20]).all() and np.isfinite(np.delete(got, 20, 0)).all()


def test_nan_and_infinity_in_operands():
    p = ScaledGemmProblem(n=64, k=256, b_dtype="f8E5M2")
    found = operands(p, 40)
    found["a"][2, 5] = 0x7F  # NaN
    found["b"][4, 7] = 0xFC  # -infinity
    found["a"][:, 7] = 0x38  # 1.0
    got = run(p, SMALL, 40, found=found)
    assert np.isnan(got[2]).all() and (np.delete(got[:, 4], 2) == -np.inf).all()
    assert np.isfinite(np.delete(np.delete(got, 2, 0), 4, 1)).all()


def test_zeros_and_the_least_scale():
    """All-zero operands give the bias alone; byte 0 is 2^-127, not zero."""
    p = ScaledGemmProblem(n=64, k=256, bias="row", out_dtype="f32")
    found = operands(p, 20)
    found["a"][:8] = 0
    found["scale_a"][8:] = 0
    found["scale_b"][:] = 234
    run(p, SMALL, 20, found=found)


def test_scale_overflow_is_infinite_or_exact():
    """e4m3's largest times 2^127 is beyond f32, the product with a small scale is not: never a third thing."""
    p = ScaledGemmProblem(n=64, k=128, out_dtype="f32")
    found = operands(p, 16)
    found["a"][:], found["b"][:] = 0x7E, 0x38  # 448, 1
    found["scale_a"][:], found["scale_b"][:] = 254, 100
    code = compiled(p, SMALL)
    c = np.full(16 * 64 + 2, np.nan, np.float32)
    numbers = [np.int64(x) for x in (16, 128, 128, 64)]
    run_on_sim(code, [*found.values(), c, *numbers], (1, 1, 1), outputs=[4]).raise_for_findings()
    assert np.isin(c[: 16 * 64], (np.inf, 128 * 448 * 2.0**100)).all()


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    m=st.integers(1, 130), n=st.integers(1, 130), blocks=st.integers(1, 40), a=st.sampled_from(NAMES),
    b=st.sampled_from(NAMES), out=st.sampled_from(["bf16", "f32"]),
)  # fmt: skip
def test_shapes(m, n, blocks, a, b, out):
    p = ScaledGemmProblem(
        n=n, k=32 * blocks, a_dtype=a, b_dtype=b, out_dtype=out, m_hint=m, align_c=2 if out == "bf16" else 4
    )
    run(p, candidates(p, gfx950).kept[0].config, m, seed=m)


@pytest.mark.parametrize("kind", [F8, F4])
def test_main_loop_moves_no_accumulators(kind):
    p = ScaledGemmProblem(n=4096, k=4096, a_dtype=kind, b_dtype=kind)
    cfg = ScaledConfig(**{**LARGE[kind].key(), "schedule": "four"})
    code = compiled(p, cfg)
    assert code.spills == 0 and "v_accvgpr" not in code.text and "scratch_" not in code.text


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
@pytest.mark.parametrize("kind", OPERANDS)
def test_operand_reads_have_no_bank_conflicts(kind, shape):
    """Every step's reads of rows of 128 bytes, in each order that lanes may be served in."""
    p = ScaledGemmProblem(n=128, k=1024, a_dtype=kind.name, b_dtype=kind.name)
    cfg = ScaledConfig(128, 128, 1024 // kind.bits, 2, (2, 2), shape=shape)
    operand, depth = cfg.spread_atom(p).a, cfg.bytes_of(p, "a")
    moved, lanes, block = byte_swizzle(operand, 128, depth), np.arange(64), 32 * kind.bits // 8
    assert depth == 128
    for step, digits in product(range(cfg.steps()), np.ndindex(*operand.piece_sizes)):
        tv = operand.shifted(0, step * block)
        row, column = (o + w for o, w in zip(tv.origin(lanes), tv.walk(digits)))
        for phases in gfx950.read_phases.values():
            assert bank_conflicts(moved(row * depth + column), phases, 16, gfx950.limits.banks) == 1


def gfx950_bits(kind: str) -> int:
    return next(d.bits for d in OPERANDS if d.name == kind)


def blocks_of(operand, step_bytes: int, block: int, steps: int) -> dict:
    """lane group and piece -> which block of 32 of the tile it holds, and where in the block, at one step."""
    lanes, out = np.arange(64), {}
    for digits in np.ndindex(*operand.piece_sizes):
        column = operand.shifted(0, step_bytes).origin(lanes)[1] + operand.walk(digits)[1]
        for lane in lanes:
            out[int(lane), digits] = divmod(int(column[lane]), block)
    return out


@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
@pytest.mark.parametrize("kind", OPERANDS)
def test_every_block_is_multiplied_once_with_its_scale(kind, shape):
    """The blocks that an instruction takes, as the simulator's layouts say, are those whose scales the lanes hold."""
    p = ScaledGemmProblem(n=128, k=1024, a_dtype=kind.name, b_dtype=kind.name)
    cfg = ScaledConfig(128, 128, 1024 // kind.bits, 2, (2, 2), shape=shape)
    atom, plain = cfg.spread_atom(p), cfg.atom(p)
    groups, block, steps = plain.scale.tile[1], 32 * kind.bits // 8, cfg.steps()
    rows = 64 // groups
    seen = set()
    for step in range(steps):
        for (lane, digits), (held, inside) in blocks_of(atom.a, step * block, block, steps).items():
            hardware, place = blocks_of(plain.a, 0, block, 1)[lane, digits]  # the instruction's own block and place
            assert inside == place
            scale = atom.scale.origin(hardware * rows)[1] + step  # of the lanes that hold that block's scale
            assert held == scale
            seen.add(held)
    assert seen == set(range(groups * steps))


@pytest.mark.parametrize(
    ("change", "words"), [({"k": 520, "scaling": "row"}, "multiple of 16"), ({"align_a": 8}, "multiples of 8")]
)
def test_not_eligible(change, words):
    p = ScaledGemmProblem(**({"n": 64, "k": 512} | change))
    assert words in candidates(p, gfx950).dropped[0].reason
    with pytest.raises(ValueError, match="no scaled GEMM kernel"):
        build(p, SMALL, gfx950)


def test_slices_of_k_that_are_no_whole_tiles_are_refused():
    """By hand too: such a slice would take in the next one's numbers, the last one what lies beyond the operands."""
    cfg = ScaledConfig(64, 64, 128, 2, (2, 2), split_k=2)
    with pytest.raises((ValueError, TraceError), match="K = 640 is not 2 slices of whole K tiles of 128"):
        build(ScaledGemmProblem(n=64, k=640), cfg, gfx950)
    build(ScaledGemmProblem(n=64, k=768), cfg, gfx950)
