"""Where TMA leaves an operand, where wgmma looks for it, and who holds and stores what of C: on numbers, without a GPU.

The swizzles and canonical layouts are written down here a second time, from the PTX ISA (8.4, "Strides", "Matrix
Descriptor Format", "Swizzling modes")."""

from __future__ import annotations

from itertools import product

import pytest

from flykernels.dtypes import bf16
from flykernels.targets.sm90a_wgmma import SharedOperand, sums_layout
from templates.gemm.problem import GemmProblem
from templates.gemm.sm90a_config import Sm90aConfig as Config
from templates.gemm.sm90a_config import boxes, shared_memory, shared_operands, tensor_maps

LAYOUTS = {"NN": ("row", "row"), "NT": ("row", "col"), "TN": ("col", "row"), "TT": ("col", "col")}
CONFIGS = [
    Config(),
    Config(tile_n=96),
    Config(tile_m=64, tile_n=112, groups=(1, 1)),
    Config(tile_k=128, stages=2),
    Config(cluster=(2, 2)),
    Config(tile_n=320, groups=(1, 2), stages=3),
    Config(tile_m=256, tile_n=128),
    Config(tile_m=16, tile_n=32, tile_k=128, groups=(1, 1)),
    Config(tile_m=64, tile_n=128, groups=(1, 2)),
]


def field(bits: int, low: int, count: int) -> int:
    return bits >> low & (1 << count) - 1


def swizzled(address: int, width: int) -> int:
    """16-byte chunks of `width` bytes change places with the number of the 128-byte line they are in."""
    lines = {128: 7, 64: 3, 32: 1}[width]
    return address ^ (address >> 7 & lines) << 4


def arrived(operand: SharedOperand, sharers: int) -> dict[int, tuple[int, int]]:
    """Byte -> (row, k) once all workgroups that share the tile have brought their boxes."""
    how, image = boxes(operand, sharers), {}
    for workgroup in range(sharers):
        for size, row, k in how.at:
            start, row0, k0 = (x + workgroup * s for x, s in zip((size, row, k), how.share))
            for outer, inner in product(range(how.box[1]), range(how.box[0])):
                at = swizzled(start + (outer * how.box[0] + inner) * operand.dtype.bytes, operand.swizzle)
                coordinate = (row0 + outer, k0 + inner) if operand.along_k else (row0 + inner, k0 + outer)
                assert image.setdefault(at, coordinate) == coordinate
    return image


def read(operand: SharedOperand, row0: int, rows: int, k0: int) -> dict[tuple[int, int], int]:
    """(row, k) -> the byte where one wgmma looks for it: the PTX ISA's canonical layouts."""
    bits = operand.descriptor_bits()
    leading, stride = field(bits, 16, 14) * 16, field(bits, 32, 14) * 16
    width = {1: 128, 2: 64, 3: 32}[field(bits, 62, 2)]
    start, across, found = operand.step_bytes(row0, k0), width // 2, {}
    for r, k in product(range(rows), range(16)):
        if operand.along_k:
            at = r % 8 * width + r // 8 * stride + k * 2
        else:
            at = r % across * 2 + r // across * leading + k % 8 * width + k // 8 * stride
        found[row0 + r, k0 + k] = swizzled(start + at, width)
    return found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_wgmma_looks_where_tma_left_it(layout, config):
    a, b = layout
    A, B = shared_operands(GemmProblem(256, 512, "bf16", "bf16", a=a, b=b), config)
    blocks = [64 * (config.blocks * g + i) for g in range(config.groups[0]) for i in range(config.blocks)]
    columns = [config.columns * g for g in range(config.groups[1])]
    for operand, sharers, starts, rows in (
        (A, config.cluster[1], blocks, 64),
        (B, config.cluster[0], columns, config.columns),
    ):
        image = arrived(operand, sharers)
        assert len(image) == operand.rows * operand.depth and max(image) < operand.bytes
        for row0, k0 in product(starts, range(0, operand.depth, 16)):
            for (r, k), at in read(operand, row0, rows, k0).items():
                assert r >= operand.rows or image[at] == (r, k)


def test_descriptor_fields():
    along = SharedOperand(128, 64, True, 128, bf16).descriptor_bits()
    assert (field(along, 0, 14), field(along, 16, 14), field(along, 32, 14)) == (0, 1, 1024 >> 4)
    assert (field(along, 46, 16), field(along, 62, 2)) == (0, 1)  # base offset 0; 128-byte swizzle
    across = SharedOperand(96, 64, False, 64, bf16).descriptor_bits()
    assert (field(across, 16, 14), field(across, 32, 14)) == (64 * 64 >> 4, 512 >> 4)
    assert field(across, 62, 2) == 2
    assert field(SharedOperand(48, 64, False, 32, bf16).descriptor_bits(), 62, 2) == 3


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_stages_begin_where_the_swizzle_does(layout, config):
    p = GemmProblem(256, 512, "bf16", "bf16", a=layout[0], b=layout[1])
    a, b = shared_operands(p, config)
    assert a.bytes % 1024 == 0 and b.bytes % b.alignment == 0 and shared_memory(p, config).stage % 1024 == 0
    for operand in (a, b):
        assert all(start % operand.alignment == 0 for start, *_ in boxes(operand, 1).at)


def test_tensor_maps_keep_what_the_driver_demands():
    for (a, b), config in product(LAYOUTS.values(), CONFIGS):
        p = GemmProblem(256, 512, "bf16", "bf16", a=a, b=b, batched=True)
        for t in tensor_maps(p, Config(**{**config.key(), "tma_store": config.columns % 64 == 0})):
            assert all(1 <= n <= 256 for n in t.box) and t.box[0] * 2 <= t.swizzle and t.axes[0][1] == 1
            sizes, strides = t.encoded(
                {"m": 1, "batch": 3, "a_row": 512, "a_col": 8, "b_row": 256, "b_col": 512, "c_row": 256}
                | {"a_batch": 0, "b_batch": 512 * 256, "c_batch": 256}
            )
            assert len(sizes) == len(t.box) == 3 and all(s % 8 == 0 for s in strides[1:])
            assert sizes[2] == (1 if t.of == "a" else 3)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_sum_has_one_holder(config):
    tv = sums_layout(config.columns, config.blocks, config.groups)
    held = tv.holders()
    assert len(held) == tv.tile[0] * tv.tile[1] and all(len(h) == 1 for h in held.values())
    # PTX ISA, "Matrix Fragments for wgmma.mma_async.m64nNk16": row and column of d0..d7 of a thread
    for thread in range(128):
        for i in range(8):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 4 // 2)
            column = i // 4 * 8 + thread % 4 * 2 + i % 2
            origin, walk = tv.origin(thread), tv.walk((i % 4 // 2, i // 4, 0))
            assert (origin[0] + walk[0], origin[1] + walk[1] + i % 2) == (row, column)
