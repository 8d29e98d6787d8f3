"""Matrix instructions of every shape and format, against products of the matrices that the layouts describe."""

import numpy as np
import pytest

from bench.simcases.floats import e8m0, values

from .asm_kernel import run, words

BODY = """
s_load_dwordx8 s[4:11], s[0:1], 0x0
s_load_dwordx2 s[12:13], s[0:1], 0x20
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
{loads}
s_waitcnt vmcnt(0)
s_nop 1
{mfma}
s_nop 15
s_nop 15
{stores}
"""


def execute(mfma: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, scale=None, acc=False) -> np.ndarray:
    """Registers [n, 64] of A, B, C -> D's registers; A from v16, B from v32, C and D in v64 or a0, scales in v2, v3."""
    scale = np.zeros((2, 64), np.uint32) if scale is None else scale
    d = words(c.size).reshape(c.shape)
    load = lambda first, array, base: [
        f"global_load_dword v{first + k}, v1, s[{base}:{base + 1}] offset:{256 * k}" if k < 15 else
        f"v_add_u32 v4, {256 * k}, v1\nglobal_load_dword v{first + k}, v4, s[{base}:{base + 1}]"
        for k in range(len(array))
    ]  # fmt: skip
    loads = load(16, a, 4) + load(32, b, 6) + load(64, c, 8) + load(2, scale, 10)
    stores = [f"v_add_u32 v4, {256 * k}, v1\nglobal_store_dword v4, v{64 + k}, s[12:13]" for k in range(len(c))]
    if acc:
        move = "\n".join(f"v_accvgpr_write_b32 a{k}, v{64 + k}" for k in range(len(c)))
        back = "\n".join(f"v_accvgpr_read_b32 v{64 + k}, a{k}" for k in range(len(c)))
        mfma = f"{move}\ns_nop 1\n{mfma}\ns_nop 15\ns_nop 15\n{back}"
    body = BODY.format(loads="\n".join(loads), mfma=mfma, stores="\n".join(stores))
    run(body, [a, b, c, scale, d], arguments="ppppp").raise_for_findings()
    return d


def place_d(d: np.ndarray, rows: int) -> np.ndarray:
    """D's registers -> matrix: lane holds column lane % rows; register r of group g is row 4 g + r % 4 + 4 groups (r
    // 4)."""
    groups, out = 64 // rows, np.zeros((rows, rows), d.dtype)
    for r in range(len(d)):
        for lane in range(64):
            out[4 * (lane // rows) + r % 4 + 4 * groups * (r // 4), lane % rows] = d[r, lane]
    return out


def registers_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes [64, e] of `bits` bits a lane, packed low first -> registers [n, 64]."""
    e = codes.shape[1]
    out = np.zeros((bits * e // 32, 64), np.uint32)
    for lane in range(64):
        word = sum(int(v) << bits * k for k, v in enumerate(codes[lane]))
        for r in range(len(out)):
            out[r, lane] = word >> 32 * r & 0xFFFFFFFF
    return out


SHAPES = [
    ("16x16x32_bf16", 16, 8, "bf16"), ("32x32x16_bf16", 32, 8, "bf16"), ("16x16x32_f16", 16, 8, "f16"),
    ("32x32x16_f16", 32, 8, "f16"), ("16x16x16_f16", 16, 4, "f16"), ("32x32x8_f16", 32, 4, "f16"),
    ("16x16x16_bf16", 16, 4, "bf16"), ("16x16x4_f32", 16, 1, "f32"), ("32x32x2_f32", 32, 1, "f32"),
    ("16x16x32_fp8_fp8", 16, 8, "e4m3"), ("32x32x16_fp8_fp8", 32, 8, "e4m3"), ("16x16x32_bf8_bf8", 16, 8, "e5m2"),
    ("16x16x64_i8", 16, 16, "i8"), ("32x32x32_i8", 32, 16, "i8"),
]  # fmt: skip


def random_codes(r, shape, kind):
    """(codes, their values) of a type."""
    if kind == "i8":
        x = r.integers(-128, 128, shape)
        return x & 255, x.astype(np.float64)
    if kind in ("e4m3", "e5m2"):
        table = values(kind)
        good = np.flatnonzero(np.isfinite(table) & (np.abs(table) < 32))
        x = r.choice(good, shape)
        return x, table[x]
    f = r.standard_normal(shape).astype(np.float32)
    if kind == "f32":
        return f.view(np.uint32), f.astype(np.float64)
    if kind == "f16":
        return f.astype(np.float16).view(np.uint16), f.astype(np.float16).astype(np.float64)
    u = f.view(np.uint32) >> 16
    return u, (u << 16).astype(np.uint32).view(np.float32).astype(np.float64)


BITS = {"bf16": 16, "f16": 16, "f32": 32, "e4m3": 8, "e5m2": 8, "i8": 8}


@pytest.mark.parametrize(("shape", "rows", "elements", "kind"), SHAPES, ids=[s[0] for s in SHAPES])
def test_shape(shape, rows, elements, kind):
    """Lane = row + rows * group; group g holds k = elements * g + e."""
    r, groups = np.random.default_rng(0), 64 // rows
    matrices, packed = [], []
    for _ in range(2):
        codes, x = random_codes(r, (rows, groups * elements), kind)
        lanes = codes.reshape(rows, groups, elements).swapaxes(0, 1).reshape(64, elements)
        matrices.append(x)
        packed.append(registers_of(lanes, BITS[kind]))
    out = "i32" if kind == "i8" else "f32"
    count = rows * rows // 64
    c = r.integers(-9, 9, (count, 64))
    c = c.astype(np.int32).view(np.uint32) if out == "i32" else c.astype(np.float32).view(np.uint32)
    a, b = (f"v[{s}:{s + len(p) - 1}]" if len(p) > 1 else f"v{s}" for s, p in zip((16, 32), packed, strict=True))
    for acc in (False, True):
        where = f"a[0:{count - 1}]" if acc else f"v[64:{63 + count}]"
        d = execute(f"v_mfma_{out}_{shape} {where}, {a}, {b}, {where}", *packed, c, acc=acc)
        view = np.int32 if out == "i32" else np.float32
        want = matrices[0] @ matrices[1].T + place_d(c.view(view).astype(np.float64), rows)
        np.testing.assert_allclose(place_d(d.view(view), rows), want, rtol=1e-5, atol=1e-4)


BLOCKS = [
    ("4x4x1_16b_f32", 4, 1, "f32"), ("4x4x4_16b_f16", 4, 4, "f16"), ("4x4x4_16b_bf16", 4, 4, "bf16"),
    ("4x4x4_16b_i8", 4, 4, "i8"), ("16x16x1_4b_f32", 16, 1, "f32"), ("16x16x4_4b_f16", 16, 4, "f16"),
    ("16x16x4_4b_bf16", 16, 4, "bf16"), ("16x16x4_4b_i8", 16, 4, "i8"), ("32x32x1_2b_f32", 32, 1, "f32"),
    ("32x32x4_2b_f16", 32, 4, "f16"), ("32x32x4_2b_bf16", 32, 4, "bf16"), ("32x32x4_2b_i8", 32, 4, "i8"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "rows", "elements", "kind"), BLOCKS, ids=[s[0] for s in BLOCKS])
def test_blocks(shape, rows, elements, kind):
    """Lane = row + rows * block; a block's registers of D as those of a single product, 4x4: register = row."""
    r, blocks = np.random.default_rng(0), 64 // rows
    values_of, packed = [], []
    for _ in range(2):
        codes, x = random_codes(r, (blocks * rows, elements), kind)
        values_of.append(x.reshape(blocks, rows, elements))
        packed.append(registers_of(codes, BITS[kind]))
    out, view = ("i32", np.int32) if kind == "i8" else ("f32", np.float32)
    count = rows * rows * blocks // 64
    c = r.integers(-9, 9, (count, 64)).astype(view).view(np.uint32)
    a, b = (f"v[{s}:{s + len(p) - 1}]" if len(p) > 1 else f"v{s}" for s, p in zip((16, 32), packed, strict=True))
    d = execute(f"v_mfma_{out}_{shape} v[64:{63 + count}], {a}, {b}, v[64:{63 + count}]", *packed, c)
    each = count // blocks
    for block in range(blocks):
        if rows == 4:
            place = lambda x, block=block: x[:, 4 * block : 4 * block + 4]
        else:
            place = lambda x, block=block: place_d(x[each * block : each * (block + 1)], rows)
        want = values_of[0][block] @ values_of[1][block].T + place(c.view(view).astype(np.float64))
        np.testing.assert_allclose(place(d.view(view)), want, rtol=1e-5, atol=1e-4)


FORMATS = {"e4m3": 0, "e5m2": 1, "e2m3": 2, "e3m2": 3, "e2m1": 4}
WIDTH = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}


def k_of(fmt: str, rows: int, group: int, e: int) -> int:
    """Which k a lane's element is: 32 in a row, but two runs of 16 for 8-bit formats."""
    groups = 64 // rows
    return 16 * groups * (e // 16) + 16 * group + e % 16 if WIDTH[fmt] == 8 else 32 * group + e


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(("fa", "fb"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e2m1"), ("e2m3", "e3m2"),
                                        ("e4m3", "e2m1"), ("e2m1", "e5m2"), ("e3m2", "e4m3")])  # fmt: skip
@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_scaled(rows, fa, fb, byte):
    """Blocks of 32 along k, each with the scale of lane group k // 32, in the byte of the register that op_sel
    selects."""
    if byte and (fa, fb) not in (("e4m3", "e4m3"), ("e2m1", "e2m1")):
        byte = 3
    r, groups = np.random.default_rng(byte), 64 // rows
    K = 32 * groups
    matrices, packed, scales = [], [], []
    for fmt in (fa, fb):
        table = values(fmt)
        good = np.flatnonzero(np.isfinite(table) & (np.abs(table) < 32))
        codes = r.choice(good, (rows, K))
        lanes = np.zeros((64, 32), np.int64)
        for lane in range(64):
            for e in range(32):
                lanes[lane, e] = codes[lane % rows, k_of(fmt, rows, lane // rows, e)]
        word = r.integers(0, 2**32, 64, np.uint64).astype(np.uint32)
        exponent = r.integers(120, 134, 64).astype(np.uint32)
        scales.append(word & ~np.uint32(255 << 8 * byte) | exponent << np.uint32(8 * byte))
        of_block = e8m0(exponent.astype(np.uint8)).reshape(groups, rows).T  # [row, block]
        matrices.append(table[codes] * np.repeat(of_block, 32, axis=1))
        packed.append(registers_of(lanes, WIDTH[fmt]))
    count = rows * rows // 64
    c = np.zeros((count, 64), np.uint32)
    low, high = byte & 1, byte >> 1
    a, b = (f"v[{s}:{s + len(p) - 1}]" for s, p in zip((16, 32), packed, strict=True))
    d = f"v[64:{63 + count}]"
    shape = "16x16x128" if rows == 16 else "32x32x64"
    text = (
        f"v_mfma_scale_f32_{shape}_f8f6f4 {d}, {a}, {b}, {d}, v2, v3 op_sel:[{low},{low},0] op_sel_hi:[{high},{high},0]"
    )
    text += f" cbsz:{FORMATS[fa]} blgp:{FORMATS[fb]}"
    got = place_d(execute(text, *packed, c, np.stack(scales)).view(np.float32), rows)
    bound = np.abs(matrices[0]) @ np.abs(matrices[1]).T * 2.0**-18 + 1e-6
    assert (np.abs(got - matrices[0] @ matrices[1].T) <= bound).all()


def test_constant_accumulator_and_unscaled():
    r = np.random.default_rng(3)
    codes = r.choice(np.flatnonzero(np.abs(values("e4m3")) < 32), (2, 64, 32))
    a, b = (registers_of(x, 8) for x in codes)
    c = words(256).reshape(4, 64)
    one = execute("v_mfma_f32_16x16x128_f8f6f4 v[64:67], v[16:23], v[32:39], 0", a, b, c)
    two = execute("v_mfma_f32_16x16x128_f8f6f4 v[64:67], v[16:23], v[32:39], 2.0", a, b, c)
    np.testing.assert_allclose(two.view(np.float32), one.view(np.float32) + 2, rtol=1e-6)
