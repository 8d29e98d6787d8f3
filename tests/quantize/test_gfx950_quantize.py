"""The quantisers of gfx950 in the simulator, byte by byte against the numpy reference, checker silent."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from flykernels.dtypes import bf16, f16, f32, i16
from flykernels.lang.microscaling import encoded
from flykernels.lang.values import absolute
from flykernels.sim import run_on_sim
from flykernels.sim.report import profile
from flykernels.targets import gfx950, sm90a, sm90a_fp8
from templates.quantize.arguments import outputs, shapes
from templates.quantize.build import build, default
from templates.quantize.gpu import GpuConfig
from templates.quantize.problem import INPUTS, MODES, QuantizeProblem

from .case import GUARD, compare, compiled, guarded, numbers, stored

FORMATS = ("f8E4M3FN", "f8E5M2", "f4E2M1FN")
ORIENTATIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}


def run(p: QuantizeProblem, x: np.ndarray, pad: int = 0, config=None, code=None) -> dict[str, np.ndarray]:
    code = code or compiled(p, gfx950, config)
    assert code.spills == 0 and code.scratch_bytes == 0
    memory, row = stored(p, x, pad)
    out = guarded(p, len(x))
    arguments = [memory, *(out[n][GUARD:] for n in outputs(p)), np.int64(len(x)), np.int64(row)]
    grid = code.grid_for({"m": len(x)})
    result = run_on_sim(code, arguments, (*grid, 1, 1)[:3], outputs=list(range(1, 1 + len(outputs(p)))))
    result.raise_for_findings()
    compare(p, x, out)
    return {n: out[n][GUARD:-GUARD].reshape(shapes(p, len(x))[n]) for n in outputs(p)}


@pytest.mark.parametrize(("format", "mode"), list(product(FORMATS, MODES)))
def test_both_from_one_read(format, mode):
    p = QuantizeProblem(n=160, format=format, columns=True, mode=mode)
    run(p, numbers(p, 160))


@pytest.mark.parametrize(("strip", "ahead"), [(2, False), (4, True)])
@pytest.mark.parametrize("n", [416, 64])
def test_strips_of_tiles(strip, ahead, n):
    """Several tiles a workgroup, in turns of LDS; the last strip is short, its last tile cut."""
    p = QuantizeProblem(n=n, format="f4E2M1FN", columns=True)
    config = GpuConfig((2, 1), 4, gfx950.lanes, 8, strip=strip, ahead=ahead)
    assert config.tile == (64, 128)
    run(p, numbers(p, 96), config=config)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_inputs_and_padded_rows(dtype):
    p = QuantizeProblem(n=128, dtype=dtype, columns=True, align_x=4)
    run(p, numbers(p, 32), pad=4)


@pytest.mark.parametrize(("which", "n", "m"), [("rows", 576, 37), ("columns", 90, 64)])
def test_one_orientation_with_tails(which, n, m):
    rows, columns = ORIENTATIONS[which]
    p = QuantizeProblem(n=n, format="f8E4M3FN", rows=rows, columns=columns, align_x=2)
    run(p, numbers(p, m), pad=1)


@pytest.mark.parametrize(("dtype", "format"), list(product(INPUTS, FORMATS)))
def test_nan_and_infinity_poison_their_block(dtype, format):
    run_poisoned(QuantizeProblem(n=64, dtype=dtype, format=format, columns=True))


def run_poisoned(p: QuantizeProblem, code=None) -> None:
    x = numbers(p, 64)
    x[5, 40], x[33, 3] = np.nan, -np.inf
    got = run(p, x, code=code)
    assert got["scales"][5, 1] == 255 and got["scales"][33, 0] == 255 and (got["scales"] == 255).sum() == 2
    assert got["scales_t"][40, 0] == 255 and got["scales_t"][3, 1] == 255


@pytest.mark.parametrize(("dtype", "format"), [("f32", "f4E2M1FN"), ("f16", "f8E5M2"), ("bf16", "f4E2M1FN")])
def test_the_ways_of_sm90a(dtype, format, monkeypatch):
    """What the kernel does where a target compares pairs of 16-bit floats, and makes FP4 of those only, done here."""
    p = QuantizeProblem(n=64, dtype=dtype, format=format, columns=True)
    usual = compiled(p, gfx950).text
    of_pairs = {"packed_nan_maximum": (bf16, f16), "packed_magnitude": staticmethod(absolute)}
    narrower = type(sm90a).narrower_for_small_floats
    for name, value in {**of_pairs, "narrower_for_small_floats": narrower}.items():
        monkeypatch.setattr(type(gfx950), name, value, raising=False)
    code = build(p, default(p, gfx950), gfx950)
    assert code.text != usual
    if dtype == "f32":  # halves of the next tile's registers
        strips = GpuConfig((2, 1), 4, gfx950.lanes, 8, strip=4, ahead=True)
        wide = replace(p, n=416)
        run(wide, numbers(wide, 96), code=build(wide, strips, gfx950))
    run(p, numbers(p, 96), code=code)
    run_poisoned(p, code)


@pytest.mark.parametrize(("format", "mode"), [("f8E4M3FN", "round_up"), ("f8E5M2", "floor")])
def test_f16_by_one_factor_or_three_as_on_sm90a(format, mode, monkeypatch):
    """Both arms of a branch that each thread takes on its own; what this target cannot do with f16 is spelled out."""
    p = QuantizeProblem(n=64, dtype="f16", format=format, columns=True, mode=mode)
    usual = compiled(p, gfx950).text
    for name in ("small_float_factors", "first_factor_alone", "small_floats", "small_floats_down"):
        monkeypatch.setattr(type(gfx950), name, getattr(type(sm90a), name), raising=False)
    code = lambda x, dtype, i: encoded(x[i].to(f32), dtype).to(i16)
    monkeypatch.setattr(sm90a_fp8, "_pair", lambda x, dtype: code(x, dtype, 0) | code(x, dtype, 1) << 8)
    made = build(p, default(p, gfx950), gfx950)
    assert made.text.count("v_pk_mul_f16") > usual.count("v_pk_mul_f16")
    x = numbers(p, 96)
    run(p, x, code=made)
    run(p, x * 2.0 ** -np.arange(96)[:, None] // 2.0**-24 * 2.0**-24, code=made)  # rows of every size, down to zeros
    run_poisoned(p, made)


@pytest.mark.parametrize("which", ORIENTATIONS)
@pytest.mark.parametrize("format", ["f8E4M3FN", "f4E2M1FN"])
def test_memory_is_used_in_whole_lines_and_lds_without_conflicts(format, which):
    """The simulator's counters of a workgroup in the middle of X.

    Codes of 8 rows are half as long as the 16 bytes that read them, and keep together with their neighbours': two
    turns for such a write, which is under a tenth of the time that memory takes for the tile. Nothing else conflicts.
    Along rows FP4 codes of a tile of 128 columns are half a line: 64 bytes, a burst of memory."""
    rows, columns = ORIENTATIONS[which]
    p, m = QuantizeProblem(n=1024, format=format, rows=rows, columns=columns), 256
    code, x = compiled(p, gfx950), np.full((m, p.n), 0x3F80, np.uint16)
    out = [np.zeros(size, np.uint8) for size in shapes(p, m).values()]
    report = profile(code, [x, *out, np.int64(m), np.int64(p.n)], (*code.grid_for({"m": m}), 1, 1)[:3])

    loads = [s for s in report.memory if s.text.startswith("global_load")]
    assert loads and all(s.text.startswith("global_load_dwordx4") and s.efficiency == 1 for s in loads)
    assert sum(s.bytes for s in loads) == np.prod(default(p, gfx950).tile) * x.itemsize  # each number once
    codes = [s for s in report.memory if s.text.startswith("global_store_dword")]
    half = format == "f4E2M1FN" and which == "both"
    assert codes and all(s.efficiency == (0.5 if half and "dword " in s.text else 1) for s in codes)
    across = [s for s in codes if s.text.startswith("global_store_dwordx4")]
    assert bool(across) == columns, "transposed codes leave 16 bytes a lane"
    for s in report.lds:
        ways = s.conflict_cycles / s.ideal_cycles
        assert ways <= (2 if s.text.startswith(("ds_write_b64", "ds_write_b32", "ds_write2")) else 1), s.text


@pytest.mark.parametrize(("format", "instruction"), [("f8E4M3FN", "fp8"), ("f8E5M2", "bf8"), ("f4E2M1FN", "fp4")])
def test_two_numbers_an_instruction(format, instruction):
    text = compiled(QuantizeProblem(n=160, format=format, columns=True), gfx950).text
    assert f"v_cvt_scalef32_pk_{instruction}_f32" in text
