"""The quantisers of sm_90a without a GPU: what is compiled, which kernel serves what, the arithmetic of FP4 codes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from flykernels.codeobject import CodeObject
from flykernels.dtypes import bf16, f4e2m1
from flykernels.microscaling import encode
from flykernels.targets import sm90a, sm90a_fp4
from flykernels.targets.sm90a import find_ptxas
from templates.quantize.arguments import SCALARS, outputs
from templates.quantize.build import build, build_from_json, default
from templates.quantize.problem import QuantizeProblem
from templates.quantize.sm90a import RingConfig, why_not
from templates.scaled_gemm.reference import rounded

FORMATS = ("f8E4M3FN", "f8E5M2", "f4E2M1FN")
BOTH = QuantizeProblem(n=4096, columns=True)


@pytest.mark.parametrize(("kind", "format"), list(product(("bf16", "f16"), FORMATS)))
def test_a_ring_serves_both_orientations_of_16_bits(kind, format):
    p = QuantizeProblem(n=4096, dtype=kind, format=format, columns=True)
    config = RingConfig(beside=3 - p.per_byte, band=128 * p.per_byte)
    code = build(p, config, sm90a)
    assert [a.name for a in code.arguments] == ["x", *outputs(p), *SCALARS]
    assert [t.name for t in code.tensor_maps] == ["x_map"] and "cp.async.bulk.tensor.2d" in code.text
    assert code.grid_most == sm90a.limits.compute_units * config.beside
    assert config.beside * code.dynamic_bytes <= sm90a.limits.shared_bytes
    if find_ptxas():
        assert code.spills == 0 and code.binary[:4] == b"\x7fELF"
    assert CodeObject.from_bytes(code.to_bytes()) == code
    assert build_from_json(p, config.key(), "sm90a") == code


@pytest.mark.parametrize(("change", "words"), [
    ({"rows": False}, "both orientations"), ({"columns": False}, "both orientations"),
    ({"dtype": "f32"}, "16-bit types"), ({"align_x": 8}, "TMA needs 16"),
])  # fmt: skip
def test_what_a_ring_does_not_serve_has_another_kernel(change, words):
    p = QuantizeProblem(**{**BOTH.key(), **change})
    assert words in why_not(p)
    with pytest.raises(Exception, match=words):
        build(p, RingConfig(), sm90a)
    config = default(p, sm90a)
    assert build_from_json(p, config.key(), "sm90a").text


def test_a_piece_is_of_whole_lines_of_codes():
    fp4 = QuantizeProblem(n=4096, format="f4E2M1FN", columns=True)
    with pytest.raises(Exception, match="6 tiles along a row; 4 fill a line"):
        build(fp4, RingConfig(along=6, band=256), sm90a)
    with pytest.raises(Exception, match="tiles of 128 rows; 256 fill a line"):
        build(fp4, RingConfig(), sm90a)


@pytest.mark.parametrize("kind", list(sm90a_fp4.FLAT), ids=str)
def test_three_lines_are_the_codes_of_all_magnitudes(kind):
    """The least of three rounded lines, for every number below 8: what `sm90a_fp4` computes, in numpy."""
    bits = np.arange(1 << 15, dtype=np.uint32)
    y = ((bits << 16).view(np.float32) if kind == bf16 else bits.astype(np.uint16).view(np.float16)).astype(np.float64)
    y = y[y < 8]
    lines = [(2.0, 0), (1.0, 2), (sm90a_fp4.FLAT[kind], 5)]
    least = np.min([rounded(sm90a_fp4.BASE[kind] + start + slope * y, kind.name) for slope, start in lines], 0)
    assert (least - sm90a_fp4.BASE[kind] == encode(y, f4e2m1)).all() and len(y) > 16000
