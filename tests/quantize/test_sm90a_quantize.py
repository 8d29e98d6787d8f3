"""The quantisers of sm_90a without a GPU: what is compiled, which kernel serves what, the arithmetic of FP4 codes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from flykernels.codeobject import CodeObject
from flykernels.dtypes import bf16, f4e2m1, f16
from flykernels.lang import TraceError
from flykernels.microscaling import encode
from flykernels.targets import gfx950, sm90a, sm90a_fp4
from flykernels.targets.sm90a import find_ptxas
from templates.quantize.arguments import SCALARS, outputs
from templates.quantize.build import build, build_from_json, default
from templates.quantize.gpu import GpuConfig
from templates.quantize.problem import INPUTS, QuantizeProblem
from templates.scaled_gemm.reference import rounded

BOTH = QuantizeProblem(n=4096, columns=True)
STAGED = GpuConfig((8, 1), 4, 32, 8, beside=2, strip=4, staged=2)


@pytest.mark.parametrize(("kind", "format"), [("bf16", "f8E4M3FN"), ("bf16", "f4E2M1FN"), ("f16", "f4E2M1FN")])
def test_tiles_that_come_by_copies_hold_no_registers(kind, format):
    """Each tile is eight copies of 16 bytes a thread, started before the one ahead of it is encoded; nothing spills.
    Tiles that lie within X and those that do not have text of their own."""
    p = QuantizeProblem(n=4096, dtype=kind, format=format, columns=True)
    code = build(p, STAGED, sm90a)
    assert [a.name for a in code.arguments] == ["x", *outputs(p), *SCALARS]
    assert code.text.count("cp.async.cg.shared.global") == 2 * 8 * (STAGED.staged + 1)
    assert "ld.global" not in code.text and code.grid_most == sm90a.limits.compute_units * STAGED.beside
    assert STAGED.beside * (code.dynamic_bytes + code.shared_bytes + 1024) <= sm90a.limits.shared_bytes + 1024
    if find_ptxas():
        assert code.spills == 0 and code.binary[:4] == b"\x7fELF"
    assert CodeObject.from_bytes(code.to_bytes()) == code
    assert build_from_json(p, STAGED.key(), "sm90a") == code


@pytest.mark.parametrize(("rows", "columns"), [(True, False), (False, True), (True, True)])
def test_scales_alone_stay_in_l2(rows, columns):
    """Each scale is a byte of a sector that several threads and workgroups fill; codes leave as whole lines."""
    p = replace(BOTH, rows=rows, columns=columns)
    config = default(p, sm90a)
    assert config.kept
    hinted, plain = (build(p, replace(config, kept=kept), sm90a).text for kept in (True, False))
    stores = lambda text: re.findall(r"st\.global(\.L2::cache_hint)?(?:\.v\d)?\.([bu]\d+)", text)
    assert {kind for hint, kind in stores(hinted) if hint} == {"b8"}
    assert all(kind not in ("b8", "u8") for hint, kind in stores(hinted) if not hint)
    assert not any(hint for hint, _ in stores(plain)) and len(stores(plain)) == len(stores(hinted))


@pytest.mark.parametrize("format", ["f8E4M3FN", "f4E2M1FN"])
@pytest.mark.parametrize("dtype", INPUTS)
def test_what_is_compared_and_multiplied_two_at_a_time(dtype, format):
    """Magnitudes and FP4's lines, of f32 too, whose FP4 codes come by way of bf16."""
    p = QuantizeProblem(n=4096, dtype=dtype, format=format, columns=True)
    text = build(p, default(p, sm90a), sm90a).text
    kind = "bf16" if dtype == "f32" and format == "f4E2M1FN" else dtype
    assert (f"max.NaN.{kind}x2" in text) == bool(re.search(r"setp\.\w+\.bf16", text)) == (kind != "f32")
    assert (f"fma.rn.{kind}x2" in text) == (format == "f4E2M1FN")
    assert str(0x7FFF7FFF) not in text  # no signs are masked off


@pytest.mark.parametrize(("change", "words"), [
    ({"dtype": "f32"}, "copies move 16, 8 numbers"), ({"align_x": 8}, "aligned to 8 bytes"),
])  # fmt: skip
def test_what_copies_do_not_bring_has_another_kernel(change, words):
    p = QuantizeProblem(**{**BOTH.key(), **change})
    with pytest.raises((ValueError, TraceError), match=words):
        build(p, STAGED, sm90a)
    assert build(p, default(p, sm90a), sm90a).text


@pytest.mark.parametrize("config", [replace(STAGED, strip=1), replace(STAGED, group=8)])
def test_stages_are_for_strips(config):
    with pytest.raises((ValueError, TraceError), match="stages are for strips"):
        build(BOTH, config, sm90a)
    with pytest.raises((ValueError, TraceError), match="sm90a"):
        build(BOTH, replace(STAGED, lanes=64), gfx950)


@pytest.mark.parametrize("overlap", ["none", "late", "early"])
def test_the_kernel_ahead_is_waited_for_before_memory_is_touched(overlap):
    config = replace(default(BOTH, sm90a), overlap=overlap)
    code = build(BOTH, config, sm90a)
    assert code.overlaps == (overlap != "none")
    assert ("griddepcontrol.launch_dependents;" in code.text) == (overlap == "early")
    before, _, after = code.text.partition("griddepcontrol.wait;") if code.overlaps else ("", "", code.text)
    touched = re.compile(r"\b(ld|st|cp\.async\S*)\.global")
    assert not touched.search(before) and touched.search(after)
    with pytest.raises((ValueError, TraceError), match="sm90a only"):
        build(BOTH, replace(default(BOTH, gfx950), overlap="late"), gfx950)


@pytest.mark.parametrize("kind", list(sm90a_fp4.FLAT), ids=str)
def test_three_lines_are_the_codes_of_all_magnitudes(kind):
    """The least of three rounded lines, for every number below 8: what `sm90a_fp4` computes, in numpy."""
    bits = np.arange(1 << 15, dtype=np.uint32)
    y = ((bits << 16).view(np.float32) if kind == bf16 else bits.astype(np.uint16).view(np.float16)).astype(np.float64)
    y = y[y < 8]
    lines = [(2.0, 0), (1.0, 2), (sm90a_fp4.FLAT[kind], 5)]
    least = np.min([rounded(sm90a_fp4.BASE[kind] + start + slope * y, kind.name) for slope, start in lines], 0)
    assert (least - sm90a_fp4.BASE[kind] == encode(y, f4e2m1)).all() and len(y) > 16000


def test_f16_scaled_in_two_parts_has_the_codes_of_the_product():
    """Every f16 that a block's power of two leaves below 8: magnitudes times the first part, slopes times the second,
    each line rounded once to f16, as `sm90a_fp4.factors` splits powers and the kernel multiplies."""
    x = np.arange(31 << 10, dtype=np.uint16).view(np.float16).astype(np.float64)
    rounds = lambda v: v.astype(np.float16).astype(np.float64)  # nearest, ties to even; of float64, where v is exact
    for power in range(-13, 27):  # of blocks whose largest number is from 2^15 down to 2^-24
        here = x[x * 2.0**power < 8]
        first, second = 2.0 ** max(min(power, 15), -14), 2.0 ** max(min(power - 15, 14), 0)
        assert first * second == 2.0**power
        size = rounds(here * first)
        lines = [rounds(sm90a_fp4.BASE[f16] + start + size * (slope * second)) for slope, start in sm90a_fp4.LINES[f16]]
        assert (np.min(lines, 0) - sm90a_fp4.BASE[f16] == encode(here * 2.0**power, f4e2m1)).all()
