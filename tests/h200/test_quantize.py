"""The quantisers on the H200, byte by byte against the numpy reference: every format, type, orientation and mode."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from flykernels.launch.current import Launcher
from flykernels.targets import sm90a
from templates.quantize.arguments import outputs, shapes
from templates.quantize.gpu import GpuConfig, default
from templates.quantize.problem import INPUTS, MODES, QuantizeProblem
from tests.quantize.case import GUARD, compare, compiled, guarded, numbers, stored

FORMATS = ("f8E4M3FN", "f8E5M2", "f4E2M1FN")
ORIENTATIONS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}


def run(p: QuantizeProblem, x: np.ndarray, pad: int = 0, config=None) -> dict[str, np.ndarray]:
    code = compiled(p, sm90a, config)
    memory, row = stored(p, x, pad)
    bytes_of = torch.from_numpy(memory.view(np.uint8)).cuda()
    out = guarded(p, len(x))
    there = {name: torch.from_numpy(a).cuda() for name, a in out.items()}
    Launcher(code)(bytes_of.data_ptr(), *(there[n].data_ptr() + GUARD for n in outputs(p)), len(x), row)
    torch.cuda.synchronize()
    for name in out:
        out[name][:] = there[name].cpu().numpy()
    compare(p, x, out)
    return {n: out[n][GUARD:-GUARD].reshape(shapes(p, len(x))[n]) for n in outputs(p)}


@pytest.mark.parametrize(("which", "dtype", "format", "mode"), list(product(ORIENTATIONS, INPUTS, FORMATS, MODES)))
def test_bytes(which, dtype, format, mode):
    rows, columns = ORIENTATIONS[which]
    for n, m in ((160, 160), (1056, 384)):
        p = QuantizeProblem(n=n, dtype=dtype, format=format, rows=rows, columns=columns, mode=mode)
        run(p, numbers(p, m))


@pytest.mark.parametrize(("waves", "beside", "strip"), [((8, 1), 2, 4), ((8, 2), 1, 2), ((4, 1), 4, 8)])
@pytest.mark.parametrize(("dtype", "format"), list(product(INPUTS[:2], FORMATS)))
def test_tiles_that_come_by_copies(waves, beside, strip, dtype, format):
    """Strips that are short, tiles that are cut on both sides, workgroups that do several strips or none."""
    config = GpuConfig(waves, 4, 32, 8, beside, strip=strip, staged=2)
    for n, m, pad in ((96, 32, 0), (1056, 416, 8), (2048, 512, 0), (8192, 4096 + 32, 0)):
        p = QuantizeProblem(n=n, dtype=dtype, format=format, columns=True)
        if n < 8192:
            run(p, numbers(p, m), pad=pad, config=config)
        else:  # by the kernel that has been tested against numpy: more strips than workgroups
            x = torch.randn(m, n, device="cuda").to(getattr(torch, p.input_type.torch))
            of_both = []
            for c in (config, None):
                out = [torch.full(size, 0xA5, dtype=torch.uint8, device="cuda") for size in shapes(p, m).values()]
                Launcher(compiled(p, sm90a, c))(x.data_ptr(), *(t.data_ptr() for t in out), m, n)
                of_both.append(out)
            assert all(torch.equal(a, b) for a, b in zip(*of_both, strict=True))


@pytest.mark.parametrize("overlap", ["late", "early"])
@pytest.mark.parametrize("which", ORIENTATIONS)
def test_launches_that_begin_while_the_kernel_ahead_ends(which, overlap):
    """X comes from the kernel ahead, and the one behind writes over X and reads the results; plain and in a graph."""
    rows, columns = ORIENTATIONS[which]
    p = QuantizeProblem(n=2048, format="f8E4M3FN", rows=rows, columns=columns)
    code = compiled(p, sm90a, replace(default(p, sm90a), overlap=overlap))
    assert code.overlaps
    launch, m = Launcher(code), 2048
    given = torch.randn(6, m, p.n, device="cuda").bfloat16()
    x = torch.zeros_like(given[0])
    out = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in shapes(p, m).values()]
    kept = [torch.zeros(len(given), *t.shape, dtype=torch.uint8, device="cuda") for t in out]

    def all_of_them(wait=lambda: None):
        for i, wanted in enumerate(given):
            x.copy_(wanted)
            wait()
            launch(x.data_ptr(), *(t.data_ptr() for t in out), m, p.n)
            launch(x.data_ptr(), *(t.data_ptr() for t in out), m, p.n)  # our own ahead of our own
            wait()
            for to, t in zip(kept, out, strict=True):
                to[i].copy_(t)

    all_of_them(torch.cuda.synchronize)
    want = [t.clone() for t in kept]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    for run_them in (all_of_them, graph.replay):
        for _ in range(5):
            for t in (x, *out, *kept):
                t.zero_()
            run_them()
            assert all(torch.equal(a, b) for a, b in zip(kept, want, strict=True))


@pytest.mark.parametrize(("which", "n", "m"), [("rows", 576, 37), ("columns", 90, 64), ("both", 96, 32)])
@pytest.mark.parametrize("format", FORMATS)
def test_tails_and_padded_rows(which, n, m, format):
    rows, columns = ORIENTATIONS[which]
    p = QuantizeProblem(n=n, format=format, rows=rows, columns=columns, align_x=2)
    run(p, numbers(p, m), pad=3)


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_poison_their_block(dtype, format):
    p = QuantizeProblem(n=64, dtype=dtype, format=format, columns=True)
    x = numbers(p, 64)
    x[5, 40], x[33, 3], x[40, 4] = np.nan, -np.inf, np.inf
    got = run(p, x)
    assert got["scales"][5, 1] == got["scales"][33, 0] == got["scales"][40, 0] == 255
    assert (got["scales"] == 255).sum() == 3
    assert got["scales_t"][40, 0] == got["scales_t"][3, 1] == got["scales_t"][4, 1] == 255


@pytest.mark.parametrize("format", FORMATS)
def test_every_bf16_once(format):
    """All 65536 bit patterns, each beside smaller ones: 2^16 numbers of the whole range, ties, subnormals."""
    p = QuantizeProblem(n=2048, format=format, columns=True)
    bits = np.arange(1 << 16, dtype=np.uint32).reshape(32, 2048)
    x = (bits << 16).view(np.float32).astype(np.float64)
    run(p, np.where(np.isfinite(x), x, 0.0))
    blocks = np.repeat(2.0 ** np.arange(-120, 120)[:, None], 2048, 1)[:224]  # one binade a row, all its numbers
    fraction = 1 + np.arange(2048) % 128 / 128
    run(p, blocks * fraction * np.where(np.arange(2048) % 3, 1, -1) * 2.0 ** -(np.arange(2048) // 128 % 6))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", FORMATS)
def test_f16_blocks_of_every_size_beside_each_other(format, mode):
    """Both orientations: columns and rows of all binades, whole blocks of subnormals and zeros among them."""
    rng = np.random.default_rng(0)
    down, across = (2.0 ** -rng.integers(0, 40, (many, 1)) for many in (512, 1024))
    x = rng.uniform(-65504, 65504, (512, 1024)) * np.where(rng.random((512, 1)) < 0.5, down, 1) * across.T
    x[:64] = rng.integers(-3, 4, (64, 1024)) * 2.0**-24
    p = QuantizeProblem(n=1024, dtype="f16", format=format, columns=True, mode=mode)
    run(p, x.astype(np.float16).astype(np.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", FORMATS)
def test_every_f16_as_the_largest_of_a_block(format, mode):
    """Scales of all of them, subnormals too: one block a row, whose other numbers are fractions of its largest."""
    largest = np.arange(31 << 10, dtype=np.uint16).view(np.float16).astype(np.float64)
    x = largest[:, None] * np.linspace(-1, 1, 32)
    p = QuantizeProblem(n=32, dtype="f16", format=format, rows=True, columns=False, mode=mode)
    run(p, x.astype(np.float16).astype(np.float64))
